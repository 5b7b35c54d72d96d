"""One decoded token of softmax attention on a CPU: one query a head over a row's own cache.

Training runs PyTorch's own attention; tests tie the two. Caches are flat: keys and values (G, slots, K), exponents
(H, slots) in float64; the new token stands in the slot `filled`, behind those of the tokens before it.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.cached import softmax_weights, weighted_values
from glissando.kernels.compiled import kernel


@kernel
def _products(query, keys, count, scale, scores):
    """scores = scale (query . key) for the first `count` rows of keys; four at a time."""
    size = len(query)
    whole = count - count % 4
    for j in range(0, whole, 4):
        four = keys[j * size : (j + 4) * size]
        a = b = c = e = np.float32(0)
        for d in range(size):
            a += query[d] * four[d]
            b += query[d] * four[size + d]
            c += query[d] * four[2 * size + d]
            e += query[d] * four[3 * size + d]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = a * scale, b * scale, c * scale, e * scale
    for j in range(whole, count):
        row, a = keys[j * size : (j + 1) * size], np.float32(0)
        for d in range(size):
            a += query[d] * row[d]
        scores[j] = a * scale


@kernel
def step(q, k, v, biases, sizes, scale, keys, values, decay, total, latest, filled, capacity, scores, y):
    """Softmax attention of one query a head.

    q (H, K), k and v (G, K) as they are kept; biases (H): log sigmoid's argument of the forget gate
    sizes  H, G, K, whether there is a forget gate, whether keys are earlier queries
    decay  C of each key (H, slots) float64; total (H,) float64: C; latest (H, K): the query before
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, shifts = sizes[3] != 0, sizes[4] != 0
    count = filled + 1
    for g in range(groups):
        slot = (g * capacity + filled) * size
        for d in range(size):
            keys[slot + d] = latest[g * size + d] if shifts else k[g * size + d]
            values[slot + d] = v[g * size + d]
    if shifts:
        for d in range(heads * size):
            latest[d] = q[d]
    for h in range(heads):
        begin = (h // (heads // groups)) * capacity * size
        _products(q[h * size : (h + 1) * size], keys[begin : begin + count * size], count, scale, scores)
        if has_decay:
            own, f = decay[h * capacity : (h + 1) * capacity], np.float64(biases[h])
            total[h] += min(f, 0.0) - math.log1p(math.exp(-abs(f)))
            own[filled] = total[h]
            for j in range(count):
                scores[j] += np.float32(total[h] - own[j])
        softmax_weights(scores, count)
        weighted_values(scores, count, values[begin : begin + count * size], size, y[h * size : (h + 1) * size])
