"""The scan with real 2 x 2 blocks on a GPU: chunks of time in parallel, as in glissando.ops.scan_triton.

A chunk of steps maps its incoming state c to P c + e, with P the product of its blocks and e what it makes of zero:

1. every chunk but the last one, from zero, writes only its P and e;
2. the same scan over chunks, h_k = P_k h_{k-1} + e_k, gives every chunk's incoming state;
3. every chunk, from its incoming state, writes its results.

The adjoint does the same with time reversed: with s_t = g_t + c_{t+1} and c_t = A'_t s_t, c is what one chunk hands to
the next. Chunks are counted in the order of processing, so that only the one processed last may be short. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glissando.errors import ConfigError

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError as missing:
    raise ConfigError(
        "block_scan: backend 'triton' needs Triton, which is not installed: `pip install triton` (Linux), or use "
        "backend='doubling'"
    ) from missing

#: Steps in a chunk and channels in a block, one a thread: those of glissando.ops.scan_triton; not measured.
_CHUNK = 64
_BLOCK = 64


@triton.jit
def _block(a, at, seen, REVERSE: tl.constexpr):
    """The entries of A at `at`, a channel's place in (..., N), transposed in reverse."""
    p = tl.load(a + 4 * at, mask=seen, other=0.0)
    q = tl.load(a + 4 * at + 1, mask=seen, other=0.0)
    r = tl.load(a + 4 * at + 2, mask=seen, other=0.0)
    s = tl.load(a + 4 * at + 3, mask=seen, other=0.0)
    if REVERSE:
        q, r = r, q
    return p, q, r, s


@triton.jit
def _pair(x, at, seen):
    return tl.load(x + 2 * at, mask=seen, other=0.0), tl.load(x + 2 * at + 1, mask=seen, other=0.0)


@triton.jit
def _put(x, at, u, v, seen):
    tl.store(x + 2 * at, u, mask=seen)
    tl.store(x + 2 * at + 1, v, mask=seen)


@triton.jit
def _summarise(a, x, products, ends, steps, pieces, chunk, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Pass 1: products (B, pieces, N, 2, 2) and ends (B, pieces, N, 2) of whole chunks."""
    where = tl.program_id(0).to(tl.int64)
    row, piece = where // pieces, where % pieces
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = lane < size
    u = tl.zeros([BLOCK], dtype=ends.dtype.element_ty)
    v = u
    c, d, e, f = u + 1, u, u, u + 1
    first = piece * chunk
    for i in range(first, first + chunk):
        t = i
        if REVERSE:
            t = steps - 1 - i
        at = (row * steps + t) * size + lane
        p, q, r, s = _block(a, at, seen, REVERSE)
        g, h = _pair(x, at, seen)
        if REVERSE:
            u, v = u + g, v + h
            u, v = p * u + q * v, r * u + s * v
        else:
            u, v = p * u + q * v + g, r * u + s * v + h
        c, d, e, f = p * c + q * e, p * d + q * f, r * c + s * e, r * d + s * f
    at = (row * pieces + piece) * size + lane
    _put(ends, at, u, v, seen)
    _put(products, 2 * at, c, d, seen)
    _put(products, 2 * at + 1, e, f, seen)


@triton.jit
def _run(a, x, incoming, out, last, steps, pieces, chunk, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Pass 3: out (B, T, N, 2) from x and incoming (B, pieces, N, 2); in reverse last (B, N, 2), what leaves."""
    where = tl.program_id(0).to(tl.int64)
    row, piece = where // pieces, where % pieces
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = lane < size
    u, v = _pair(incoming, (row * pieces + piece) * size + lane, seen)
    first = piece * chunk
    for i in range(first, tl.minimum(first + chunk, steps)):
        t = i
        if REVERSE:
            t = steps - 1 - i
        at = (row * steps + t) * size + lane
        p, q, r, s = _block(a, at, seen, REVERSE)
        g, h = _pair(x, at, seen)
        if REVERSE:
            u, v = u + g, v + h
            _put(out, at, u, v, seen)
            u, v = p * u + q * v, r * u + s * v
        else:
            u, v = p * u + q * v + g, r * u + s * v + h
            _put(out, at, u, v, seen)
    if REVERSE:  # noqa: SIM102  what is compiled in, and then what is decided when it runs
        if piece == pieces - 1:
            _put(last, row * size + lane, u, v, seen)


def forward(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    """h (B, T, N, 2) for a (B, T, N, 2, 2), x (B, T, N, 2) and h0 (B, N, 2), all of one floating type."""
    _check_device(x)
    with torch.cuda.device_of(x):
        return _over_chunks(a.contiguous(), x.contiguous(), h0.contiguous(), reverse=False)[0]


def adjoint(a: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """s_t = g_t + A'_{t+1} s_{t+1} (B, T, N, 2), and A'_1 s_1 (B, N, 2)."""
    _check_device(grad)
    with torch.cuda.device_of(grad):
        return _over_chunks(a.contiguous(), grad.contiguous(), torch.zeros_like(grad[:, 0]), reverse=True)


def _over_chunks(a: Tensor, x: Tensor, start: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    batch, steps = x.shape[:2]
    # Two chunks are not worth two more kernels.
    chunk = steps if steps <= 2 * _CHUNK else _CHUNK
    whole, incoming = -(-steps // chunk) - 1, start.unsqueeze(1)
    if whole:
        products, ends = a.new_empty(batch, whole, *a.shape[2:]), x.new_empty(batch, whole, *x.shape[2:])
        _launch(_summarise, whole, x, chunk, reverse, a, x, products, ends)
        incoming = torch.cat([incoming, _over_chunks(products, ends, start, reverse=False)[0]], 1)
    out, last = x.new_empty(x.shape), start.new_empty(start.shape)
    _launch(_run, whole + 1, x, chunk, reverse, a, x, incoming.contiguous(), out, last)
    return out, last


def _launch(kernel: Any, pieces: int, x: Tensor, chunk: int, reverse: bool, *arrays: Tensor) -> None:
    batch, steps, size, _ = x.shape
    if x.numel():
        # Fused multiply-add is called by name, as Triton 3.9 warns that it will stop being the default.
        kernel[(batch * pieces, triton.cdiv(size, _BLOCK))](
            *arrays, steps=steps, pieces=pieces, chunk=chunk, size=size, REVERSE=reverse, BLOCK=_BLOCK,
            num_warps=_BLOCK // 32, enable_fp_fusion=True,
        )  # fmt: skip


def _check_device(x: Tensor) -> None:
    interpreted = not isinstance(_run, triton.JITFunction)
    if not x.is_cuda and not (interpreted and x.device.type == "cpu"):
        raise ConfigError(
            f"block_scan: backend 'triton' needs CUDA, and the tensors are on {x.device}; backend='auto' picks what "
            "runs (on a CPU, Triton's interpreter can run it: TRITON_INTERPRET=1, set before triton is imported)"
        )
