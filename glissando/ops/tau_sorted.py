"""Attention by |lambda_q - lambda_k| without its matrix, in tensor code for any device: sorting and batched products.

The cuts are those of glissando.ops.tau_cut: time is halved again and again, down to blocks of `_BLOCK`, which are done
directly, and at each cut the queries of the right half attend to the keys of the left half, all of which are in their
past. With A = e + k / T and B = e - k / T of the left keys, sorted along lambda, a query takes two running sums,

    sum_j exp(e_j - |q - k_j| / T) v_j  =  exp(-q / T) sum_{k_j < q} exp(A_j) v_j
                                         + exp(+q / T) sum_{k_j >= q} exp(B_j) v_j

A running sum over n sorted keys is a product of matrices: inside groups of S keys a triangular S x S matrix of weights
exp(A_s - max_{s' <= r} A_s'), and between the n / S groups one more. No weight exceeds 1, so that nothing overflows at
any temperature. S near (2 n)^(1/3) makes it O(T^(4/3)) products of numbers and O(T S) memory, S from 16 to 64 below a
quarter of a million tokens.

Exponents may be in the thousands, and what is left where they cancel decides: they come in float64, or as pairs where
the device has none, and are split into a high and a low part of the working type. Maxima are of the high parts alone,
so that the difference of a high part and a maximum is exact where it is small.

Backward, explicit, with E_i = lse_i + q_i / T, F_i = lse_i - q_i / T, G the gradient of o, D_i = G_i o_i - dlse_i:

    ds_ij = p_ij (G_i v_j - D_i),    p_ij = min(exp(A_j - E_i), exp(B_j - F_i))
    X_i = sum_j ds_ij sign(q_i - k_j),   Y_j = sum_i ds_ij sign(q_i - k_j),   dq = -X / T,   dk = Y / T
    d(1 / T) = sum_j k_j Y_j - sum_i q_i X_i,      de_j = sum_i ds_ij,      dv_j = sum_i p_ij G_i

X from the same sums over keys, the others from sums over sorted queries with weights exp(-E_i) and exp(-F_i).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.ops.precise import add, is_pair, rounded, two_product, two_sum, wide, widest
from glissando.precision import without_autocast

#: positions that attend to each other directly
_BLOCK = 64
#: in place of -inf: weight 0 beside anything else, and differences stay numbers
_HIDDEN = -1e30


class _Split(NamedTuple):
    """high + low of the working type; low is None in float64."""

    high: Tensor
    low: Tensor | None

    def at(self, *where: Any) -> _Split:
        return _Split(self.high[where], None if self.low is None else self.low[where])

    def gather(self, index: Tensor) -> _Split:
        return _Split(self.high.gather(-1, index), None if self.low is None else self.low.gather(-1, index))

    def minus(self, x: Tensor) -> Tensor:
        """Rounded once: exact in the high parts where x is close."""
        return self.high - x if self.low is None else (self.high - x) + self.low

    def plus(self, x: Tensor) -> _Split:
        """The sum, with what rounding takes off it in the low part."""
        if self.low is None:
            return _Split(self.high + x, None)
        high, rest = two_sum(self.high, x)
        return _Split(high, rest + self.low)

    def negative(self) -> _Split:
        return _Split(-self.high, None if self.low is None else -self.low)


class _Prepared(NamedTuple):
    """A row for each batch row and head, padded to whole blocks: (R, N), v (R, N, K). Queries stand at their own keys'
    positions."""

    q: Tensor
    k: Tensor
    a: _Split
    b: _Split
    y: _Split
    v: Tensor


# Operations of a graph: torch.compile would trace hundreds of small ones, which takes minutes.


@torch.library.custom_op("glissando::tau_sorted", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """o (B, H, T, K) and lse (B, H, T), wide, for the arguments of glissando.ops.tau_attention's reference. Gradients
    for all but past."""
    with without_autocast(q.device.type):
        return _forward(q, k, v, e, inverse, past)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape, v.shape[3]), e.new_empty(*q.shape, *e.shape[3:])


@torch.library.custom_op("glissando::tau_sorted_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor, o: Tensor, lse: Tensor, grad: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, e and inverse."""
    with without_autocast(q.device.type):
        found = _backward((q, k, v, e, inverse, past, o, lse), grad, grad_lse)
    dq, dk, dv, de, of_inverse = (x.contiguous() for x in found)
    return dq, dk, dv, de, of_inverse


