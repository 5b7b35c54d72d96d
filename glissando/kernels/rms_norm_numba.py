"""Root-mean-square normalisation on a CPU, one pass over memory forward and one backward, compiled by Numba.

x, y, g (B, T, D), w (D,), scale (B, T).
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel

#: rows summed in the working precision before they are added to a float64 total
_RUN = 256


@kernel
def forward(x, w, eps, y, scale, first, last):
    """scale = 1 / sqrt(mean x^2 + eps),   y = x scale w."""
    size = len(w)
    for b in range(first, last):
        for t in range(x.shape[1]):
            row, result = x[b, t], y[b, t]
            total = x.dtype.type(0)
            for d in range(size):
                total += row[d] * row[d]
            r = x.dtype.type(1) / np.sqrt(total / x.dtype.type(size) + x.dtype.type(eps))
            scale[b, t] = r
            for d in range(size):
                result[d] = row[d] * r * w[d]


@kernel
def backward(x, w, scale, g, grad_x, sums, first, last):
    """grad_x = r (g w - x r^2 mean(g w x)),   sums_b += sum_t g x r,   r = scale."""
    size = len(w)
    steps = x.shape[1]
    for b in range(first, last):
        for start in range(0, steps, _RUN):
            run = np.zeros_like(w)
            for t in range(start, min(start + _RUN, steps)):
                row, arrived, result, r = x[b, t], g[b, t], grad_x[b, t], scale[b, t]
                shared = x.dtype.type(0)
                for d in range(size):
                    shared += arrived[d] * w[d] * row[d]
                shared = shared / x.dtype.type(size) * r * r
                for d in range(size):
                    result[d] = r * (arrived[d] * w[d] - row[d] * shared)
                for d in range(size):
                    run[d] += arrived[d] * row[d] * r
            for d in range(size):
                sums[b, d] += run[d]
