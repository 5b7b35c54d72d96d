"""The energy of vectors by the edges of a graph on a CPU, compiled by Numba.

x (N, K), left and right (E,) the ends of the edges, weight (E,), y and g (N,). Vectors are taken _LANES at a time and
transposed, so that one edge is one vector operation on all of them.
"""

from __future__ import annotations

import numpy as np

from glissando.ops.compiled import kernel

#: vectors side by side; fewer do not pay for the check that the rows of two nodes do not overlap
_LANES = 64
#: edges summed in the working precision before they are added to the total
_RUN = 64


@kernel
def forward(x, left, right, weight, eps, y, first, last):
    """y = sum_e weight (x_left - x_right)^2 / (x'x + eps)."""
    size, edges, zero = x.shape[1], len(weight), x.dtype.type(0)
    entries = np.zeros((size, _LANES), x.dtype)
    rise, run, square = np.empty(_LANES, x.dtype), np.empty(_LANES, x.dtype), np.empty(_LANES, x.dtype)
    for start in range(first, last, _LANES):
        lanes = min(_LANES, last - start)
        for n in range(lanes):
            for k in range(size):
                entries[k, n] = x[start + n, k]
        rise[:], square[:] = zero, zero
        for k in range(size):
            entry = entries[k]
            for n in range(_LANES):
                square[n] += entry[n] * entry[n]
        for begin in range(0, edges, _RUN):
            run[:] = zero
            for e in range(begin, min(begin + _RUN, edges)):
                a, b, w = entries[left[e]], entries[right[e]], weight[e]
                for n in range(_LANES):
                    gap = a[n] - b[n]
                    run[n] += w * gap * gap
            for n in range(_LANES):
                rise[n] += run[n]
        for n in range(lanes):
            y[start + n] = rise[n] / (square[n] + x.dtype.type(eps))


@kernel
def backward(x, left, right, weight, eps, y, g, grad_x, first, last):
    """grad_x = 2 g / (x'x + eps) (Lx - y x),   (Lx)_i = sum over the edges of i of weight (x_i - x_j)."""
    size, zero, two = x.shape[1], x.dtype.type(0), x.dtype.type(2)
    entries, slope = np.zeros((size, _LANES), x.dtype), np.empty((size, _LANES), x.dtype)
    square, value = np.empty(_LANES, x.dtype), np.zeros(_LANES, x.dtype)
    for start in range(first, last, _LANES):
        lanes = min(_LANES, last - start)
        for n in range(lanes):
            value[n] = y[start + n]
            for k in range(size):
                entries[k, n] = x[start + n, k]
        square[:] = zero
        for k in range(size):
            entry, result = entries[k], slope[k]
            for n in range(_LANES):
                square[n] += entry[n] * entry[n]
                result[n] = -value[n] * entry[n]
        for e in range(len(weight)):
            a, b, w = entries[left[e]], entries[right[e]], weight[e]
            to_a, to_b = slope[left[e]], slope[right[e]]
            for n in range(_LANES):
                flow = w * (a[n] - b[n])
                to_a[n] += flow
                to_b[n] -= flow
        for n in range(lanes):
            scale = two * g[start + n] / (square[n] + x.dtype.type(eps))
            for k in range(size):
                grad_x[start + n, k] = scale * slope[k, n]
