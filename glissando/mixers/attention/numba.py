"""One decoded token of softmax attention on a CPU: one query a head over a row's own cache.

Training runs PyTorch's own attention; tests tie the two. A cache is a list of pages (glissando.kernels.cached); the new
token stands in the slot `filled`, behind those of the tokens before it.
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.cached import (
    GROUP,
    add_log_sigmoid,
    key_place,
    key_products,
    numbers_at,
    softmax_weights,
    value_place,
    weighted_values,
    write_slot,
)
from glissando.kernels.compiled import kernel


@kernel
def step(q, k, v, biases, sizes, scale, pages, places, total, latest, filled, scores, sums, y):
    """Softmax attention of one query a head.

    q (H, K), k and v (G, K) as they are kept; biases (H): log sigmoid's argument of the forget gate
    sizes  H, G, K, whether there is a forget gate, whether keys are earlier queries, whether caches are bfloat16
    pages  addresses; behind each, `places` bytes further, keys (G, K, 64), values (G, 64, K), and C of each key (H, 64)
           in float64
    total (H,) float64: C; latest (H, K): the query before
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, shifts, is_half = sizes[3] != 0, sizes[4] != 0, sizes[5] != 0
    count, page, key_numbers = filled + 1, pages[filled // GROUP], latest if shifts else k
    for g in range(groups):
        write_slot(page, places[0], is_half, size, key_place(filled, g, size), GROUP, key_numbers[g * size :])
        write_slot(page, places[1], is_half, size, value_place(filled, g, size), 1, v[g * size :])
    if shifts:
        for d in range(heads * size):
            latest[d] = q[d]
    key_products(q, heads, groups, size, pages, places[0], is_half, count, scale, sums, scores)
    if has_decay:
        add_log_sigmoid(total[:heads], biases)
        decay = numbers_at(page + places[2], heads * GROUP, np.float64)
        for h in range(heads):
            decay[key_place(filled, h, 1)] = total[h]
        for begin in range(0, count, GROUP):
            decay = numbers_at(pages[begin // GROUP] + places[2], heads * GROUP, np.float64)
            for h in range(heads):
                at = key_place(begin, h, 1)
                line, logit_decay, now = scores[h, begin : begin + GROUP], decay[at : at + GROUP], total[h]
                for j in range(GROUP):
                    line[j] += np.float32(now - logit_decay[j])
    for h in range(heads):
        softmax_weights(scores[h], count, sums)
    weighted_values(scores, heads, groups, size, pages, places[1], is_half, count, sums, y)
