"""One decoded token of softmax attention on a CPU: one query a head over a row's own cache.

Training runs PyTorch's own attention; tests tie the two. Caches are flat: keys (slots / 64, G, K, 64), values
(slots / 64, G, 64, K), exponents (slots / 64, H, 64) in float64; the new token stands in the slot `filled`, behind
those of the tokens before it.
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.cached import (
    GROUP,
    add_log_sigmoid,
    key_place,
    key_products,
    softmax_weights,
    value_place,
    weighted_values,
)
from glissando.kernels.compiled import kernel


@kernel
def step(q, k, v, biases, sizes, scale, keys, values, decay, total, latest, filled, scores, sums, y):
    """Softmax attention of one query a head.

    q (H, K), k and v (G, K) as they are kept; biases (H): log sigmoid's argument of the forget gate
    sizes  H, G, K, whether there is a forget gate, whether keys are earlier queries
    decay  C of each key, float64; total (H,) float64: C; latest (H, K): the query before
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, shifts = sizes[3] != 0, sizes[4] != 0
    count = filled + 1
    for g in range(groups):
        slot, key = value_place(filled, g, groups, size), key_place(filled, g, groups, size)
        for d in range(size):
            keys[key + d * GROUP] = latest[g * size + d] if shifts else k[g * size + d]
            values[slot + d] = v[g * size + d]
    if shifts:
        for d in range(heads * size):
            latest[d] = q[d]
    key_products(q, heads, groups, size, keys, count, scale, sums, scores)
    if has_decay:
        add_log_sigmoid(total[:heads], biases)
        for h in range(heads):
            decay[key_place(filled, h, heads, 1)] = total[h]
        for begin in range(0, count, GROUP):
            for h in range(heads):
                at = key_place(begin, h, heads, 1)
                line, own, now = scores[h, begin : begin + GROUP], decay[at : at + GROUP], total[h]
                for j in range(GROUP):
                    line[j] += np.float32(now - own[j])
    for h in range(heads):
        softmax_weights(scores[h], count, sums)
    weighted_values(scores, heads, groups, size, values, count, sums, y)
