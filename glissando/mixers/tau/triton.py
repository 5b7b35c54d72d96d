"""Attention by |lambda_q - lambda_k| on a GPU: tiles of keys stream past a tile of queries, compiled by Triton.

    logit_ij = e_j - |q_i - k_j| / T = min(A_j - Q_i, B_j + Q_i),    A = e + k / T,   B = e - k / T,   Q = q / T

A, B and Q may be in the thousands, and what is left where they cancel decides. They are computed in float64, one number
a token, and reach the kernels as pairs of float32 (high and low half): the difference of the high halves is exact where
it is small, so that weights are as exact as float32 is, at any length, and no kernel computes in float64. Logarithms
are to base 2.

Forward: the sum of a row runs beside the largest logit so far (online softmax; Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135), and only o and lse are written. Backward, with p_ij = exp(logit_ij -
lse_i), G the gradient of o and D_i = sum_c G_ic o_ic, in two passes that compute p again:

    ds_ij = p_ij (G_i v_j - D_i)
    dq_i = -(1 / T) sum_j ds_ij sign(q_i - k_j),    d(1 / T) = -sum_ij ds_ij |q_i - k_j|         over keys
    dk_j = (1 / T) sum_i ds_ij sign(q_i - k_j),     de_j = sum_i ds_ij,   dv_j = sum_i p_ij G_i  over queries

sum_j ds_ij = 0, so that distances may count from any r_i: d(1 / T) = -sum_ij ds_ij (|q_i - k_j| - r_i). With r_i the
mean distance by weight, the digits of distances that are all long are not lost.

Time is O(T L), memory O(T + L). There are no atomics: results do not depend on the order of programs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from glissando.errors import ConfigError

from .attention import WIDEST

#: Numbers of queries and of keys in a tile, for values up to 64 wide; half as many for each doubling of the width, so
#: that a tile of values takes 16 KiB of shared memory. At least 16, as tl.dot asks for. Not measured.
_TILE = 64
_LEAST = 16

_LOG2E = 1 / math.log(2)


@triton.jit
def _two_sum(x, y):
    """x + y rounded, and what rounding took off (Knuth)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


@triton.jit
def _add(total, lost, part):
    """total + part, compensated for what earlier additions lost (Kahan)."""
    part -= lost
    new = total + part
    return new, (new - total) - part


@triton.jit
def _logits(a, a_low, b, b_low, u, u_low, w, w_low):
    """min(A_j - u_i, B_j - w_i): pairs (queries,) against pairs (keys,)."""
    above = (a[None, :] - u[:, None]) + (a_low[None, :] - u_low[:, None])
    below = (b[None, :] - w[:, None]) + (b_low[None, :] - w_low[:, None])
    return tl.minimum(above, below)


@triton.jit
def _keys(keys, row, n_keys, at, seen):
    """A and B as pairs, and k: planes of keys (rows, 5, L)."""
    base = keys + row * 5 * n_keys + at
    return (
        tl.load(base, mask=seen, other=0.0),
        tl.load(base + n_keys, mask=seen, other=0.0),
        tl.load(base + 2 * n_keys, mask=seen, other=0.0),
        tl.load(base + 3 * n_keys, mask=seen, other=0.0),
        tl.load(base + 4 * n_keys, mask=seen, other=0.0),
    )


@triton.jit
def _queries(queries, row, length, at, seen):
    """Q + lse and lse - Q as pairs, q, D and r: planes of queries (rows, 7, T)."""
    base = queries + row * 7 * length + at
    return (
        tl.load(base, mask=seen, other=0.0),
        tl.load(base + length, mask=seen, other=0.0),
        tl.load(base + 2 * length, mask=seen, other=0.0),
        tl.load(base + 3 * length, mask=seen, other=0.0),
        tl.load(base + 4 * length, mask=seen, other=0.0),
        tl.load(base + 5 * length, mask=seen, other=0.0),
        tl.load(base + 6 * length, mask=seen, other=0.0),
    )


