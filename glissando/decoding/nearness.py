"""One decoded token of attention by nearness on a CPU: one number a head over a row's own cache, laid out as in
glissando.mixers.attention.numba; tests tie it to the forward."""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.cached import softmax_weights, weighted_values
from glissando.kernels.compiled import kernel


@kernel
def bounded_energy(x, matrix, is_diagonal, eps, tau, size, out):
    """lambda = E / (E + tau), E = x'Lx / (x'x + eps) at least 0, of each vector of x (n, size)."""
    for n in range(len(out)):
        part = x[n * size : (n + 1) * size]
        smooth = square = np.float32(0)
        for i in range(size):
            square += part[i] * part[i]
        if is_diagonal:
            for i in range(size):
                smooth += matrix[i] * part[i] * part[i]
        else:
            for i in range(size):
                row, inner = matrix[i * size : (i + 1) * size], np.float32(0)
                for j in range(size):
                    inner += row[j] * part[j]
                smooth += inner * part[i]
        energy = smooth / (square + np.float32(eps))
        energy = energy if not energy < 0 else np.float32(0)
        out[n] = energy / (energy + np.float32(tau))


@kernel
def nearness(q, k, v, biases, sizes, temperature, keys, values, e, total, latest, filled, capacity, scores, y):
    """Attention by lambdas, exponents e_j - |q - k_j| / T, one query a head: q and k (H,), v (G, K).

    sizes and the rest as in `attention`; e (H, slots) float64: g - C of each key
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, has_importance, shifts = sizes[3] != 0, sizes[4] != 0, sizes[5] != 0
    count = filled + 1
    for g in range(groups):
        slot = (g * capacity + filled) * size
        for d in range(size):
            values[slot + d] = v[g * size + d]
    for h in range(heads):
        own = keys[h * capacity : (h + 1) * capacity]
        own[filled] = latest[h] if shifts else k[h]
        inverse = np.float32(1) / temperature[h]
        for j in range(count):
            scores[j] = -abs(q[h] - own[j]) * inverse
        if has_decay or has_importance:
            near = e[h * capacity : (h + 1) * capacity]
            if has_decay:
                f = np.float64(biases[h])
                total[h] += min(f, 0.0) - math.log1p(math.exp(-abs(f)))
            middle = total[h] if has_decay else 0.0
            near[filled] = (biases[heads + h] if has_importance else np.float32(0)) - middle
            for j in range(count):
                scores[j] += np.float32(near[j] + middle)
        softmax_weights(scores, count)
        begin = (h // (heads // groups)) * capacity * size
        weighted_values(scores, count, values[begin : begin + count * size], size, y[h * size : (h + 1) * size])
    if shifts:
        for h in range(heads):
            latest[h] = q[h]
