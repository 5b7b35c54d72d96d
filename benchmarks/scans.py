"""The scan h_t = a_t h_{t-1} + x_t, forward and backward, against every other way of computing it on a CPU.

    pip install mambapy torchlpc accelerated-scan        peers that are not installed are left out, and it is said

A figure is one row a case: ours against the fastest peer. Where a peer has an advantage it keeps it: one that takes no
initial state is spared it and its gradient, while ours computes both; one that wants features before time pays for the
transposes, as the library's layout is (B, T, D).
A peer whose values or gradients are wrong is said to be so, and does not count either.

Decays lie in (0.99, 0.9999), so that no product of up to 8192 of them is a denormal number: these are slow, and the
peers that multiply decays would meet them.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import Row, paired
from glissando.kernels.scan import reference, scan

GOAL = 1.5
#: largest error allowed, relative to the largest magnitude; sums of 8192 terms in float32
TOLERANCE = 1e-3

#: (a, x, h0) -> h; a (D) or (B, T, D), x and h (B, T, D), h0 (B, D)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class NotHere(Exception):
    """A peer that cannot take part, and why."""


@dataclass(frozen=True)
class Case:
    """One shape and kind; everything in float32 or complex64."""

    batch: int
    length: int
    is_complex: bool
    varying: bool
    size: int = 256

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a, x and h0, which want gradients, and the gradient that arrives at h."""
        rng = torch.Generator().manual_seed(0)
        dtype = torch.complex64 if self.is_complex else torch.float32
        shape = (self.batch, self.length, self.size)
        a = 0.99 + 0.0099 * torch.rand(shape if self.varying else shape[2:], generator=rng)
        if self.is_complex:
            a = torch.polar(a, 2 * math.pi * torch.rand(a.shape, generator=rng))
        x, grad = (torch.randn(shape, generator=rng, dtype=dtype) for _ in range(2))
        h0 = torch.randn(self.batch, self.size, generator=rng, dtype=dtype)
        return a.requires_grad_(), x.requires_grad_(), h0.requires_grad_(), grad


CASES: dict[str, Case] = {
    f"{batch}x{length}-{'complex' if is_complex else 'real'}-{'varying' if varying else 'constant'}": Case(
        batch, length, is_complex, varying
    )
    for batch, length in ((8, 1024), (1, 8192))
    for is_complex in (False, True)
    for varying in (False, True)
}


@dataclass(frozen=True)
class Peer:
    """`make(case)` imports what it needs and returns the call, or raises NotHere."""

    name: str
    make: Callable[[Case], Run]
    takes_h0: bool = False


