"""The linear recurrence h_t = a_t h_{t-1} + x_t along time, real or complex, with gradients for a, x and h0.

Backward, with g_t the gradient that arrives at h_t (and that of h_last added to g_T):

    s_t = g_t + conj(a_{t+1}) s_{t+1}        a scan that runs backward
    dx_t = s_t,    da_t = s_t conj(h_{t-1}),    dh0 = conj(a_1) s_1

so that only a, h and h0 are kept, and memory is linear in T.

Martin and Cundy 2018, arXiv 1709.04057; Blelloch 1990, "Prefix sums and their applications".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from glissando.kernels.compiled import (
    HAS_TRITON,
    kernels_serve,
    require_backend,
    require_triton,
    use_numba,
    warn_of_the_loop,
)
from glissando.kernels.loop import exporting, over_time
from glissando.kernels.plain import resolved, without_derivatives

Backend = Literal["auto", "reference", "numba", "triton"]


def scan(a: Tensor, x: Tensor, h0: Tensor | None = None, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + x_t for t = 1..T, h_0 = h0 (zeros if None) -> every h_t and the last one.

    x   (B, T, *F), any T >= 1
    a   (*F): constant in time; or (B, T, *F), whose B and T may be 1
    h0  (B, *F)
    ->  h (B, T, *F) and h_last (B, *F), both in the common type of a, x and h0, float32 at least; but h in half
        precision where a and x are

    h_last stays in float32, as it is what a stream carries on. Gradients need h, so it must not be changed in place.

    backend  `auto`       `numba` on a CPU, `triton` on CUDA where it is installed; `reference` elsewhere and for T = 1
             `numba`      one pass over memory, rows spread over threads where that pays
             `triton`     chunks of time in parallel; forms products of a over chunks
             `reference`  a loop under autograd

    Raises ValueError for shapes that do not fit, ConfigError for a backend that cannot run here.
    """
    if exporting():
        return _loop(_check(a, x, h0), x, h0)
    a = _check(a, x, h0)
    dtype = torch.promote_types(a.dtype, x.dtype)
    exact = torch.promote_types(dtype if h0 is None else torch.promote_types(dtype, h0.dtype), torch.float32)
    a, x = a.to(exact), x.to(exact)
    h0 = x.new_zeros(x.shape[0], *x.shape[2:]) if h0 is None else h0.to(exact)
    backend = resolved(backend)
    chosen = _automatic(x) if backend == "auto" else backend
    if chosen == "reference":
        h, last = reference(a, x, h0)
    elif torch.compiler.is_compiling() and x.is_complex():
        a, h0 = (torch.view_as_real(z.resolve_conj()) for z in (a, h0))
        results = _compiled_pairs(a, x, h0, chosen)
        h, last = (torch.complex(*pairs.unbind(-1)) for pairs in results)
    elif torch.compiler.is_compiling():
        h = _operation(a, x, h0, chosen, False)
        last = h[:, -1].clone()
    elif torch.is_grad_enabled() and (a.requires_grad or x.requires_grad or h0.requires_grad):
        h, last = _Scan.apply(a, x, h0, chosen)
    else:
        h = _kernels(chosen, x).forward(a, x, h0)
        last = h[:, -1].clone()  # a view would keep all of h alive in a stream's state
    is_half = dtype in (torch.float16, torch.bfloat16) and not h.is_complex()
    return h.to(dtype) if is_half else h, last


