"""The short convolution on a CPU, one pass over memory forward and one backward, compiled by Numba.

z (B, T + W - 1, D) is the past and the inputs, w (W, D), y and g (B, T, D).
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel

#: steps summed in the working precision before they are added to a float64 total
_RUN = 256


@kernel
def forward(z, w, y, first, last):
    """y_t = sum_j w_j z_{t+j}."""
    width, size = w.shape
    for b in range(first, last):
        for t in range(y.shape[1]):
            for d in range(size):
                y[b, t, d] = w[0, d] * z[b, t, d]
            for j in range(1, width):
                for d in range(size):
                    y[b, t, d] += w[j, d] * z[b, t + j, d]


@kernel
def backward(z, w, g, grad_z, sums, first, last):
    """grad_z_s = sum_j w_j g_{s-j},   sums_j += sum_t g_t z_{t+j}."""
    width, size = w.shape
    steps = g.shape[1]
    for b in range(first, last):
        for s in range(steps + width - 1):
            for d in range(size):
                grad_z[b, s, d] = 0
            for j in range(max(0, s - steps + 1), min(width, s + 1)):
                for d in range(size):
                    grad_z[b, s, d] += w[j, d] * g[b, s - j, d]
        for start in range(0, steps, _RUN):
            run = np.zeros_like(w)
            for t in range(start, min(start + _RUN, steps)):
                for j in range(width):
                    for d in range(size):
                        run[j, d] += g[b, t, d] * z[b, t + j, d]
            for j in range(width):
                for d in range(size):
                    sums[b, j, d] += run[j, d]
