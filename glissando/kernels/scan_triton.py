"""The scan on a GPU: chunks of time in parallel, compiled by Triton.

A chunk of steps maps its incoming state c to P c + e, with P the product of its factors and e what it makes of
zero. So, for rows, chunks and blocks of features all at once:

1. every chunk but the last one, from zero, writes only its P and e;
2. a scan over chunks, h_k = P_k h_{k-1} + e_k, the same problem 64 times shorter, gives every chunk's incoming state;
3. every chunk, from its incoming state, writes its results.

That reads the input twice and writes the output once. The backward does the same with time reversed: with
s_t = g_t + c_{t+1} and c_t = conj(a_t) s_t, c is what one chunk hands to the next. Chunks are counted in the order of
processing, thus from the end of time in the backward, so that only the one processed last may be short.

No atomics: the gradient of a constant a is summed within each chunk, and then over chunks and rows by torch.sum.
Complex numbers are interleaved pairs of reals. Blelloch 1990, "Prefix sums and their applications".
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

#: Steps in a chunk. A chunk writes one state and one product, so that 64 steps make pass 1 nearly free to write and
#: leave B T F / 64 threads: 131,072 for one row of 8192 steps and 1024 features (not measured). Longer chunks have
#: too few threads to hide the latency of memory, shorter ones move more memory and may need one more level of pass 2.
_CHUNK = 64

#: Features in a block, one a thread. Two warps still read whole cache lines, and leave many small programs.
_BLOCK = 64

#: Steps whose loads are in flight together: on an H200 a scan and its gradients take 8 to 20 % less time than with 1.
_UNROLL = 8


@triton.jit
def _place(pieces, width, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """This program's row, its chunk, the offsets of its features (the real parts, for pairs), and which ones exist."""
    # Rows and chunks share the grid's first axis, which alone may exceed 65535; 64 bits, as B T F may exceed 2^31.
    where = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PAIRS:
        lane = 2 * lane
    return where // pieces, where % pieces, lane, lane < width


# Reals travel as pairs whose second half is ignored. It must not be computed with: 0 times infinity is a NaN.


@triton.jit
def _load(base, at, seen, PAIRS: tl.constexpr):
    real = tl.load(base + at, mask=seen, other=0.0)
    imag = real
    if PAIRS:
        imag = tl.load(base + at + 1, mask=seen, other=0.0)
    return real, imag


@triton.jit
def _store(base, at, real, imag, seen, PAIRS: tl.constexpr):
    tl.store(base + at, real, mask=seen)
    if PAIRS:
        tl.store(base + at + 1, imag, mask=seen)


@triton.jit
def _times(p, q, u, v, PAIRS: tl.constexpr):
    real, imag = p * u, v
    if PAIRS:
        real, imag = p * u - q * v, p * v + q * u
    return real, imag


