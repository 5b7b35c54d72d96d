"""Gradients of causal attention by tiles of 64 keys and 64 queries, compiled by Numba for processors with AVX-512.

A tile's logits and their gradients stay in the first cache, and the sums of its products in registers.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp
from glissando.kernels.products import LANES, as_computed, as_stored, sums_of_block

_TILE, _ROWS, _HALF = 64, 4, 2 * LANES
_ZERO, _NEVER = np.float32(0), np.float32(1e30)
#: logarithm of the least weight that counts
_LEAST = np.float32(-70)
#: sums of four rows with 64 and with 32 columns
_wide, _narrow = sums_of_block(_ROWS, _TILE // LANES), sums_of_block(_ROWS, _HALF // LANES)


@register_jitable
def _zeros(count):
    """float32 zeros that begin where a cache line does."""
    memory = np.zeros(count + LANES, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    return memory[start : start + count]


@kernel
def backward(q, k, v, y, g, log_sums, scale, grad_q, grad_k, grad_v, first, last):
    """The gradients of `tiles`.

    q to g and the gradients (B, H, T, K), float32 or the bits of bfloat16, K a multiple of 32; L = log_sums (B H, T)
    float32; for the heads from `first` to `last` of all B H
    """
    heads, steps, size = q.shape[1], q.shape[2], q.shape[3]
    room = -(-steps // _TILE) * _TILE
    spaces = _zeros(10 * room * size).reshape(10, room * size)
    rows, across, totals = spaces[:4], spaces[4:7], spaces[7:]
    sums, shared = _zeros(room), _zeros(room)
    sums[:] = _NEVER
    weights, slopes, out = _zeros(_TILE * _TILE), _zeros(_TILE * _TILE), _zeros(_ROWS * _TILE)
    for n in range(first, last):
        b, h = n // heads, n % heads
        _copy(q[b, h], k[b, h], v[b, h], g[b, h], np.float32(scale), rows, across)
        for t in range(steps):
            total = _ZERO
            for c in range(size):
                total += as_computed(g[b, h, t, c]) * as_computed(y[b, h, t, c])
            sums[t], shared[t] = log_sums[n, t], total
        totals[:] = _ZERO
        for j in range(0, room, _TILE):
            for i in range(j, room, _TILE):
                _weigh(rows, across, size, i, j, sums, shared, weights, slopes)
                _gather(rows, across, size, i, j, weights, slopes, totals, out)
        for t in range(steps):
            place = (t - t % _TILE) * size + t % _TILE
            for c in range(size):
                like = q[b, h, t, c]
                grad_q[b, h, t, c] = as_stored(totals[0, place + c * _TILE] * np.float32(scale), like)
                grad_k[b, h, t, c] = as_stored(totals[1, t * size + c], like)
                grad_v[b, h, t, c] = as_stored(totals[2, t * size + c], like)


@register_jitable
def _copy(q, k, v, g, scale, rows, across):
    """A head's q scale, k, v and g by rows, and all but v across: (tiles, K, 64), so that a
    tile's numbers follow each other."""
    size = q.shape[1]
    for t in range(q.shape[0]):
        place = (t - t % _TILE) * size + t % _TILE
        for c in range(size):
            rows[0, t * size + c] = across[0, place + c * _TILE] = as_computed(q[t, c]) * scale
            rows[1, t * size + c] = across[1, place + c * _TILE] = as_computed(k[t, c])
            rows[2, t * size + c] = as_computed(v[t, c])
            rows[3, t * size + c] = across[2, place + c * _TILE] = as_computed(g[t, c])


@register_jitable
def _weigh(rows, across, size, i, j, sums, shared, weights, slopes):
    """p and dS of the keys from j on and the queries from i on, (keys, queries)."""
    keys, values = rows[1].reshape(-1, size), rows[2].reshape(-1, size)
    for r in range(0, _TILE, _ROWS):
        _wide(across[0], i * size, _TILE, size, keys, 0, j + r, j + _TILE, weights[r * _TILE :])
        _wide(across[2], i * size, _TILE, size, values, 0, j + r, j + _TILE, slopes[r * _TILE :])
    of_sums, of_shared = sums[i : i + _TILE], shared[i : i + _TILE]
    for r in range(_TILE):
        row, slope = weights[r * _TILE : (r + 1) * _TILE], slopes[r * _TILE : (r + 1) * _TILE]
        for x in range(_TILE):
            exponent = row[x] - of_sums[x]
            # Products of subnormal weights would take many times as long.
            weight = _ZERO if exponent <= _LEAST else exp(exponent)
            row[x] = weight
            slope[x] = weight * (slope[x] - of_shared[x])
        if i == j:
            row[:r] = _ZERO
            slope[:r] = _ZERO


@register_jitable
def _gather(rows, across, size, i, j, weights, slopes, totals, out):
    """Adds a tile's products to dq (across), dk and dv."""
    p, ds, keys = weights.reshape(_TILE, _TILE), slopes.reshape(_TILE, _TILE), across[1].reshape(-1, _TILE)
    for r in range(0, _TILE, _ROWS):
        for c in range(0, size, _HALF):
            _narrow(rows[3], i * size + c, size, _TILE, p, 0, r, _TILE, out)
            _add(totals[2], (j + r) * size + c, size, out, _HALF)
            _narrow(rows[0], i * size + c, size, _TILE, ds, 0, r, _TILE, out)
            _add(totals[1], (j + r) * size + c, size, out, _HALF)
    first = j // _TILE * size
    for c in range(0, size, _ROWS):
        _wide(slopes, 0, _TILE, _TILE, keys, 0, first + c, first + size, out)
        _add(totals[0], i * size + c * _TILE, _TILE, out, _TILE)


@register_jitable
def _add(totals, at, stride, out, width):
    """Adds four rows of `width` sums to rows that begin `stride` apart from `at` on."""
    for r in range(_ROWS):
        row, added = totals[at + r * stride : at + r * stride + width], out[r * width : r * width + width]
        for x in range(width):
            row[x] += added[x]