def _ours(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    return scan(a, x, h0)[0]


def _full(a: Tensor, x: Tensor) -> Tensor:
    """A constant a, as (B, T, D) without memory of its own."""
    return a.expand_as(x)


def _loop(case: Case) -> Run:
    return lambda a, x, h0: reference(a if case.varying else a[None, None], x, h0)[0]


def _associative_scan(case: Case) -> Run:
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def run(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        both: Any = associative_scan(combine, (_full(a, x), x), 1, combine_mode="generic")
        return both[1]

    return run


def _mambapy(case: Case) -> Run:
    if case.is_complex:
        raise NotHere("its backward does not conjugate, so complex gradients are wrong")
    pscan = _module("mambapy.pscan", "mambapy").pscan
    # (B, L, D, N), with our features as its N: twice as fast here as with them as its D.
    return lambda a, x, h0: pscan(_full(a, x).unsqueeze(2), x.unsqueeze(2)).squeeze(2)


def _padded_fft(case: Case) -> Run:
    """h = IFFT(FFT(x) FFT(K)) with K_t = a^t, padded to n = 2T; transposed, which pays where time is strided."""
    if case.varying:
        raise NotHere("constant a only")
    n, t = 2 * case.length, torch.arange(case.length)
    to, back = (torch.fft.fft, torch.fft.ifft) if case.is_complex else (torch.fft.rfft, torch.fft.irfft)

    def run(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        kernel = torch.exp(torch.log(a)[:, None] * t)
        return back(to(x.mT.contiguous(), n) * to(kernel, n), n)[..., : case.length].mT

    return run


def _accelerated_scan(case: Case) -> Run:
    tree = _module("accelerated_scan.ref", "accelerated-scan").scan

    def run(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        return tree(_full(a, x).mT.contiguous(), x.mT.contiguous()).mT

    return run


def _torchlpc(case: Case) -> Run:
    recurrence = _module("torchlpc.recurrence", "torchlpc").Recurrence.apply

    def run(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        rows = recurrence(_rows(_full(a, x)), _rows(x), h0.flatten())
        return rows.unflatten(0, (case.batch, case.size)).mT

    return run


def _rows(tensor: Tensor) -> Tensor:
    return tensor.mT.flatten(0, 1).contiguous()


PEERS = [
    Peer("loop, unbind", _loop, takes_h0=True),
    Peer("torch associative_scan", _associative_scan),
    Peer("mambapy pscan", _mambapy),
    Peer("padded FFT", _padded_fft),
    Peer("accelerated-scan ref", _accelerated_scan),
    Peer("torchlpc", _torchlpc, takes_h0=True),
]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotHere(f"not installed (pip install {package}): {error}") from error


def scan_row(name: str, rounds: int) -> Row:
    """One case of CASES against its fastest peer; every peer's figure is printed."""
    case, best = CASES[name], None
    for peer in PEERS:
        try:
            ours, theirs, ratio = _against(peer, case, rounds)
        except NotHere as reason:
            print(f"  {name}: {peer.name}: left out: {reason}", flush=True)
            continue
        print(f"  {name}: {peer.name}: {theirs:,.4g} tokens/s, ours {ours:,.4g}, ratio {ratio:.2f}", flush=True)
        if best is None or ratio < best[2]:
            best = ours, theirs, ratio, peer.name
    assert best is not None, "the loop always runs"
    ours, theirs, ratio, rival = best
    return Row(f"scan {name}", ours, theirs, "tokens/s", ratio, f"{GOAL}x", ratio >= GOAL, rival)


def _against(peer: Peer, case: Case, rounds: int) -> tuple[float, float, float]:
    """Medians of tokens/s, ours and the peer's, and of their ratio. Raises NotHere if the peer fails or is wrong."""
    a, x, h0, grad = case.tensors()
    theirs = peer.make(case)
    tokens = case.batch * case.length
    try:
        n_inputs = 3 if peer.takes_h0 else 2
        _check(theirs, [a, x, h0], n_inputs, grad)
        run = _timed(theirs, [a, x, h0], n_inputs, grad, tokens)
        run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise NotHere(f"fails: {type(error).__name__}: {error}") from error
    return paired(_timed(_ours, [a, x, h0], 3, grad, tokens), run, rounds)  # a failure of ours is reported as one


def _timed(run: Run, inputs: list[Tensor], n_inputs: int, grad: Tensor, tokens: int) -> Callable[[], float]:
    """Tokens/s of one pass forward and backward, to the gradients of the first `wanted` inputs."""

    def once() -> float:
        began = time.perf_counter()
        torch.autograd.grad(run(*inputs), inputs[:n_inputs], grad)
        return tokens / (time.perf_counter() - began)

    return once


def _check(run: Run, inputs: list[Tensor], n_inputs: int, grad: Tensor) -> None:
    """Values and gradients against the loop in double precision. Raises NotHere where they differ."""
    wide = torch.promote_types(grad.dtype, torch.float64)
    a, x, h0 = (v.detach().to(wide).requires_grad_() for v in inputs)
    h = reference(a if a.ndim == 3 else a[None, None], x, h0 if n_inputs == 3 else torch.zeros_like(h0))[0]
    expected = [h, *torch.autograd.grad(h, [a, x, h0][:n_inputs], grad.to(wide))]
    h = run(*inputs)
    got = [h, *torch.autograd.grad(h, inputs[:n_inputs], grad)]
    names = ("values", "gradient of a", "gradient of x", "gradient of h0")[: n_inputs + 1]
    for name, given, right in zip(names, got, expected, strict=True):
        gap = ((given - right).abs().max() / right.abs().max()).item()
        if not gap <= TOLERANCE:
            raise NotHere(f"wrong {name}: off by {gap:.1e} of the largest")
