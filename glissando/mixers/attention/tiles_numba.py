"""Causal attention and its gradients by tiles of 64 keys and 64 queries, compiled by Numba for processors with AVX-512.

All that a head needs lies in one array m, a tile's numbers behind each other and mostly in the first cache; the sums of
products are in registers. What lies (K, 64) is called across, and a tile of weights is (keys, queries).
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from glissando.kernels.blocks import block, turn
from glissando.kernels.compiled import kernel
from glissando.kernels.products import LANES, as_computed, as_stored

_TILE, _SQUARE = 64, 64 * 64
#: places in m
_MASK, _NONE, _MINUS, _TOP, _SHARE, _TOTAL = 0, *range(_SQUARE, _SQUARE + 5 * _TILE, _TILE)
_WEIGHTS = _TOTAL + _TILE
_ZERO, _ONE, _NEVER, _LOG2E = (np.float32(x) for x in (0, 1, -1e30, 1.4426950408889634))
#: sums of four rows with 64 columns, and of eight with 32
_wide, _powers, _times, _narrow = block(4, 4), block(4, 4, "powers"), block(4, 4, "times"), block(8, 2)
_highest, _summed, _scaled = block(4, 4, "highest"), block(4, 4, "summed powers"), block(4, 4, "scaled")
_shares = block(1, 4, "powers")


@register_jitable
def _zeros(count):
    """float32 zeros that begin where a cache line does."""
    memory = np.zeros(count + LANES, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    return memory[start : start + count]


@register_jitable
def _read(x, b, h, first, count, size, factor, m, to):
    """`count` tokens of a head times `factor`, as a tile in m."""
    for t in range(count):
        row, tile = x[0][b * x[1] + h * x[2] + (first + t) * x[3] :], m[to + t * size : to + t * size + size]
        for c in range(size):
            tile[c] = as_computed(row[c]) * factor
    m[to + count * size : to + _TILE * size] = _ZERO


@register_jitable
def _write(x, b, h, first, count, size, factor, m, at):
    """Writes a tile in m times `factor` to `count` tokens of a head."""
    for t in range(count):
        row, tile = x[0][b * x[1] + h * x[2] + (first + t) * x[3] :], m[at + t * size : at + t * size + size]
        for c in range(size):
            row[c] = as_stored(tile[c] * factor, row[c])


@register_jitable
def _transpose(m, at, rows, columns, to):
    for r in range(0, rows, LANES):
        for c in range(0, columns, LANES):
            turn(m, at + r * columns + c, columns, to + c * rows + r, rows)


@register_jitable
def _mask(m, start):
    """Where sums begin in a tile whose queries are its keys: at m[start:], and for later keys so low that they get no
    weight."""
    for r in range(_TILE):
        for x in range(_TILE):
            m[_MASK + r * _TILE + x] = m[start + x] if x >= r else _NEVER


@register_jitable
def _attend(m, size, query, key, start, distance):
    """Adds a tile of keys and of values to the sums of a tile of queries; see `forward` for the places."""
    tile = _TILE * size
    out, value = query + tile, key + tile
    m[_SHARE : _SHARE + _TILE] = m[_TOP : _TOP + _TILE]
    for r in range(0, _TILE, 4):
        at = _WEIGHTS + r * _TILE
        _highest(m, query, _TILE, key + r * size, size, 1, size, start + r * distance, distance, at, _TILE, _TOP)
    # A logit less the highest is the sum of it and the product of the highest with -1.
    _shares(m, _TOP, 0, _MINUS, 0, 0, 1, _SHARE, 0, _SHARE, 0, 0)
    for x in range(_TILE):
        m[_TOTAL + x] *= m[_SHARE + x]
    for at in range(_WEIGHTS, _WEIGHTS + _SQUARE, 4 * _TILE):
        _summed(m, _TOP, 0, _MINUS, 0, 0, 1, at, _TILE, at, _TILE, _TOTAL)
    for c in range(0, size, 4):
        at = out + c * _TILE
        _scaled(m, _WEIGHTS, _TILE, value + c, 1, size, _TILE, at, _TILE, at, _TILE, _SHARE)


@kernel
def forward(q, k, v, shape, scale, y, log_sums, first, last):
    """y of `tiles`, and its L in log_sums (B H, T) float32.

    q, k, v, y    (B, H, T, K), each as its numbers in one row and how far apart those of a row, head and token are
    shape         (H, T, K)
    first, last   which of all B H heads

    In m: the `_MASK`; for a tile of queries the highest logits, the share that a higher one leaves of earlier sums, and
    the sums of weights; the weights; the queries and the sums of values, both across, and y; tiles of keys and
    of values in turn.
    """
    heads, steps, size = shape
    tile, room = _TILE * size, -(-steps // _TILE) * _TILE
    query = _WEIGHTS + _SQUARE
    out, row, keys = query + tile, query + 2 * tile, query + 3 * tile
    m = _zeros(keys + 2 * room * size)
    m[_MINUS : _MINUS + _TILE] = -_ONE
    _mask(m, _NONE)
    for n in range(first, last):
        b, h = n // heads, n % heads
        for j in range(0, room, _TILE):
            count, key = min(_TILE, steps - j), keys + 2 * j * size
            _read(k, b, h, j, count, size, _ONE, m, key)
            _read(v, b, h, j, count, size, _ONE, m, key + tile)
        for i in range(0, room, _TILE):
            count = min(_TILE, steps - i)
            _read(q, b, h, i, count, size, np.float32(scale) * _LOG2E, m, row)
            _transpose(m, row, _TILE, size, query)
            m[_TOP : _TOP + _TILE] = _NEVER
            m[_TOTAL : _TOTAL + _TILE] = _ZERO
            m[out : out + tile] = _ZERO
            for j in range(0, i, _TILE):
                _attend(m, size, query, keys + 2 * j * size, _NONE, 0)
            _attend(m, size, query, keys + 2 * i * size, _MASK, _TILE)
            for x in range(_TILE):
                m[_SHARE + x] = _ONE / m[_TOTAL + x]
            for c in range(size):
                for x in range(_TILE):
                    m[out + c * _TILE + x] *= m[_SHARE + x]
            _transpose(m, out, size, _TILE, row)
            _write(y, b, h, i, count, size, _ONE, m, row)
            for x in range(count):
                log_sums[n, i + x] = m[_TOP + x] + np.log2(m[_TOTAL + x])


@register_jitable
def _gather(m, size, query, key, start, distance):
    """Adds what a tile of queries and one of keys contribute to the gradients; see `backward` for the places."""
    tile = _TILE * size
    value, grad_key, grad_value, slopes = key + tile, key + 2 * tile, key + 3 * tile, key + 4 * tile
    arrived, query_across, arrived_across = query + tile, query + 2 * tile, query + 3 * tile
    grad_query = query + 4 * tile
    shared = grad_query + tile + _TILE
    for r in range(0, _TILE, 8):
        for s in range(r, r + 8, 4):
            weight, at, x = _WEIGHTS + (s - r) * _TILE, start + s * distance, key + s * size
            _powers(m, query_across, _TILE, x, size, 1, size, at, distance, weight, _TILE, 0)
            at, x = slopes + s * _TILE, value + s * size
            _times(m, arrived_across, _TILE, x, size, 1, size, shared, 0, at, _TILE, weight)
        seen = r if distance > 0 else 0  # the first query that sees key r
        count, weight, slope = _TILE - seen, _WEIGHTS + seen, slopes + r * _TILE + seen
        for c in range(0, size, 32):
            at, x = grad_value + r * size + c, arrived + seen * size + c
            _narrow(m, x, size, weight, _TILE, 1, count, at, size, at, size, 0)
            at, x = grad_key + r * size + c, query + seen * size + c
            _narrow(m, x, size, slope, _TILE, 1, count, at, size, at, size, 0)
    for c in range(0, size, 4):
        at = grad_query + c * _TILE
        _wide(m, slopes, _TILE, key + c, 1, size, _TILE, at, _TILE, at, _TILE, 0)


@kernel
def backward(q, k, v, y, g, shape, log_sums, scale, grad_q, grad_k, grad_v, first, last):
    """The gradients of `tiles`; arguments as in `forward`, g and the gradients like q.

    In m: the `_MASK`; weights of 8 keys; a tile of keys, one of values, their gradients, and dS; then for each tile of
    queries these and g, both across, the gradient across, -L and -g y.
    """
    heads, steps, size = shape
    tile, room, factor = _TILE * size, -(-steps // _TILE) * _TILE, np.float32(scale)
    key = _WEIGHTS + 8 * _TILE
    value, grad_key, grad_value = key + tile, key + 2 * tile, key + 3 * tile
    queries, stride = key + 4 * tile + _SQUARE, 5 * size + 2  # numbers of a query
    m = _zeros(queries + room * stride)
    for n in range(first, last):
        b, h = n // heads, n % heads
        for i in range(0, room, _TILE):
            query, count = queries + i * stride, min(_TILE, steps - i)
            arrived, below = query + tile, query + 5 * tile
            _read(q, b, h, i, count, size, factor * _LOG2E, m, query)
            _read(g, b, h, i, count, size, _ONE, m, arrived)
            _read(y, b, h, i, count, size, _ONE, m, key)
            _transpose(m, query, _TILE, size, query + 2 * tile)
            _transpose(m, arrived, _TILE, size, query + 3 * tile)
            m[query + 4 * tile : below] = _ZERO
            m[below : below + _TILE] = _NEVER
            for t in range(count):
                total = _ZERO
                for c in range(size):
                    total += m[arrived + t * size + c] * m[key + t * size + c]
                m[below + t], m[below + _TILE + t] = -log_sums[n, i + t], -total
        for j in range(0, room, _TILE):
            count, query = min(_TILE, steps - j), queries + j * stride
            _read(k, b, h, j, count, size, _ONE, m, key)
            _read(v, b, h, j, count, size, _ONE, m, value)
            m[grad_key : grad_key + 2 * tile] = _ZERO
            _mask(m, query + 5 * tile)
            _gather(m, size, query, key, _MASK, _TILE)
            for later in range(query + _TILE * stride, queries + room * stride, _TILE * stride):
                _gather(m, size, later, key, later + 5 * tile, 0)
            # Later keys have no weight for these queries.
            _transpose(m, query + 4 * tile, size, _TILE, key)
            _write(grad_q, b, h, j, count, size, factor, m, key)
            _write(grad_k, b, h, j, count, size, _ONE / _LOG2E, m, grad_key)
            _write(grad_v, b, h, j, count, size, _ONE, m, grad_value)
