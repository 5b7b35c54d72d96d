"""What blocks compute beside their mixers, on a CPU: each in one pass over memory each way, compiled by Numba.

y, g (B, T, D) are an output and the gradient that arrives at it; complex numbers are interleaved pairs.
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import logistic
from glissando.kernels.products import as_computed, as_stored

#: steps summed in the working precision before they are added to a float64 total
_RUN = 256


@kernel
def rms_norm_forward(x, w, eps, y, scale, first, last):
    """x, y (B, T, D), w (D,), scale (B, T):  scale = 1 / sqrt(mean x^2 + eps),   y = x scale w."""
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
def rms_norm_backward(x, w, scale, g, grad_x, sums, first, last):
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


@kernel
def complex_norm_forward(x, eps, out, scale, first, last):
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
def complex_norm_backward(y, scale, grad, grad_x, first, last):
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


@kernel
def swiglu_forward(h, y, first, last):
    """y = a sigmoid(a) b,   h = [a, b] (B, T, 2 F): float32, float64, or the bits of bfloat16, computed in float32."""
    size = y.shape[2]
    for b in range(first, last):
        for t in range(y.shape[1]):
            gate, up, result = h[b, t, :size], h[b, t, size:], y[b, t]
            for i in range(size):
                a = as_computed(gate[i])
                result[i] = as_stored(a * logistic(a) * as_computed(up[i]), gate[i])


@kernel
def swiglu_backward(h, g, grad_h, first, last):
    """grad_a = g b s (1 + a (1 - s)),   grad_b = g a s,   s = sigmoid(a)."""
    size = g.shape[2]
    for b in range(first, last):
        for t in range(g.shape[1]):
            gate, up, arrived = h[b, t, :size], h[b, t, size:], g[b, t]
            grad_gate, grad_up = grad_h[b, t, :size], grad_h[b, t, size:]
            for i in range(size):
                a, flow = as_computed(gate[i]), as_computed(arrived[i])
                s = logistic(a)
                silu = a * s
                grad_up[i] = as_stored(flow * silu, gate[i])
                grad_gate[i] = as_stored(flow * as_computed(up[i]) * (s + silu * (1 - s)), gate[i])


@kernel
def short_conv_forward(z, w, y, first, last):
    """y_t = sum_j w_j z_{t+j}; z (B, T + W - 1, D) is the past and the inputs, w (W, D)."""
    width, size = w.shape
    for b in range(first, last):
        for t in range(y.shape[1]):
            for d in range(size):
                y[b, t, d] = w[0, d] * z[b, t, d]
            for j in range(1, width):
                for d in range(size):
                    y[b, t, d] += w[j, d] * z[b, t + j, d]


@kernel
def short_conv_backward(z, w, g, grad_z, sums, first, last):
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


@kernel
def rotate_pairs(x, cos, sin, y, first, last):
    """Pairs (i, i + K/2) of x (B, T, H, K) by cos, sin (1 or B, T, K/2)."""
    half = cos.shape[2]
    for b in range(first, last):
        of = b if cos.shape[0] > 1 else 0
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                pairs, turned = x[b, t, h], y[b, t, h]
                for i in range(half):
                    c, s = cos[of, t, i], sin[of, t, i]
                    turned[i] = pairs[i] * c - pairs[half + i] * s
                    turned[half + i] = pairs[half + i] * c + pairs[i] * s
