"""Attention of one query a head over a cache: what the decoding steps of mixers that keep every token share.

A cache is a list of pages of `GROUP` slots, given by their addresses, so that texts that begin alike share pages. In a
page keys lie as (G, K, 64) and values as (G, 64, K), each as it is read. A page has `GROUP` numbers more at its end, as
a vector may reach beyond a head's.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp
from glissando.kernels.products import GROUP, LANES, add_weighted_rows, sums_of_four, sums_of_one, to_bfloat16

_NEGLIGIBLE, _LOWEST = np.float32(-70), np.float32(-np.inf)


def numbers_at(address: Any, count: Any, kind: Any) -> Any:
    """The `count` numbers of a kind (np.float32, np.float64) that lie at an address, as an array."""
    values = np.frombuffer((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(int(address)), np.uint8)
    return values.view(kind)


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def generated(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generated


@overload(numbers_at)
def _numbers_at(address: Any, count: Any, kind: Any) -> Any:
    def compiled(address: Any, count: Any, kind: Any) -> Any:
        return carray(_pointer(address), count, kind)  # type: ignore[call-arg]

    return compiled


@kernel
def key_place(slot, group, size):
    """Where in its page the first number of a key is; the next one is `GROUP` further. A number for each slot and head
    lies as such keys of size 1."""
    return group * size * GROUP + slot % GROUP


@kernel
def value_place(slot, group, size):
    """Where in its page the first number of a value is; the others follow."""
    return group * size * GROUP + slot % GROUP * size


@kernel
def write_slot(page, at, is_half, count, start, stride, numbers):
    """The numbers (count,) into a cache that begins `at` bytes behind a page's address, from the place `start` on and
    `stride` apart; as bfloat16 where `is_half`."""
    end = start + (count - 1) * stride + 1
    if is_half:
        halves = numbers_at(page + at, end, np.uint16)
        for i in range(count):
            halves[start + i * stride] = to_bfloat16(numbers[i])
    else:
        whole = numbers_at(page + at, end, np.float32)
        for i in range(count):
            whole[start + i * stride] = numbers[i]


@kernel
def key_products(q, heads, groups, size, pages, at, is_half, count, scale, sums, scores):
    """scores (H, slots) = scale (query . key) for the first `count` keys, q (H, K) flat; keys begin `at` bytes behind
    the address of each page, in bfloat16 where `is_half`."""
    queries = q[: heads * size].reshape(1, heads * size)
    for begin in range(0, count, GROUP):
        page, numbers = pages[begin // GROUP] + at, (groups * size + 1) * GROUP
        if is_half:
            halves = numbers_at(page, numbers, np.uint16)
            _page_products(halves, queries, heads, groups, size, begin, count, scale, sums, scores)
        else:
            keys = numbers_at(page, numbers, np.float32)
            _page_products(keys, queries, heads, groups, size, begin, count, scale, sums, scores)


@kernel
def _page_products(keys, queries, heads, groups, size, begin, count, scale, sums, scores):
    shared = heads // groups
    for h in range(heads):
        place, line = key_place(begin, h // shared, size), scores[h, begin : begin + GROUP]
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
def weighted_values(weights, heads, groups, size, pages, at, is_half, count, sums, out):
    """out (H, K) = sum_j w_j v_j / sum_j w_j of each head over the first `count` slots, weights (H, slots); values
    begin `at` bytes behind the address of each page, in bfloat16 where `is_half`.

    Weights behind them, up to the next multiple of 16, are 0. Of 64 slots whose weights are all 0 none is read,
    whatever is in them.
    """
    totals = np.zeros(heads, np.float32)
    for i in range(heads * size):
        out[i] = np.float32(0)
    for begin in range(0, count, GROUP):
        rows = min(-(-(count - begin) // LANES) * LANES, GROUP)
        page, numbers = pages[begin // GROUP] + at, (groups * size + 1) * GROUP
        if is_half:
            halves = numbers_at(page, numbers, np.uint16)
            _add_page(halves, weights, heads, groups, size, begin, rows, totals, sums, out)
        else:
            values = numbers_at(page, numbers, np.float32)
            _add_page(values, weights, heads, groups, size, begin, rows, totals, sums, out)
    for h in range(heads):
        scale, y = np.float32(1) / totals[h], out[h * size : (h + 1) * size]
        for i in range(size):
            y[i] *= scale


@kernel
def _add_page(values, weights, heads, groups, size, begin, rows, totals, sums, out):
    shared = heads // groups
    for h in range(heads):
        line, part = weights[h, begin : begin + rows], np.float32(0)
        for j in range(rows):
            part += line[j]
        if part == 0:
            continue
        totals[h] += part
        place = value_place(begin, h // shared, size)
        add_weighted_rows(weights, h, begin, rows, values, place, size, sums, out[h * size : (h + 1) * size])


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
