"""Attention by |lambda_q - lambda_k| without its matrix: what forward and backward have in common.

Time is halved again and again. At each cut the queries of the right half attend to the keys of the left half, all
of which are in their past, so that only the order along lambda matters:

    sum_j exp(e_j - |q - k_j| / T) v_j  =  exp(-q / T) sum_{k_j < q} exp(e_j + k_j / T) v_j
                                         + exp(+q / T) sum_{k_j >= q} exp(e_j - k_j / T) v_j

Keys and queries are sorted together, once: a cut partitions the sorted list, and each part stays sorted. A running sum
is a pair (U, S), S relative to the largest exponent U so far, so that nothing overflows whatever the temperature, the
importance or the gate. Exponents and their maxima are float64, for they may be in the thousands; sums are of the
working type. What bounds the time: at each of the log2(N / 32) cuts a row of v is read twice and a row of o read and
written twice, at some 10 ns a row of 64 in float32, beside 200 ns for a token in its own block.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from glissando.kernels.compiled import kernel

#: positions that attend to each other directly
_BLOCK = 32
#: exp of less than this is 0: beside a weight of 1 it is nothing, in float64 too
_NOTHING = -60.0


def _exp(x: Any) -> Any:
    """exp(x) for x <= 0 of the working type; float32 by a polynomial that the compiler can vectorise."""
    return np.exp(x)


@overload(_exp)
def _exp_of_type(x):
    if x is not types.float32:
        return lambda x: 0.0 if x <= _NOTHING else math.exp(x)
    nothing, log2e = np.float32(_NOTHING), np.float32(1.4426950408889634)
    high, low, half = np.float32(0.693359375), np.float32(-2.12194440e-4), np.float32(0.5)
    c2, c3, c4 = np.float32(0.5), np.float32(1 / 6), np.float32(1 / 24)
    c5, c6, c7, one = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040), np.float32(1)
    zero = np.float32(0)

    def exp32(x):
        y = nothing if x <= nothing else x  # compared this way, a NaN stays NaN
        n = np.floor(y * log2e + half)
        f = y - n * high - n * low
        p = one + f * (one + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * (c6 + f * c7))))))
        scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        return zero if x <= nothing else p * scale

    return exp32


#: What one head needs besides its results. Integers: the sorted keys and queries of a cut, how many keys stand at or
#: below a query and strictly below, how many queries stand below a key. Float64: scaled lambdas, exponents, maxima.
Scratch = namedtuple(
    "Scratch",
    "keys queries below strict before loose spare x e y f top_up top_down up down "
    "sum_up sum_down beta c_up c_down ones s lag",
)


@kernel
def scratch_for(like, length, size):
    def integers():
        return np.empty(2 * length, np.int32)

    def exact():
        return np.empty(length, np.float64)

    def working():
        return np.empty(length, like.dtype)

    return Scratch(
        integers(), integers(), integers(), integers(), integers(), integers(), integers(),
        exact(), exact(), exact(), exact(), exact(), exact(),
        np.empty((2, length), like.dtype), np.empty((2, length), like.dtype),
        working(), working(), working(), working(), working(), np.ones(length, like.dtype),
        np.empty(size, like.dtype), np.empty(size, like.dtype),
    )  # fmt: skip


@kernel
def partition(ids, first, last, middle, n_keys, past, work):
    """Cut ids[first:last], sorted along lambda, at position `middle`: the left part, then the right, each still sorted.

    Fills work.keys (left) and work.queries (right), both sorted, work.below (left keys before each query) and
    work.before (right queries before each key); returns their counts. A key stands before the queries it is equal to.
    """
    left_keys, right_queries, left, right = 0, 0, first, 0
    for slot in range(first, last):
        item = ids[slot]
        is_key = item < n_keys
        is_right = (item if is_key else item - n_keys + past) >= middle
        work.keys[left_keys] = item
        work.before[left_keys] = right_queries
        work.queries[right_queries] = item - n_keys
        work.below[right_queries] = left_keys
        left_keys += is_key and not is_right
        right_queries += is_right and not is_key
        ids[left] = item
        work.spare[right] = item
        left += not is_right
        right += is_right
    for slot in range(right):
        ids[left + slot] = work.spare[slot]
    return left_keys, right_queries


@kernel
def running(x, e, count, is_up, top, factors):
    """The factors [a, w] and exponents of a running sum over x, which is sorted upward.

    up:    S_r = a_r S_{r-1} + w_r v_r is sum_{s <= r} exp(e_s + x_s - top_r) v_s
    down:  S_r = a_r S_{r+1} + w_r v_r is sum_{s >= r} exp(e_s - x_s - top_r) v_s
    """
    highest = -np.inf
    for step in range(count):
        r = step if is_up else count - 1 - step
        value = e[r] + x[r] if is_up else e[r] - x[r]
        top[r] = max(highest, value)
        factors[0, r] = highest - top[r]
        factors[1, r] = value - top[r]
        highest = top[r]
    for r in range(count):
        factors[0, r] = _exp(factors[0, r])
        factors[1, r] = _exp(factors[1, r])


@kernel
def strictly(x, others, n_others, below, strict):
    """strict_i: how many of the sorted x are less than others_i, below_i of them being less or equal."""
    i, run = 0, 0
    for i in range(n_others):
        n = below[i]
        # Equal keys are passed once for all the queries that share them.
        if n > 0 and x[n - 1] == others[i]:
            if i == 0 or others[i - 1] != others[i]:
                run = n - 1
                while run > 0 and x[run - 1] == others[i]:
                    run -= 1
            strict[i] = run
        else:
            strict[i] = n


@kernel
def gather(work, q, k, e, inverse, n_keys, n_queries):
    """Scaled lambdas and exponents in sorted order."""
    for r in range(n_keys):
        work.x[r] = k[work.keys[r]] * inverse
        work.e[r] = e[work.keys[r]]
    for i in range(n_queries):
        work.y[i] = q[work.queries[i]] * inverse


@kernel
def start_of(ids, order, n_keys, past, n_queries):
    """order without the keys that no query sees; returns how many items are left."""
    count = 0
    for slot in range(order.shape[0]):
        ids[count] = order[slot]
        count += order[slot] >= n_keys or order[slot] < past + n_queries
    return count


@kernel
def widest_from(first, length):
    """The width of the widest part of time that begins at a block: its halves begin there, too, or half of it later."""
    width = _BLOCK
    while width < length:
        width *= 2
    while first % width:
        width //= 2
    return width
