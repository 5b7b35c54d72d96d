"""Attention of one query a head over a cache: what the decoding steps of mixers that keep every token share.

Keys lie as (slots / 64, G, K, 64) and values as (slots / 64, G, 64, K), so that each is read as it lies in memory. A
cache has `GROUP` numbers more at its end, as a vector may reach beyond a head's.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp
from glissando.kernels.products import GROUP, LANES, add_weighted_rows, sums_of_four, sums_of_one

_NEGLIGIBLE, _LOWEST = np.float32(-70), np.float32(-np.inf)


@kernel
def key_place(slot, group, groups, size):
    """Where the first number of a key is; the next one is `GROUP` further. A number for each slot and head lies as such
    keys of size 1."""
    return ((slot // GROUP) * groups + group) * size * GROUP + slot % GROUP


@kernel
def value_place(slot, group, groups, size):
    """Where the first number of a value is; the others follow."""
    return ((slot // GROUP) * groups + group) * size * GROUP + slot % GROUP * size


@kernel
def key_products(q, heads, groups, size, keys, count, scale, sums, scores):
    """scores (H, slots) = scale (query . key) for the first `count` keys, q (H, K) flat."""
    queries, shared = q[: heads * size].reshape(1, heads * size), heads // groups
    for begin in range(0, count, GROUP):
        for h in range(heads):
            place, line = key_place(begin, h // shared, groups, size), scores[h, begin : begin + GROUP]
            if count - begin > GROUP - LANES:
                sums_of_four(keys, place, GROUP, size, queries, h * size, 0, 1, sums)
            else:
                for lane in range(0, count - begin, LANES):
                    sums_of_one(keys, place + lane, GROUP, size, queries, h * size, 0, 1, sums[lane:])
            for j in range(GROUP):
                line[j] = sums[j] * scale


@kernel
def add_log_sigmoid(total, arguments):
    """total (H,) float64 += log sigmoid(arguments): the logarithm of what a forget gate keeps."""
    for h in range(len(total)):
        x = np.float64(arguments[h])
        total[h] += min(x, 0.0) - math.log1p(math.exp(-abs(x)))


@kernel
def weighted_values(weights, heads, groups, size, values, count, sums, out):
    """out (H, K) = sum_j w_j v_j / sum_j w_j of each head over the first `count` slots, weights (H, slots).

    Weights behind them, up to the next multiple of 16, are 0. Of 64 slots whose weights are all 0 none is read,
    whatever is in them.
    """
    totals, shared = np.zeros(heads, np.float32), heads // groups
    for i in range(heads * size):
        out[i] = np.float32(0)
    for begin in range(0, count, GROUP):
        rows = min(-(-(count - begin) // LANES) * LANES, GROUP)
        for h in range(heads):
            line, part = weights[h, begin : begin + rows], np.float32(0)
            for j in range(rows):
                part += line[j]
            if part == 0:
                continue
            totals[h] += part
            place = value_place(begin, h // shared, groups, size)
            add_weighted_rows(weights, h, begin, rows, values, place, size, sums, out[h * size : (h + 1) * size])
    for h in range(heads):
        scale, y = np.float32(1) / totals[h], out[h * size : (h + 1) * size]
        for i in range(size):
            y[i] *= scale


@kernel
def softmax_weights(scores, count, tops):
    """exp(scores - their largest) in place; 0 where that is below exp(-70) = 4e-31, which is lost in their sum, and
    behind the first `count` up to the next multiple of 16. tops (16) or more: for the largest ones.

    Products of such numbers with values would be subnormal, which take a processor much longer.
    """
    whole = -(-count // LANES) * LANES
    for j in range(count, whole):
        scores[j] = _LOWEST
    for j in range(LANES):
        tops[j] = scores[j]
    for begin in range(LANES, whole, LANES):
        some = scores[begin : begin + LANES]
        for j in range(LANES):
            tops[j] = some[j] if some[j] > tops[j] else tops[j]
    top = tops[0]
    for j in range(1, LANES):
        top = tops[j] if tops[j] > top else top
    for j in range(whole):
        x = scores[j] - top
        scores[j] = np.float32(0) if x < _NEGLIGIBLE else exp(x)  # compared this way, a NaN stays NaN