@backward.register_fake
def _(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:5])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, grad, grad_lse), None


forward.register_autograd(_gradients, setup_context=_keep)


def _forward(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    p = _prepared(q, k, v, e, inverse, past)
    values = torch.cat([p.v, torch.ones_like(p.v[..., :1])], -1)
    most, sums = _direct(p, values)
    for left, right, pairs in _cuts(p.k.shape[1]):
        keys, n = _rows(p.k, left, pairs), left.stop - left.start
        order = keys.argsort(-1)
        keys, held = keys.gather(-1, order), _take(_rows(values, left, pairs), order)
        below = torch.searchsorted(keys, _rows(p.q, right, pairs).contiguous())
        up_top, up = _running(_split_rows(p.a, left, pairs).gather(order), held, reverse=False)
        down_top, down = _running(_split_rows(p.b, left, pairs).gather(order), held, reverse=True)
        y, before = _split_rows(p.y, right, pairs), (below - 1).clamp_min(0)
        after = below.clamp_max(n - 1)
        rising = y.negative().plus(up_top.gather(-1, before))
        falling = y.plus(down_top.gather(-1, after))
        no_up, no_down = below == 0, below == n
        was = _rows(most, right, pairs)
        highest = was.maximum(rising.high.masked_fill(no_up, -torch.inf))
        highest = highest.maximum(falling.high.masked_fill(no_down, -torch.inf))
        share = (was - highest).exp().unsqueeze(-1)
        of_up = rising.minus(highest).masked_fill(no_up, -torch.inf).exp().unsqueeze(-1)
        of_down = falling.minus(highest).masked_fill(no_down, -torch.inf).exp().unsqueeze(-1)
        mixed = _rows(sums, right, pairs) * share
        mixed = mixed.addcmul_(_take(up, before), of_up).addcmul_(_take(down, after), of_down)
        _put(sums, right, pairs, mixed)
        _put(most, right, pairs, highest)
    total = sums[..., -1]
    o, lse = sums[..., :-1] / total.unsqueeze(-1), add(wide(most), wide(total.log()))
    return _unaligned(o, q, past), _unaligned(lse, q, past)


def _backward(saved: tuple[Tensor, ...], grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    q, k, v, e, inverse, past, o, lse = saved
    p = _prepared(q, k, v, e, inverse, past)
    delta = (grad * o).sum(-1) - rounded(grad_lse).to(o.dtype)
    y = _times(q, inverse)
    # A query that is not there has no weight anywhere.
    of_a, of_b = (_aligned_split(add(lse, x), past, k.shape[2], -_HIDDEN, q.dtype) for x in (y, -y))
    arriving = torch.cat([grad, delta.unsqueeze(-1)], -1)
    given = _aligned(arriving, past, k.shape[2], 0.0)
    values = torch.cat([p.v, -torch.ones_like(p.v[..., :1])], -1)  # so that G v - D is one product
    x, y_sum, de, dv = _direct_backward(p, given, values, of_a, of_b)
    for left, right, pairs in _cuts(p.k.shape[1]):
        keys, queries = _rows(p.k, left, pairs), _rows(p.q, right, pairs)
        held, pulls = _rows(values, left, pairs), _rows(given, right, pairs)
        a, b = _split_rows(p.a, left, pairs), _split_rows(p.b, left, pairs)
        e_up, e_down = _split_rows(of_a, right, pairs), _split_rows(of_b, right, pairs)

        # Over keys: what is strictly below a query, and strictly above.
        order = keys.argsort(-1)
        sorted_keys, rows = keys.gather(-1, order), _take(held, order)
        below = torch.searchsorted(sorted_keys, queries.contiguous())
        above = torch.searchsorted(sorted_keys, queries.contiguous(), right=True)
        pull = _weighted(*_running(a.gather(order), rows, False), below - 1, e_up.negative(), pulls)
        push = _weighted(*_running(b.gather(order), rows, True), above, e_down.negative(), pulls)
        _put(x, right, pairs, _rows(x, right, pairs) + pull - push)

        # Over queries: those at or above a key, strictly above, and below.
        order = queries.argsort(-1)
        sorted_queries, rows = queries.gather(-1, order), _take(pulls, order)
        below = torch.searchsorted(sorted_queries, keys.contiguous())
        above = torch.searchsorted(sorted_queries, keys.contiguous(), right=True)
        top, sums = _running(e_up.negative().gather(order), rows, True)
        higher = _weighted(top, sums, above, a, held)
        to_up = _scaled(top, sums, below, a)
        to_down = _scaled(*_running(e_down.negative().gather(order), rows, False), below - 1, b)
        lower = (to_down * held).sum(-1)
        _put(y_sum, left, pairs, _rows(y_sum, left, pairs) + higher - lower)
        _put(de, left, pairs, _rows(de, left, pairs) + (to_up * held).sum(-1) + lower)
        _put(dv, left, pairs, _rows(dv, left, pairs) + (to_up + to_down)[..., :-1])
    batch, heads, n_keys = k.shape
    x = _unaligned(x, q, past)
    y_sum, de, dv = (z.unflatten(0, (batch, heads))[:, :, :n_keys] for z in (y_sum, de, dv))
    scale, exact = rounded(inverse).to(q.dtype).view(-1, 1), widest(q.device)
    # Both sums of ds sign are the same: lambdas may count from anywhere.
    middle = k.mean(-1, keepdim=True)
    of_inverse = ((k - middle) * y_sum).sum((0, 2), dtype=exact) - ((q - middle) * x).sum((0, 2), dtype=exact)
    grads = (-x * scale, y_sum * scale, dv.unflatten(1, (v.shape[1], -1)).sum(2))
    return *grads, _wide_gradient(de, e), _wide_gradient(of_inverse, inverse)


def _direct(p: _Prepared, values: Tensor) -> tuple[Tensor, Tensor]:
    """Every block attends to itself: a number (R, N) near the largest logit of each query, and its sums (R, N, K + 1)
    relative to it."""
    a, b, y = (_split_blocks(x) for x in (p.a, p.b, p.y))
    hidden = _future(p.q)
    rough = torch.minimum(a.high.unsqueeze(-2) - y.high.unsqueeze(-1), b.high.unsqueeze(-2) + y.high.unsqueeze(-1))
    most = rough.masked_fill(hidden, -torch.inf).amax(-1)
    weights = _weights(a, b, y.plus(most), y.negative().plus(most)).masked_fill(hidden, 0.0)
    return most.flatten(1), (weights @ _blocks(values)).flatten(1, 2)


def _direct_backward(
    p: _Prepared, given: Tensor, values: Tensor, of_a: _Split, of_b: _Split
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, Y, de and dv of the pairs within blocks; given = [G, D], values = [v, -1]."""
    splits = (_split_blocks(x) for x in (p.a, p.b, of_a, of_b))
    weights = _weights(*splits).masked_fill(_future(p.q), 0.0)
    pulls, held = _blocks(given), _blocks(values)
    slope = (pulls @ held.mT) * weights
    signed = slope * (_blocks(p.q).unsqueeze(-1) - _blocks(p.k).unsqueeze(-2)).sign()
    dv = weights.mT @ pulls[..., :-1]
    return signed.sum(-1).flatten(1), signed.sum(-2).flatten(1), slope.sum(-2).flatten(1), dv.flatten(1, 2)


def _weights(a: _Split, b: _Split, of_a: _Split, of_b: _Split) -> Tensor:
    """min(exp(A_j - E_i), exp(B_j - F_i)), keys last."""
    return torch.minimum(_apart(a, of_a), _apart(b, of_b)).exp()


def _apart(keys: _Split, queries: _Split) -> Tensor:
    gap = keys.high.unsqueeze(-2) - queries.high.unsqueeze(-1)
    if keys.low is None or queries.low is None:
        return gap
    return gap + (keys.low.unsqueeze(-2) - queries.low.unsqueeze(-1))


def _running(a: _Split, values: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """top_r = max_{s <= r} a_s of the high parts (P, n), and sum_{s <= r} exp(a_s - top_r) values_s (P, n, W); over
    s >= r in reverse."""
    length = a.high.shape[-1]
    group = _group(length)
    padded = -length % group
    if padded:  # behind the last one nothing has weight, whichever way
        pad = torch.nn.functional.pad
        a = _Split(pad(a.high, (0, padded), value=2 * _HIDDEN), None if a.low is None else pad(a.low, (0, padded)))
        values = pad(values, (0, 0, 0, padded))
    high = a.high.flip(-1) if reverse else a.high
    top = high.cummax(-1).values
    top = (top.flip(-1) if reverse else top).unflatten(-1, (-1, group))
    each = _Split(a.high.unflatten(-1, (-1, group)), None if a.low is None else a.low.unflatten(-1, (-1, group)))
    later = _later(group, reverse, top)
    apart = each.high.unsqueeze(-2) - top.unsqueeze(-1)
    if each.low is not None:
        apart = apart + each.low.unsqueeze(-2)
    sums = apart.masked_fill_(later, -torch.inf).exp_() @ values.unflatten(-2, (-1, group))
    if top.shape[-2] > 1:
        edge = 0 if reverse else group - 1
        ends = top[..., edge]
        between = (ends.unsqueeze(-2) - ends.unsqueeze(-1)).masked_fill_(
            _later(ends.shape[-1], reverse, top), -torch.inf
        )
        carried = between.exp_() @ sums[..., edge, :]
        into, of = (slice(0, -1), slice(1, None)) if reverse else (slice(1, None), slice(0, -1))
        decay = (ends[..., of].unsqueeze(-1) - top[..., into, :]).exp()
        sums[..., into, :, :] += decay.unsqueeze(-1) * carried[..., of, :].unsqueeze(-2)
    return top.flatten(-2)[..., :length], sums.flatten(-3, -2)[..., :length, :]


def _group(length: int) -> int:
    """S: products cost n S + (n / S)^2."""
    return max(16, 2 ** round(math.log2(2 * length) / 3))


def _later(size: int, reverse: bool, like: Tensor) -> Tensor:
    """(size, size) of what a running sum does not hold yet, by row."""
    every = torch.ones(size, size, dtype=torch.bool, device=like.device)
    return every.tril(-1) if reverse else every.triu(1)


def _scaled(top: Tensor, sums: Tensor, index: Tensor, x: _Split) -> Tensor:
    """exp(top + x) times the running sums at `index`, 0 where it lies outside."""
    outside, index = (index < 0) | (index >= top.shape[-1]), index.clamp(0, top.shape[-1] - 1)
    weight = x.minus(-top.gather(-1, index)).masked_fill(outside, -torch.inf).exp()
    return _take(sums, index).mul_(weight.unsqueeze(-1))


def _weighted(top: Tensor, sums: Tensor, index: Tensor, x: _Split, by: Tensor) -> Tensor:
    return (_scaled(top, sums, index, x) * by).sum(-1)


# ---------------------------------------------------------------------- rows, blocks and pairs of blocks


def _cuts(length: int) -> list[tuple[slice, slice, int]]:
    """(left half, right half, pairs): the first of `pairs` pairs that follow each other."""
    found, n = [], _BLOCK
    while n < length:
        whole, rest = divmod(length, 2 * n)
        if whole:
            found.append((slice(0, n), slice(n, 2 * n), whole))
        if rest > n:
            first = whole * 2 * n
            found.append((slice(first, first + n), slice(first + n, length), 1))
        n *= 2
    return found


def _rows(x: Tensor, part: slice, pairs: int) -> Tensor:
    """(R, N, ...) -> (R pairs, size of the part, ...)."""
    if pairs == 1:
        return x[:, part]
    width = 2 * (part.stop - part.start)
    return x[:, : pairs * width].unflatten(1, (pairs, width))[:, :, part].flatten(0, 1)


def _split_rows(x: _Split, part: slice, pairs: int) -> _Split:
    return _Split(_rows(x.high, part, pairs), None if x.low is None else _rows(x.low, part, pairs))


def _put(x: Tensor, part: slice, pairs: int, new: Tensor) -> None:
    if pairs == 1:
        x[:, part] = new
    else:
        width = 2 * (part.stop - part.start)
        x[:, : pairs * width].unflatten(1, (pairs, width))[:, :, part] = new.unflatten(0, (-1, pairs))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (P, n, W) at index (P, m) -> (P, m, W): whole rows, which index_select copies faster than gather."""
    first = torch.arange(x.shape[0], device=x.device).unsqueeze(-1) * x.shape[1]
    return x.flatten(0, 1).index_select(0, (index + first).flatten()).view(*index.shape, x.shape[-1])


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, _BLOCK))


def _split_blocks(x: _Split) -> _Split:
    return _Split(_blocks(x.high), None if x.low is None else _blocks(x.low))


def _future(x: Tensor) -> Tensor:
    return torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=x.device).triu(1)


