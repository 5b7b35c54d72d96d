"""The gated delta rule on a CPU: S stays in the first-level cache while time passes, compiled by Numba.

q, k (B, T, H, K); v, o, w (B, T, H, V); a, e, b (B, T, H), a the decay itself; s (B, H, K, V): all flat, and K and V
multiples of `BLOCK`. `first` and `last` count heads of rows of the batch. See glissando/mixers/delta/scan.py for the
equations, and passes.py for what is computed of a token.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp, expm1, sigmoid, softplus
from glissando.kernels.products import LANES, add_weighted_rows

from . import passes
from .passes import BLOCK

_ONE, _TWO = np.float32(1), np.float32(2)


@kernel
def forward(q, k, v, a, e, b, s, o, kept, w, shape, every, first, last):
    """s holds S_0 and leaves as S_T. Where w is not empty, it takes what each token finds under its key, and kept
    (B, H, n, K, V) the state before every `every` tokens. shape: (T, H, K, V)."""
    steps, heads, size, width = shape
    keeps, parts, matrix = len(w) > 0, -(-steps // every), size * width
    recalled, unused = np.zeros(width, s.dtype), np.zeros(width, s.dtype)
    one, zero = s.dtype.type(1), s.dtype.type(0)
    for row in range(first, last):
        i, h = row // heads, row % heads
        state, token = row * matrix, i * steps * heads + h
        key, value = token * size, token * width
        for c in range(width):
            recalled[c] = zero
        for c in range(0, width, BLOCK):  # what the first token finds: nothing is written
            at, x = state + c, value + c
            passes.forward(
                s, at, size, width, one, zero, zero, k, key, q, key, v, x, unused, 0, o, x, k, key, recalled, c
            )
        for t in range(steps):
            token = (i * steps + t) * heads + h
            key, value, later = token * size, token * width, (token + heads if t + 1 < steps else token) * size
            if keeps and t % every == 0:
                _copy(s, state, kept, (row * parts + t // every) * matrix, matrix)
            decay, erase, write = a[token], e[token], b[token]
            to, w_at = (w, value) if keeps else (unused, 0)
            for c in range(0, width, BLOCK):
                at, x, y = state + c, value + c, w_at + c
                passes.forward(
                    s, at, size, width, decay, erase, write, k, key, q, key, v, x, to, y, o, x, k, later, recalled, c
                )


@kernel
def _aligned(count, like):
    """Zeros of the type of `like` that begin where a line of the cache does."""
    zeros = np.zeros(count + 64, like.dtype)
    begin = -(zeros.ctypes.data // like.itemsize) % (64 // like.itemsize)
    return zeros[begin : begin + count]


@kernel
def _copy(source, begin, target, at, count):
    for i in range(count):
        target[at + i] = source[begin + i]


@kernel
def _states(k, v, a, e, b, w, kept, state, p, u, shape, first, last, stride, m):
    """P, transposed (V, K), and u of tokens of a head, from the state before them; tokens are `stride` apart."""
    size, width = shape[2], shape[3]
    matrix = size * width
    for token in range(first, last, stride):
        n, value, decay = (token - first) // stride, token * width, a[token]
        passes.changes(width, e[token], b[token], v, value, w, value, m, u + n * width)
        if n == 0:
            for j in range(width):
                for c in range(size):
                    m[p + j * size + c] = decay * kept[state + c * width + j]
            continue
        before, to, change, key = p + (n - 1) * matrix, p + n * matrix, u + (n - 1) * width, (token - stride) * size
        for c in range(0, size, BLOCK):
            passes.decayed(m, before + c, to + c, width, size, decay, m, change, k, key + c)


@kernel
def backward(
    q, k, v, a, e, b, do, kept, w, grad_s, grad_q, grad_k, grad_v, grad_g, grad_e, grad_b, shape, every, first, last
):
    """grad_s holds the gradient of S_T and leaves as that of S_0.

    States and their gradients lie transposed, (V, K): so du alone needs sums within rows. The last change of D at a
    token, D <- a (D + k dw^T), is made when the token before it reads D: `later` is that a, and `behind` that k.
    In m: D, du, dw, the sums of D * P, and `every` times P and u.
    """
    steps, heads, size, width = shape
    matrix, parts = size * width, -(-steps // every)
    du, dw, dp = matrix, matrix + width, matrix + 2 * width
    read = dp + LANES
    u = read + LANES
    p = u + every * width
    m, one, zero = _aligned(p + every * matrix, v), v.dtype.type(1), v.dtype.type(0)
    for row in range(first, last):
        i, h = row // heads, row % heads
        for c in range(size):
            for j in range(width):
                m[j * size + c] = grad_s[row * matrix + c * width + j]
        m[dw : dw + width] = 0
        later, behind = one, 0
        for part in range(parts - 1, -1, -1):
            start, end = part * every, min(steps, (part + 1) * every)
            begin, until = (i * steps + start) * heads + h, (i * steps + end) * heads
            _states(k, v, a, e, b, w, kept, (row * parts + part) * matrix, p, u, shape, begin, until, heads, m)
            for t in range(end - 1, start - 1, -1):
                token = (i * steps + t) * heads + h
                key, value = token * size, token * width
                before, change = p + (t - start) * matrix, u + (t - start) * width
                for j in range(0, width, LANES):
                    for c in range(0, size, BLOCK):
                        at, x, y = j * size + c, key + c, behind + c
                        passes.backward(m, at, size, later, dw + j, k, y, do, value + j, q, x, k, x, du + j)
                passes.writes(
                    width, e[token], b[token], v, value, w, value, do, value, m, change, du, dw, read, grad_v, value,
                    grad_b, token, grad_e, token,
                )  # fmt: skip
                for c in range(0, size, BLOCK):
                    at, x = before + c, key + c
                    passes.gradients(
                        m, c, at, width, size, change, dw, do, value, m[read], k, x, grad_k, x, grad_q, x, dp
                    )
                total = e[token] * grad_e[token]
                for lane in range(LANES):
                    total += m[dp + lane]
                    m[dp + lane] = zero
                grad_g[token], later, behind = total, a[token], key
        for c in range(size):
            for j in range(width):
                grad_s[row * matrix + c * width + j] = later * (m[j * size + c] + m[dw + j] * k[behind + c])


@kernel
def _normalized(x):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1 / max(math.sqrt(total), 1e-12))
    for i in range(len(x)):
        x[i] *= scale


@kernel
def _turn(s, angle, width, sign):
    """Pairs of rows of S (K, width), flat, turned by half of their angles times the sign."""
    for i in range(len(angle)):
        cos, sin = np.float32(math.cos(angle[i] / 2)), sign * np.float32(math.sin(angle[i] / 2))
        first, second = s[2 * i * width : (2 * i + 1) * width], s[(2 * i + 1) * width : (2 * i + 2) * width]
        for j in range(width):
            a, b = first[j], second[j]
            first[j], second[j] = a * cos - b * sin, a * sin + b * cos


@kernel
def _strengths(z, rate, reflects, exact):
    """e and b of a write with the gate's argument z, in float32; exact: with one write and the decay 1 / tau = rate."""
    if reflects:
        return _TWO * sigmoid(z), _TWO * sigmoid(z)
    strength = softplus(z)
    erase = -expm1(-strength)
    if not exact:
        return erase, erase
    total = strength + rate
    # The mean of exp(-s) from 0 to the total, by its series near 0.
    if total < np.float32(0.01):
        return erase, strength * (_ONE - total / _TWO * (_ONE - total / np.float32(3) * (_ONE - total / np.float32(4))))
    return erase, strength * (-expm1(-total) / total)