def scan_pairs(a: Tensor, x: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`scan` of complex numbers whose results are pairs of reals: h (B, T, *F, 2) and h_last (B, *F, 2).

    a (*F, 2) or (B, T, *F, 2) and h0 (B, *F, 2), pairs too; x (B, T, *F), real or complex.

    In a compiled graph no result is complex: Inductor generates no code for complex numbers, and before PyTorch 2.13
    it overlooks that view_as_real(h) shares memory with h, and writes over what the backward of the scan reads.
    """
    if exporting():
        return _loop_of_pairs(a, x, h0)
    if torch.compiler.is_compiling():
        backend = _automatic(x)
        if backend != "reference":
            return _compiled_pairs(a if a.ndim > x.ndim else a[None, None], x, h0, backend)
    h, last = scan(torch.view_as_complex(a), x, None if h0 is None else torch.view_as_complex(h0))
    return torch.view_as_real(h), torch.view_as_real(last)


def _compiled_pairs(a: Tensor, x: Tensor, h0: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """One operation of a graph. a and h0 are pairs of reals, and so are the results."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.stack((x, torch.zeros_like(x)), -1)
    exact = torch.promote_types(torch.promote_types(a.dtype, x.dtype), a.dtype if h0 is None else h0.dtype)
    h0 = x.new_zeros(x.shape[0], *x.shape[2:], dtype=exact) if h0 is None else h0.to(exact)
    h = _operation(a.to(exact), x.to(exact), h0, backend, True)
    return h, h[:, -1].clone()


def _loop(a: Tensor, x: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition as one operation of a graph, for any length."""

    def step(carry: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        h = now[0] * carry[0] + now[1]
        return (h,), h

    start = x.new_zeros(x.shape[0], *x.shape[2:]) if h0 is None else h0
    h, (last,) = over_time(step, (start,), (a.expand_as(x), x))
    return h, last


def _loop_of_pairs(a: Tensor, x: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same of pairs (N, 2) or (B, T, N, 2), for runtimes without complex numbers; x (B, T, N), or 2 N for pairs."""
    features = a.shape[-2]
    x = x.unflatten(-1, (features, 2)) if x.shape[-1] != features else torch.stack((x, torch.zeros_like(x)), -1)

    def step(carry: tuple[Tensor, ...], now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        (p, q), (u, v) = now[0].unbind(-1), carry[0].unbind(-1)
        h = torch.stack((p * u - q * v, p * v + q * u), -1) + now[1]
        return (h,), h

    start = x.new_zeros(x.shape[0], *x.shape[2:]) if h0 is None else h0.to(x.dtype)
    h, (last,) = over_time(step, (start,), (a.expand_as(x), x))
    return h, last


def reference(a: Tensor, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, one step after the other; a (B or 1, T or 1, *F)."""
    if x.shape[1] == 1:
        h = torch.addcmul(x, a, h0.unsqueeze(1))
        return h, h[:, 0].clone()  # who changes h must not change the state
    # unbind, not x[:, t]: the backward of an index writes a tensor as long as x, for every t.
    factors = a.unbind(1) if a.shape[1] > 1 else a.unbind(1) * x.shape[1]
    h, steps = h0, []
    for factor, entry in zip(factors, x.unbind(1), strict=True):
        h = factor * h + entry
        steps.append(h)
    return torch.stack(steps, 1), h


def _check(a: Tensor, x: Tensor, h0: Tensor | None) -> Tensor:
    """a as (B or 1, T or 1, *F)."""
    if x.ndim < 3 or x.shape[1] < 1:
        raise ValueError(f"scan: x must be (batch, time >= 1, features...), got {tuple(x.shape)}")
    features = x.shape[2:]
    # Numbers of axes come before sizes, and the size that is free before 1, for torch.export.
    if a.ndim == len(features) and a.shape == features:
        a = a[None, None]
    fits = a.ndim == x.ndim and a.shape[2:] == features
    if not fits or a.shape[0] not in (x.shape[0], 1) or a.shape[1] not in (x.shape[1], 1):
        raise ValueError(
            f"scan: a must be {tuple(features)} (constant) or {tuple(x.shape)} (varying; batch and time may be 1) "
            f"for x {tuple(x.shape)}, got {tuple(a.shape)}"
        )
    for name, tensor in (("a", a), ("x", x)) if h0 is None else (("a", a), ("x", x), ("h0", h0)):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"scan: {name} must be floating point or complex, got {tensor.dtype}; use {name}.float()")
        if tensor.device != x.device:
            raise ValueError(f"scan: {name} is on {tensor.device} and x on {x.device}; move them to one device")
    if h0 is not None and h0.shape != (x.shape[0], *features):
        raise ValueError(f"scan: h0 must be {(x.shape[0], *features)} for x {tuple(x.shape)}, got {tuple(h0.shape)}")
    return a


class _Scan(torch.autograd.Function):
    """See the module's docstring for the backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, h0: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        ctx.kernels = _kernels(backend, x)
        h = ctx.kernels.forward(a, x, h0)
        ctx.save_for_backward(a, h, h0)
        return h, h[:, -1].clone()

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        a, h, h0 = ctx.saved_tensors
        return *ctx.kernels.backward(a, h, h0, grad, grad_last), None


def _as_complex(*pairs: Tensor) -> Iterator[Tensor]:
    return (torch.view_as_complex(tensor.contiguous()) for tensor in pairs)


# A kernel as one operation of a graph: torch.compile does not look into it. Without a graph _Scan costs less.


@torch.library.custom_op("glissando::scan", mutates_args=())
def _operation(a: Tensor, x: Tensor, h0: Tensor, backend: str, pairs: bool) -> Tensor:
    run = _kernels(backend, x).forward
    return torch.view_as_real(run(*_as_complex(a, x, h0))) if pairs else run(a, x, h0)


@_operation.register_fake
def _(a: Tensor, x: Tensor, h0: Tensor, backend: str, pairs: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("glissando::scan_backward", mutates_args=())
def _operation_backward(
    a: Tensor, h: Tensor, h0: Tensor, grad: Tensor, backend: str, pairs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    run = _kernels(backend, h).backward
    if not pairs:
        return run(a, h, h0, grad, torch.zeros_like(h0))
    a, h, h0, grad = _as_complex(a, h, h0, grad)
    grad_a, grad_x, grad_h0 = run(a, h, h0, grad, torch.zeros_like(h0))
    return torch.view_as_real(grad_a), torch.view_as_real(grad_x), torch.view_as_real(grad_h0)


@_operation_backward.register_fake
def _(a: Tensor, h: Tensor, h0: Tensor, grad: Tensor, backend: str, pairs: bool) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), h.new_empty(h.shape), h0.new_empty(h0.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, h0, ctx.backend, ctx.pairs = inputs
    ctx.save_for_backward(a, output, h0)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_operation_backward(*ctx.saved_tensors, grad, ctx.backend, ctx.pairs), None, None


_operation.register_autograd(_gradients, setup_context=_keep)


def _automatic(x: Tensor) -> str:
    if x.shape[1] == 1:
        return "reference"  # a step of decoding: one product and one sum
    if kernels_serve(x.device):
        return "numba"
    if x.device.type == "cuda" and HAS_TRITON:
        return "triton"
    warn_of_the_loop("scan", x)
    return "reference"


def _kernels(backend: str, x: Tensor) -> Any:
    """The class whose `forward` gives h (B, T, *F) for a (B or 1, T or 1, *F), and whose `backward` the gradients.

    Raises UnknownNameError for a name that is no backend, ConfigError for one that cannot run here.
    """
    require_backend("scan", backend, get_args(Backend))
    if backend == "triton":
        require_triton("scan", x)
        from glissando.kernels.scan_triton import TritonScan

        return TritonScan
    use_numba("scan", backend, x)
    from glissando.kernels.scan_numba import NumbaScan

    return NumbaScan