# ---------------------------------------------------------------------- from arguments to rows and back


def _prepared(q: Tensor, k: Tensor, v: Tensor, e: Tensor, inverse: Tensor, past: Tensor) -> _Prepared:
    heads, n_keys = k.shape[1:]
    e = e.clamp_min(_HIDDEN)
    at = _times(k, inverse)
    a, b = (_padded_split(add(e, x), _HIDDEN, k.dtype) for x in (at, -at))
    y = _aligned_split(_times(q, inverse), past, n_keys, 0.0, k.dtype)
    values = v.unsqueeze(2).expand(-1, -1, heads // v.shape[1], -1, -1).flatten(1, 2)
    return _Prepared(_aligned(q, past, n_keys, 0.0), _padded(k, 0.0), a, b, y, _padded(values, 0.0))


def _times(x: Tensor, inverse: Tensor) -> Tensor:
    """x (B, H, T) over T of each head, wide."""
    if not is_pair(inverse):
        return x.double() * inverse.view(-1, 1)
    scale = inverse.view(-1, 1, 2)
    product, rest = two_product(x, scale[..., 0].expand_as(x))
    return torch.stack([product, rest + x * scale[..., 1]], -1)


def _padded(x: Tensor, value: float) -> Tensor:
    """(B, H, L, ...) -> (R, N, ...), L up to whole blocks."""
    behind = -x.shape[2] % _BLOCK
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 3) + (0, behind), value=value).flatten(0, 1)


