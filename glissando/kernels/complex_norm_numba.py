"""The complex norm on a CPU, one pass over memory each way, compiled by Numba; complex numbers as interleaved pairs."""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel


@kernel
def norm_forward(x, eps, out, scale, first, last):
    """out = (z - mean z) r, scale (B, T) = r = 1 / sqrt(mean |z - mean z|^2 + eps)."""
    steps, size = x.shape[1], x.shape[2] // 2
    eps, one = x.dtype.type(eps), x.dtype.type(1)
    share = one / x.dtype.type(size)
    for b in range(first, last):
        for t in range(steps):
            entry, result = x[b, t], out[b, t]
            u, v = x.dtype.type(0), x.dtype.type(0)
            for d in range(size):
                u += entry[2 * d]
                v += entry[2 * d + 1]
            u, v = u * share, v * share
            power = x.dtype.type(0)
            for d in range(size):
                p, q = entry[2 * d] - u, entry[2 * d + 1] - v
                power += p * p + q * q
            r = one / np.sqrt(power * share + eps)
            scale[b, t] = r
            for d in range(size):
                result[2 * d] = (entry[2 * d] - u) * r
                result[2 * d + 1] = (entry[2 * d + 1] - v) * r


@kernel
def norm_backward(y, scale, grad, grad_x, first, last):
    """grad_x = c - mean c with c = r (grad - y mean Re(conj(y) grad)); the mean of y is 0."""
    steps, size = y.shape[1], y.shape[2] // 2
    share = y.dtype.type(1) / y.dtype.type(size)
    for b in range(first, last):
        for t in range(steps):
            entry, arrived, result = y[b, t], grad[b, t], grad_x[b, t]
            u, v, along = y.dtype.type(0), y.dtype.type(0), y.dtype.type(0)
            for d in range(size):
                u += arrived[2 * d]
                v += arrived[2 * d + 1]
                along += arrived[2 * d] * entry[2 * d] + arrived[2 * d + 1] * entry[2 * d + 1]
            u, v, along, r = u * share, v * share, along * share, scale[b, t]
            for d in range(size):
                result[2 * d] = r * (arrived[2 * d] - u - entry[2 * d] * along)
                result[2 * d + 1] = r * (arrived[2 * d + 1] - v - entry[2 * d + 1] * along)
