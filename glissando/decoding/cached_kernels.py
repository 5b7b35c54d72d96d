"""One decoded token of the mixers that keep every token seen: one query a head over a row's own cache.

Caches are flat: keys and values (G, slots, K), exponents (H, slots) in float64; the new token stands in the slot
`filled`, behind those of the tokens before it.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.decoding.kernels import exp
from glissando.ops.compiled import kernel

_NEGLIGIBLE = np.float32(-70)


@kernel
def _weighted_values(weights, count, values, size, out):
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
def _softmax_weights(scores, count):
    """exp(scores - their largest) in place; 0 where that is below exp(-70) = 4e-31, which is lost in their sum.

    Its products with values would be subnormal numbers, which take a processor much longer.
    """
    top = np.float32(-np.inf)
    for j in range(count):
        top = max(top, scores[j])
    for j in range(count):
        x = scores[j] - top
        scores[j] = np.float32(0) if x < _NEGLIGIBLE else exp(x)  # compared this way, a NaN stays NaN


@kernel
def attention(q, k, v, biases, sizes, scale, keys, values, lowered, total, latest, filled, capacity, scores, y):
    """Softmax attention of one query a head.

    q (H, K), k and v (G, K) as they are kept; biases (2 H): log sigmoid's argument of the forget gate, then importance
    sizes    H, G, K, whether there is a forget gate, an importance, whether keys are earlier queries
    lowered  C - g of each key (H, slots) float64; total (H,) float64: C; latest (H, K): the query before
    """
    heads, groups, size = sizes[0], sizes[1], sizes[2]
    has_decay, has_importance, shifts = sizes[3] != 0, sizes[4] != 0, sizes[5] != 0
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
        if has_decay or has_importance:
            own = lowered[h * capacity : (h + 1) * capacity]
            if has_decay:
                f = np.float64(biases[h])
                total[h] += min(f, 0.0) - math.log1p(math.exp(-abs(f)))
            own[filled] = (total[h] if has_decay else 0.0) - (biases[heads + h] if has_importance else np.float32(0))
            middle = total[h] if has_decay else 0.0
            for j in range(count):
                scores[j] += np.float32(middle - own[j])
        _softmax_weights(scores, count)
        _weighted_values(scores, count, values[begin : begin + count * size], size, y[h * size : (h + 1) * size])


@kernel
def tau_lambdas(x, matrix, is_diagonal, eps, tau, size, out):
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
def tau_attention(q, k, v, biases, sizes, temperature, keys, values, e, total, latest, filled, capacity, scores, y):
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
        _softmax_weights(scores, count)
        begin = (h // (heads // groups)) * capacity * size
        _weighted_values(scores, count, values[begin : begin + count * size], size, y[h * size : (h + 1) * size])
    if shifts:
        for h in range(heads):
            latest[h] = q[h]