def _padded_split(x: Tensor, value: float, dtype: torch.dtype) -> _Split:
    split = _split(x, dtype)
    return _Split(_padded(split.high, value), None if split.low is None else _padded(split.low, 0.0))


def _split(x: Tensor, dtype: torch.dtype) -> _Split:
    if is_pair(x):
        return _Split(x[..., 0], x[..., 1])
    if dtype == torch.float64:
        return _Split(x, None)
    high = x.to(dtype)
    return _Split(high, (x - high.double()).to(dtype))


def _aligned(x: Tensor, past: Tensor, n_keys: int, value: float) -> Tensor:
    """(B, H, T, ...) of queries -> (R, N, ...), each at the position of its own key and `value` where there is none."""
    length = x.shape[2]
    if length == n_keys:
        return _padded(x, value)
    at = torch.arange(n_keys, device=x.device) - past.to(x.device).unsqueeze(-1)
    there = ((at >= 0) & (at < length)).view(len(x), 1, n_keys, *(1,) * (x.ndim - 3))
    index = at.clamp(0, length - 1).view(len(x), 1, n_keys, *(1,) * (x.ndim - 3))
    found = x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))
    return _padded(torch.where(there, found, value), value)


def _aligned_split(x: Tensor, past: Tensor, n_keys: int, value: float, dtype: torch.dtype) -> _Split:
    split = _split(x, dtype)
    low = None if split.low is None else _aligned(split.low, past, n_keys, 0.0)
    return _Split(_aligned(split.high, past, n_keys, value), low)


def _unaligned(x: Tensor, q: Tensor, past: Tensor) -> Tensor:
    """(R, N, ...) -> (B, H, T, ...) for the queries q."""
    batch, heads, length = q.shape
    x = x.unflatten(0, (batch, heads))
    at = past.to(x.device).unsqueeze(-1) + torch.arange(length, device=x.device)
    index = at.view(batch, 1, length, *(1,) * (x.ndim - 3))
    return x.gather(2, index.expand(-1, heads, -1, *x.shape[3:]))


def _wide_gradient(grad: Tensor, like: Tensor) -> Tensor:
    """Of a wide number: through its high part alone."""
    if not is_pair(like):
        return grad.to(like.dtype)
    return torch.stack([grad, torch.zeros_like(grad)], -1)