@kernel
def step(parts, sizes, vectors, s, latest, work, sums, y):  # noqa: C901 - one token's whole layer between its two linear maps
    """One decoded token: `forward` at T = writes, on what is made of the projection. S (H, K, V) flat, moved on, with
    `GROUP` numbers more behind it that are read.

    parts    q, k, v, write, decay and turn as the projection leaves them, one behind the other
    sizes    H, K, V, writes, whether it turns, whether writes reflect, whether keys are earlier queries
    vectors  8 exp(log_rate) and the decay's bias (H,), the write's bias (H,), the norm (V,), omega (H, K / 2)
    latest   (H, K) the query of the token before, where keys are such; work: H (writes (3 + K + V) + K / 2)
    """
    heads, keys, values, writes = sizes[0], sizes[1], sizes[2], sizes[3]
    turns, reflects, shifts = sizes[4] != 0, sizes[5] != 0, sizes[6] != 0
    n, half = writes * heads, keys // 2
    at_k = heads * keys
    at_v = at_k if shifts else at_k + n * keys
    at_write = at_v + n * values
    at_decay = at_write + n
    at_turn = at_decay + heads
    bias, write_bias = vectors[heads:], vectors[2 * heads :]
    norm, omega = write_bias[heads:], write_bias[heads + values :]
    k, v = latest[: n * keys] if shifts else parts[at_k:at_v], parts[at_v:at_write]
    a, e, b = work[:n], work[n : 2 * n], work[2 * n :]
    queries, out = b[n:], b[n + n * keys :]
    angle, one = out[n * values :], _ONE
    for i in range(heads, n):
        a[i] = one  # a token decays once, before its first write
    for i in range(n * values):
        v[i] *= sigmoid(v[i])
    for h in range(heads):
        q, state = parts[h * keys : (h + 1) * keys], s[h * keys * values : (h + 1) * keys * values]
        _normalized(q)
        rate = vectors[h] * sigmoid(parts[at_decay + h] + bias[h])
        a[h] = exp(-rate)
        for w in range(writes):
            i = w * heads + h
            e[i], b[i] = _strengths(parts[at_write + i] + write_bias[h], rate, reflects, writes == 1)
            if not shifts:
                key = k[i * keys : (i + 1) * keys]
                for c in range(keys):
                    key[c] *= sigmoid(key[c])
                _normalized(key)
        query = queries[((writes - 1) * heads + h) * keys : ((writes - 1) * heads + h + 1) * keys]
        for c in range(keys):
            query[c] = q[c]
        if turns:
            head_angle = angle[h * half : (h + 1) * half]
            for i in range(half):
                head_angle[i] = _TWO * sigmoid(parts[at_turn + h]) * omega[h * half + i]
            _turn(state, head_angle, values, one)
            _turn(query, head_angle, 1, -one)
    key_rows, query_rows, change = k[: n * keys].reshape(n, keys), queries[: n * keys].reshape(n, keys), out[:values]
    for h in range(heads):
        at, state = h * keys * values, s[h * keys * values : (h + 1) * keys * values]
        for w in range(writes):
            i = w * heads + h
            change[:] = 0
            add_weighted_rows(key_rows, i, 0, keys, s, at, values, sums, change)
            value, erase = v[i * values : (i + 1) * values], a[i] * e[i]
            for j in range(values):
                change[j] = b[i] * value[j] - erase * change[j]
            for c in range(keys):
                entry, line = key_rows[i, c], state[c * values : (c + 1) * values]
                for j in range(values):
                    line[j] = a[i] * line[j] + entry * change[j]
        read = y[h * values : (h + 1) * values]
        read[:] = 0
        add_weighted_rows(query_rows, n - heads + h, 0, keys, s, at, values, sums, read)
    for h in range(heads):
        state = s[h * keys * values : (h + 1) * keys * values]
        if turns:
            _turn(state, angle[h * half : (h + 1) * half], values, one)
        read, total = y[h * values : (h + 1) * values], np.float32(0)
        for j in range(values):
            total += read[j] * read[j]
        scale = np.float32(1 / math.sqrt(total / values + 1e-6))
        for j in range(values):
            read[j] *= scale * norm[j]
    if shifts:
        for i in range(heads * keys):
            latest[i] = parts[i]
