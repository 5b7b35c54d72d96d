"""One decoded token of attention by nearness on a CPU: one number a head over a row's own cache, laid out as in
glissando.mixers.attention.numba; tests tie it to the forward."""

from __future__ import annotations

import numpy as np

from glissando.kernels.cached import (
    GROUP,
    add_log_sigmoid,
    key_place,
    numbers_at,
    softmax_weights,
    value_place,
    weighted_values,
    write_slot,
)
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
def _exponents(q, pages, places, temperature, exact, total, count, scores):
    """scores (H, slots) = e_j + total - |q - k_j| / T of the first `count` keys; e and total count where `exact`."""
    heads = len(temperature)
    for begin in range(0, count, GROUP):
        page = pages[begin // GROUP]
        keys = numbers_at(page + places[0], heads * GROUP, np.float32)
        for h in range(heads):
            at, query, inverse = key_place(begin, h, 1), q[h], np.float32(1) / temperature[h]
            key, line = keys[at : at + GROUP], scores[h, begin : begin + GROUP]
            for j in range(GROUP):
                line[j] = -abs(query - key[j]) * inverse
            if exact:
                near = numbers_at(page + places[2], heads * GROUP, np.float64)[at : at + GROUP]
                middle = total[h]
                for j in range(GROUP):
                    line[j] += np.float32(near[j] + middle)


@kernel
def nearness(q, k, v, biases, sizes, temperature, pages, places, total, latest, filled, scores, sums, y):
    """Attention by lambdas, exponents e_j - |q - k_j| / T, one query a head: q and k (H,), v (G, K).

    sizes and the rest as in `attention`; in a page keys and e (H, 64), e float64: g - C of each key. Of caches values
    alone may be bfloat16: T divides differences of keys
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, has_importance, shifts, is_half = sizes[3] != 0, sizes[4] != 0, sizes[5] != 0, sizes[6] != 0
    count, page = filled + 1, pages[filled // GROUP]
    keys = numbers_at(page + places[0], heads * GROUP, np.float32)
    e = numbers_at(page + places[2], heads * GROUP, np.float64)
    for g in range(groups):
        write_slot(page, places[1], is_half, size, value_place(filled, g, size), 1, v[g * size :])
    if has_decay:
        add_log_sigmoid(total[:heads], biases)
    sum_of_logs = total[:heads] if has_decay else np.zeros(heads)
    for h in range(heads):
        place = key_place(filled, h, 1)
        keys[place] = latest[h] if shifts else k[h]
        if has_decay or has_importance:
            e[place] = (biases[heads + h] if has_importance else np.float32(0)) - sum_of_logs[h]
    _exponents(q, pages, places, temperature[:heads], has_decay or has_importance, sum_of_logs, count, scores)
    for h in range(heads):
        softmax_weights(scores[h], count, sums)
    weighted_values(scores, heads, groups, size, pages, places[1], is_half, count, sums, y)
    if shifts:
        for h in range(heads):
            latest[h] = q[h]