@triton.jit
def _tile(base, row, rows_of, at, seen, width, WIDTH: tl.constexpr):
    """(at, WIDTH) numbers of a matrix (rows, rows_of, width) in float32."""
    lane = tl.arange(0, WIDTH)
    where = (row * rows_of + at).to(tl.int64)[:, None] * width + lane[None, :]
    return tl.load(base + where, mask=seen[:, None] & (lane < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _put(base, row, rows_of, at, seen, width, tile, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    where = (row * rows_of + at).to(tl.int64)[:, None] * width + lane[None, :]
    tl.store(base + where, tile, mask=seen[:, None] & (lane < width)[None, :])


@triton.jit
def _forward(
    queries, keys, values, past, o, most, total, gaps, length, n_keys, width, heads, tiles,
    TILE: tl.constexpr, WIDTH: tl.constexpr, WITH_GAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries (rows, 3, T): Q as a pair, and q. o (rows, T, width); most, total and gaps (rows, T)."""
    # 64 bits, as B H T K may exceed 2^31. The last tiles, which see the most keys, begin first.
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = (tiles - 1 - tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    within = i < length
    base = queries + row * 3 * length + i
    at = tl.load(base, mask=within, other=0.0)
    at_low = tl.load(base + length, mask=within, other=0.0)
    q = tl.load(base + 2 * length, mask=within, other=0.0)
    query_at = tl.load(past + row // heads) + tl.minimum(i, length - 1)
    end = tl.minimum(tl.max(query_at, 0) + 1, n_keys).to(tl.int32)
    highest = tl.full([TILE], -3e38, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    gap = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, end, TILE):
        j = start + tl.arange(0, TILE)
        a, a_low, b, b_low, k = _keys(keys, row, n_keys, j, j < end)
        visible = (j[None, :] <= query_at[:, None]) & (j < end)[None, :]
        # What is taken off a row's logits need not be the largest exactly: high halves do.
        rough = tl.minimum(a[None, :] - at[:, None], b[None, :] + at[:, None])
        higher = tl.maximum(highest, tl.max(tl.where(visible, rough, -3e38), 1))
        decay = tl.exp2(highest - higher)
        highest = higher
        u, u_low = _two_sum(highest, at)
        w, w_low = _two_sum(highest, -at)
        logits = _logits(a, a_low, b, b_low, u, u_low + at_low, w, w_low - at_low)
        p = tl.exp2(tl.where(visible, logits, -float("inf")))
        weight = weight * decay + tl.sum(p, 1)
        if WITH_GAP:
            gap = gap * decay + tl.sum(p * tl.abs(q[:, None] - k[None, :]), 1)
        v = _tile(values, row, n_keys, j, j < end, width, WIDTH)
        acc = tl.dot(p, v, acc * decay[:, None], input_precision=PRECISION)
    _put(o, row, length, i, within, width, acc / weight[:, None], WIDTH)
    tl.store(most + row * length + i, highest, mask=within)
    tl.store(total + row * length + i, weight, mask=within)
    if WITH_GAP:
        tl.store(gaps + row * length + i, gap / weight, mask=within)


@triton.jit
def _over_keys(
    queries, keys, values, past, grad, dq, far, length, n_keys, width, heads, tiles,
    TILE: tl.constexpr, WIDTH: tl.constexpr, WITH_GAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one tile of queries sum_j ds sign(q - k) in dq, and sum_j ds (|q - k| - r) in far, both (rows, T)."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    i = (tiles - 1 - tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    within = i < length
    u, u_low, w, w_low, q, delta, mean = _queries(queries, row, length, i, within)
    g = _tile(grad, row, length, i, within, width, WIDTH)
    query_at = tl.load(past + row // heads) + tl.minimum(i, length - 1)
    end = tl.minimum(tl.max(query_at, 0) + 1, n_keys).to(tl.int32)
    of_q = tl.zeros([TILE], tl.float32)
    lost_q = of_q
    of_gap = of_q
    lost_gap = of_q
    for start in range(0, end, TILE):
        j = start + tl.arange(0, TILE)
        a, a_low, b, b_low, k = _keys(keys, row, n_keys, j, j < end)
        visible = (j[None, :] <= query_at[:, None]) & (j < end)[None, :] & within[:, None]
        p = tl.exp2(tl.where(visible, _logits(a, a_low, b, b_low, u, u_low, w, w_low), -float("inf")))
        v = _tile(values, row, n_keys, j, j < end, width, WIDTH)
        slope = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        slope = tl.where(visible, slope, 0.0)
        signed = tl.where(q[:, None] < k[None, :], -slope, tl.where(q[:, None] > k[None, :], slope, 0.0))
        of_q, lost_q = _add(of_q, lost_q, tl.sum(signed, 1))
        if WITH_GAP:
            # Of long distances the difference is wanted: they come with what rounding takes off.
            distance, rest = _two_sum(q[:, None], -k[None, :])
            distance = (tl.abs(distance) - mean[:, None]) + tl.where(distance < 0, -rest, rest)
            of_gap, lost_gap = _add(of_gap, lost_gap, tl.sum(slope * distance, 1))
    tl.store(dq + row * length + i, of_q, mask=within)
    if WITH_GAP:
        tl.store(far + row * length + i, of_gap, mask=within)


@triton.jit
def _over_queries(
    queries, keys, values, past, grad, dk, de, dv, length, n_keys, width, heads, tiles,
    TILE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one tile of keys sum_i ds sign(q - k) and sum_i ds (rows, L), and dv."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    j = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    within = j < n_keys
    v = _tile(values, row, n_keys, j, within, width, WIDTH)
    before = tl.load(past + row // heads)
    first = tl.program_id(0) % tiles * TILE - before  # the query that sees the tile's first key
    begin = tl.minimum(tl.maximum(first, 0) // TILE * TILE, length).to(tl.int32)
    of_v = tl.zeros([TILE, WIDTH], tl.float32)
    a, a_low, b, b_low, k = _keys(keys, row, n_keys, j, within)
    of_k = tl.zeros([TILE], tl.float32)
    lost_k = of_k
    of_e = of_k
    lost_e = of_k
    for start in range(begin, length, TILE):
        i = start + tl.arange(0, TILE)
        u, u_low, w, w_low, q, delta, _ = _queries(queries, row, length, i, i < length)
        visible = (j[None, :] <= (before + i)[:, None]) & (i < length)[:, None] & within[None, :]
        p = tl.exp2(tl.where(visible, _logits(a, a_low, b, b_low, u, u_low, w, w_low), -float("inf")))
        g = _tile(grad, row, length, i, i < length, width, WIDTH)
        of_v = tl.dot(tl.trans(p), g, of_v, input_precision=PRECISION)
        slope = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        slope = tl.where(visible, slope, 0.0)
        signed = tl.where(q[:, None] < k[None, :], -slope, tl.where(q[:, None] > k[None, :], slope, 0.0))
        of_e, lost_e = _add(of_e, lost_e, tl.sum(slope, 0))
        of_k, lost_k = _add(of_k, lost_k, tl.sum(signed, 0))
    tl.store(dk + row * n_keys + j, of_k, mask=within)
    tl.store(de + row * n_keys + j, of_e, mask=within)
    _put(dv, row, n_keys, j, within, width, of_v, WIDTH)


@torch.library.custom_op("glissando::tau_attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, with_gap: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o (B, H, T, K) float32, lse (B, H, T) float64 and, `with_gap`, r (B, H, T): the mean distance by weight.

    q (B, H, T) and k (B, H, L) float32, v (B, H, L, K) float32 or half precision, e (B, H, L) and inverse 1 / T (H,)
    float64, past (B,) int64. Gradients for all but past; that of `inverse` needs r.

    Raises ConfigError for float64 and for values wider than 256.
    """
    if v.dtype == torch.float64:
        raise ConfigError("tau_attention: backend 'triton' computes in float32, got float64; use backend='reference'")
    if v.shape[3] > WIDEST:
        raise ConfigError(
            f"tau_attention: backend 'triton' takes values up to {WIDEST} wide, got {v.shape[3]}; use more heads or "
            "backend='reference'"
        )
    sizes = (*q.shape, v.shape[3])
    o, most, total, gaps = q.new_empty(sizes), q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)
    at = q.double() * _scale(inverse)
    queries = torch.stack([*_halves(at), q], 2)
    with torch.cuda.device_of(q):
        arrays = (queries, _planes(k, e, inverse), v.contiguous(), past, o, most, total, gaps)
        _launch(_forward, q, v, q.shape[0] * q.shape[1], q.shape[2], *arrays, WITH_GAP=with_gap)
    return o, (most.double() + total.double().log2()) / _LOG2E, gaps if with_gap else gaps.new_empty(0)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, with_gap: bool) -> tuple[Tensor, ...]:
    gaps = q.new_empty(q.shape if with_gap else (0,))
    return q.new_empty(*q.shape, v.shape[3]), q.new_empty(q.shape, dtype=torch.float64), gaps


@torch.library.custom_op("glissando::tau_attention_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, o: Tensor, lse: Tensor, gaps: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, e and inverse; that of inverse is empty without gaps."""
    batch, heads, length = q.shape
    with_gap = gaps.numel() > 0
    delta = (grad.float() * o).sum(-1)
    at, high = q.double() * _scale(inverse), lse * _LOG2E
    mean = gaps if with_gap else delta
    queries = torch.stack([*_halves(high + at), *_halves(high - at), q, delta, mean], 2)
    tensors = (queries, _planes(k, e, inverse), v.contiguous(), past, grad.contiguous())
    dq, far, dk, de = q.new_empty(q.shape), q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)
    dv = o.new_empty(v.shape)
    with torch.cuda.device_of(q):
        _launch(_over_keys, q, v, batch * heads, length, *tensors, dq, far, WITH_GAP=with_gap)
        _launch(_over_queries, q, v, batch * heads, k.shape[2], *tensors, dk, de, dv)
    of_inverse = -far.double().sum((0, 2)) if with_gap else inverse.new_empty(0)
    scale = inverse.view(-1, 1)
    return (dq * -scale).to(q.dtype), (dk * scale).to(k.dtype), dv.to(v.dtype), de.double(), of_inverse


@backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, o: Tensor, lse: Tensor, gaps: Tensor,
    grad: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_inverse = inverse.new_empty(inverse.shape if gaps.numel() else (0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), e.new_empty(e.shape), of_inverse


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.with_gap = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, of_inverse = backward(*ctx.saved_tensors, grad)
    return *gradients, of_inverse if ctx.with_gap else None, None, None


forward.register_autograd(_gradients, setup_context=_keep)


def _scale(inverse: Tensor) -> Tensor:
    return inverse.view(-1, 1) * _LOG2E


def _planes(k: Tensor, e: Tensor, inverse: Tensor) -> Tensor:
    """(B, H, 5, L): A and B as pairs, and k."""
    e, at = e * _LOG2E, k.double() * _scale(inverse)
    return torch.stack([*_halves(e + at), *_halves(e - at), k], 2)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float64 as the sum of two float32."""
    high = x.float()
    return high, (x - high.double()).float()


def _launch(kernel: Any, q: Tensor, v: Tensor, rows: int, tokens: int, *arrays: Tensor, **options: Any) -> None:
    n_keys, width = v.shape[2:]
    block = max(triton.next_power_of_2(width), _LEAST)
    tile = max(_TILE * 64 // max(block, 64), _LEAST)
    tiles = triton.cdiv(tokens, tile)
    if not rows * tiles:
        return
    # As PyTorch's own products. Half precision fits TF32 without rounding; the weights beside it are rounded to it.
    rounds = v.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    precision = "tf32" if rounds and not torch.version.hip else "ieee"
    # Fused multiply-add is called by name, as Triton 3.9 warns that it will stop being the default.
    # With four warps for a tile the compiler spills registers.
    tuning = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    kernel[(rows * tiles,)](
        *arrays, length=q.shape[2], n_keys=n_keys, width=width, heads=q.shape[1], tiles=tiles, TILE=tile, WIDTH=block,
        PRECISION=precision, **tuning, **options,
    )  # fmt: skip
