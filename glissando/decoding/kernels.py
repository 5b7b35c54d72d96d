"""The kernels of one decoded token: vectors of one row, in float32.

All vectors of a program lie in one array of registers, so that a kernel is given the array and where each vector
begins.

Attention by nearness has one number a head over a row's own cache, laid out as in glissando.mixers.attention.numba;
tests tie it to the forward.
"""

from __future__ import annotations

import math

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
from glissando.kernels.exponentials import expm1, sigmoid
from glissando.kernels.products import first_of, from_bfloat16

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0, 0.5, 1, 2))


@kernel
def embed(weights, halves, bytes_, kind, at, scales, count, size, token, out):
    """A row of a table (count, size) by groups: of float32 numbers (kind 0), bfloat16 (1) or int8 with a scale (2)."""
    first, width = first_of(token, size, count)
    begin = at + first
    if kind == 0:
        for i in range(size):
            out[i] = weights[begin + i * width]
    elif kind == 1:
        for i in range(size):
            out[i] = from_bfloat16(halves[begin + i * width])
    else:
        scale = weights[scales + token]
        for i in range(size):
            out[i] = scale * np.float32(bytes_[begin + i * width])


@kernel
def rms_norm(x, gain, eps, y):
    """y = gain x / sqrt(mean x^2 + eps)."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1 / math.sqrt(total / len(x) + eps))
    for i in range(len(x)):
        y[i] = x[i] * scale * gain[i]


@kernel
def layer_norm(x, gain, bias, eps, y):
    """y = gain (x - mean) / sqrt(var + eps) + bias."""
    mean = np.float32(0)
    for i in range(len(x)):
        mean += x[i]
    mean /= np.float32(len(x))
    total = np.float32(0)
    for i in range(len(x)):
        total += (x[i] - mean) * (x[i] - mean)
    scale = np.float32(1 / math.sqrt(total / len(x) + eps))
    for i in range(len(x)):
        y[i] = (x[i] - mean) * scale * gain[i] + bias[i]


@kernel
def complex_norm(x, eps, y):
    """glissando.kernels.complex_norm."""
    n = len(x) // 2
    real = imag = total = np.float32(0)
    for i in range(n):
        real += x[2 * i]
        imag += x[2 * i + 1]
    real /= np.float32(n)
    imag /= np.float32(n)
    for i in range(n):
        a, b = x[2 * i] - real, x[2 * i + 1] - imag
        total += a * a + b * b
    scale = np.float32(1 / math.sqrt(total / n + eps))
    for i in range(n):
        y[2 * i] = (x[2 * i] - real) * scale
        y[2 * i + 1] = (x[2 * i + 1] - imag) * scale


@kernel
def silu_product(gate, x, y):
    """y = silu(gate) x."""
    for i in range(len(y)):
        y[i] = gate[i] * sigmoid(gate[i]) * x[i]


@kernel
def activate(kind, x, y):
    """y = relu (0), relu^2 (1), gelu (2), tanh (3) or sigmoid (4) of x."""
    if kind == 0:
        for i in range(len(x)):
            y[i] = x[i] if not x[i] < _ZERO else _ZERO
    elif kind == 1:
        for i in range(len(x)):
            a = x[i] if not x[i] < _ZERO else _ZERO
            y[i] = a * a
    elif kind == 2:
        for i in range(len(x)):
            y[i] = np.float32(_HALF * x[i] * (_ONE + math.erf(x[i] * np.float32(math.sqrt(0.5)))))
    elif kind == 3:
        for i in range(len(x)):
            e = expm1(-_TWO * abs(x[i]))
            t = -e / (_TWO + e)
            y[i] = -t if x[i] < _ZERO else t
    else:
        for i in range(len(x)):
            y[i] = sigmoid(x[i])


@kernel
def short_conv(x, weight, past, y):
    """y = sum_j w_j x_{t-W+1+j}; weight (W, D) by taps, past (W - 1, D) flat, which moves on by x."""
    size = len(x)
    taps = len(weight) // size
    last_tap = weight[(taps - 1) * size :]
    for i in range(size):
        y[i] = last_tap[i] * x[i]
    for tap in range(taps - 1):
        w, before = weight[tap * size : (tap + 1) * size], past[tap * size : (tap + 1) * size]
        for i in range(size):
            y[i] += w[i] * before[i]
    for tap in range(taps - 2):
        older, newer = past[tap * size : (tap + 1) * size], past[(tap + 1) * size : (tap + 2) * size]
        for i in range(size):
            older[i] = newer[i]
    latest = past[(taps - 2) * size :]
    for i in range(size):
        latest[i] = x[i]


@kernel
def rope_table(position, frequencies, table):
    """cos and then sin of position * frequency, the angles in float64."""
    half = len(frequencies)
    for i in range(half):
        angle = position * frequencies[i]
        table[i], table[half + i] = math.cos(angle), math.sin(angle)


@kernel
def rotate(x, table, heads, size, sign):
    """Each head of x (heads, size) turned in place: pairs (i, i + size / 2) by the table's angles times the sign."""
    half = size // 2
    for h in range(heads):
        for i in range(half):
            cos, sin = table[i], sign * table[half + i]
            a, b = x[h * size + i], x[h * size + half + i]
            x[h * size + i], x[h * size + half + i] = a * cos - b * sin, b * cos + a * sin


@kernel
def mean_update(y, mean, passed):
    """The running mean of y over the tokens, `passed` (1,) float64 of them so far."""
    passed[0] += 1.0
    share = np.float32(1.0 / passed[0])
    for i in range(len(y)):
        mean[i] = (_ONE - share) * mean[i] + share * y[i]


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