@triton.jit
def _summarise(
    a, x, products, ends, steps, pieces, chunk, width, a_row, a_step, a_rows, a_pieces, REVERSE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Pass 1: ends (B, pieces, width) and products (B or 1, pieces or 1, width) of whole chunks."""
    row, piece, lane, seen = _place(pieces, width, BLOCK, PAIRS)
    state = tl.zeros([BLOCK], dtype=ends.dtype.element_ty)
    state_imag = state
    product = state + 1
    product_imag = state
    first = piece * chunk
    for i in tl.range(first, first + chunk, loop_unroll_factor=UNROLL):
        t = i
        if REVERSE:
            t = steps - 1 - i
        p, q = _load(a, row * a_row + t * a_step + lane, seen, PAIRS)
        u, v = _load(x, (row * steps + t) * width + lane, seen, PAIRS)
        if REVERSE:
            q = -q
            state, state_imag = _times(p, q, state + u, state_imag + v, PAIRS)
        else:
            state, state_imag = _times(p, q, state, state_imag, PAIRS)
            state, state_imag = state + u, state_imag + v
        product, product_imag = _times(p, q, product, product_imag, PAIRS)
    _store(ends, (row * pieces + piece) * width + lane, state, state_imag, seen, PAIRS)
    # What rows or chunks share is written once.
    if (row < a_rows) & (piece < a_pieces):
        _store(products, (row * a_pieces + piece) * width + lane, product, product_imag, seen, PAIRS)


@triton.jit
def _forward(
    a, x, incoming, h, steps, pieces, chunk, width, a_row, a_step, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Pass 3 of the forward: h (B, T, width) from x and incoming (B, pieces, width)."""
    row, piece, lane, seen = _place(pieces, width, BLOCK, PAIRS)
    state, state_imag = _load(incoming, (row * pieces + piece) * width + lane, seen, PAIRS)
    first = piece * chunk
    for t in tl.range(first, tl.minimum(first + chunk, steps), loop_unroll_factor=UNROLL):
        p, q = _load(a, row * a_row + t * a_step + lane, seen, PAIRS)
        u, v = _load(x, (row * steps + t) * width + lane, seen, PAIRS)
        state, state_imag = _times(p, q, state, state_imag, PAIRS)
        state, state_imag = state + u, state_imag + v
        _store(h, (row * steps + t) * width + lane, state, state_imag, seen, PAIRS)


@triton.jit
def _backward(
    a, h, h0, grad, incoming, grad_a, grad_x, grad_h0, steps, pieces, chunk, width, a_row, a_step,
    VARYING: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Pass 3 of the backward; grad_a is (B, T, width) for an a that varies in time, (B, pieces, width) otherwise."""
    row, piece, lane, seen = _place(pieces, width, BLOCK, PAIRS)
    flow, flow_imag = _load(incoming, (row * pieces + piece) * width + lane, seen, PAIRS)
    total = tl.zeros([BLOCK], dtype=grad_x.dtype.element_ty)
    total_imag = total
    first = piece * chunk
    second = (row * steps + 1) * width  # where the row's second step begins: the first one's past is h0
    for i in tl.range(first, tl.minimum(first + chunk, steps), loop_unroll_factor=UNROLL):
        t = steps - 1 - i
        at = (row * steps + t) * width + lane
        p, q = _load(a, row * a_row + t * a_step + lane, seen, PAIRS)
        u, v = _load(grad, at, seen, PAIRS)
        u, v = u + flow, v + flow_imag
        _store(grad_x, at, u, v, seen, PAIRS)
        # One of the two loads is masked off: it costs nothing and adds zero.
        real, imag = _load(h, at - width, seen & (at >= second), PAIRS)
        real_0, imag_0 = _load(h0, row * width + lane, seen & (at < second), PAIRS)
        slope, slope_imag = _times(real + real_0, -(imag + imag_0), u, v, PAIRS)
        if VARYING:
            _store(grad_a, at, slope, slope_imag, seen, PAIRS)
        else:
            total, total_imag = total + slope, total_imag + slope_imag
        flow, flow_imag = _times(p, -q, u, v, PAIRS)
    if not VARYING:
        _store(grad_a, (row * pieces + piece) * width + lane, total, total_imag, seen, PAIRS)
    if piece == pieces - 1:
        _store(grad_h0, row * width + lane, flow, flow_imag, seen, PAIRS)


class TritonScan:
    """The backend `triton` of glissando.kernels.scan; a (B or 1, T or 1, *F), all of one floating type."""

    @staticmethod
    def forward(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        with torch.cuda.device_of(x):
            return _shaped(_scan(_flat(a, 2), _flat(x, 2), _flat(h0, 1), x.is_complex()), x, x.shape)

    @staticmethod
    def backward(a: Tensor, h: Tensor, h0: Tensor, grad: Tensor, grad_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs, varying = h.is_complex(), a.shape[1] > 1
        with torch.cuda.device_of(h):
            factor, g, start = _flat(a, 2), _flat(grad, 2), _flat(grad_last, 1)
            incoming, options = _incoming(factor, g, start, pairs, reverse=True), _options(factor, g, pairs)
            grad_x, grad_h0 = torch.empty_like(g), torch.empty_like(start)
            grad_a = torch.empty_like(g if varying else incoming)
            arrays = (factor, _flat(h, 2), _flat(h0, 1), g, incoming, grad_a, grad_x, grad_h0)
            _launch(_backward, g, incoming.shape[1], pairs, *arrays, **options, VARYING=varying)
        slopes = _shaped(grad_a, h, (*grad_a.shape[:2], *h.shape[2:]))
        if not varying:
            slopes = slopes.to(torch.promote_types(h.dtype, torch.float64))
        return slopes.sum_to_size(a.shape).to(a.dtype), _shaped(grad_x, h, h.shape), _shaped(grad_h0, h, h0.shape)


def _scan(a: Tensor, x: Tensor, start: Tensor, pairs: bool) -> Tensor:
    """h (B, T, width) for flat a (B or 1, T or 1, width), x (B, T, width) and start (B, width)."""
    incoming, h = _incoming(a, x, start, pairs, reverse=False), torch.empty_like(x)
    _launch(_forward, x, incoming.shape[1], pairs, a, x, incoming, h, **_options(a, x, pairs))
    return h


def _incoming(a: Tensor, x: Tensor, start: Tensor, pairs: bool, reverse: bool) -> Tensor:
    """The incoming state of every chunk (B, pieces, width), in the order of processing: passes 1 and 2."""
    whole = -(-x.shape[1] // _length(x)) - 1
    if whole == 0:
        return start.unsqueeze(1)
    ends = x.new_empty(x.shape[0], whole, x.shape[2])
    products = x.new_empty(a.shape[0], whole if a.shape[1] > 1 else 1, x.shape[2])
    sizes = {"a_rows": products.shape[0], "a_pieces": products.shape[1], "REVERSE": reverse}
    _launch(_summarise, x, whole, pairs, a, x, products, ends, **_options(a, x, pairs), **sizes)
    return torch.cat([start.unsqueeze(1), _scan(products, ends, start, pairs)], 1)


def _length(x: Tensor) -> int:
    """Steps in a chunk: two chunks are not worth two more kernels."""
    return x.shape[1] if x.shape[1] <= 2 * _CHUNK else _CHUNK


def _options(a: Tensor, x: Tensor, pairs: bool) -> dict[str, Any]:
    a_row, a_step = (stride if size > 1 else 0 for stride, size in zip(a.stride()[:2], a.shape[:2], strict=True))
    sizes = {"steps": x.shape[1], "chunk": _length(x), "width": x.shape[2]}
    return {**sizes, "a_row": a_row, "a_step": a_step, "PAIRS": pairs}


def _launch(kernel: Any, like: Tensor, pieces: int, pairs: bool, *arrays: Tensor, **options: Any) -> None:
    blocks = triton.cdiv(like.shape[2], _BLOCK * (2 if pairs else 1))
    if like.numel() > 0:
        grid = (like.shape[0] * pieces, blocks)
        # Fused multiply-add is called by name, as Triton 3.9 warns that it will stop being the default.
        tuning = {"num_warps": _BLOCK // 32, "enable_fp_fusion": True}
        kernel[grid](*arrays, pieces=pieces, BLOCK=_BLOCK, UNROLL=_UNROLL, **tuning, **options)


def _flat(tensor: Tensor, leading: int) -> Tensor:
    """Contiguous reals with the leading dimensions kept and the features flat, complex numbers as pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.flatten(leading)


def _shaped(flat: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of _flat."""
    return torch.view_as_complex(flat.view(*shape, 2)) if like.is_complex() else flat.view(shape)
