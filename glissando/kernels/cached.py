"""Weights and sums over a cache, for one query: what the decoding steps of mixers that keep every token share."""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp

_NEGLIGIBLE = np.float32(-70)


@kernel
def weighted_values(weights, count, values, size, out):
    """out = sum_j w_j v_j / sum_j w_j over the first `count` rows of values (slots, size); four rows at a time. Four
    rows whose weights are all 0 are not read, whatever is in them."""
    total = np.float32(0)
    for j in range(count):
        total += weights[j]
    for d in range(size):
        out[d] = np.float32(0)
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        if a == 0 and b == 0 and c == 0 and e == 0:
            continue
        four = values[j * size : (j + 4) * size]
        for d in range(size):
            out[d] += a * four[d] + b * four[size + d] + c * four[2 * size + d] + e * four[3 * size + d]
    for j in range(whole, count):
        row = values[j * size : (j + 1) * size]
        for d in range(size):
            out[d] += weights[j] * row[d]
    scale = np.float32(1) / total
    for d in range(size):
        out[d] *= scale


@kernel
def softmax_weights(scores, count):
    """exp(scores - their largest) in place; 0 where that is below exp(-70) = 4e-31, which is lost in their sum.

    Its products with values would be subnormal numbers, which take a processor much longer.
    """
    top = np.float32(-np.inf)
    for j in range(count):
        top = max(top, scores[j])
    for j in range(count):
        x = scores[j] - top
        scores[j] = np.float32(0) if x < _NEGLIGIBLE else exp(x)  # compared this way, a NaN stays NaN
