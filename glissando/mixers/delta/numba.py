"""The gated delta rule on a CPU: S stays in the first-level cache while time passes, compiled by Numba.

q, k (B, T, H, K); v, o, w (B, T, H, V); a (B, T, H, 1), the decay itself; e, b (B, T, H); s (B, H, K, V). `first`
and `last` count heads of rows of the batch. See glissando/mixers/delta/scan.py for the equations.

Inner loops are short and write to one or two arrays each: where more could overlap, they are not vectorised.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp, expm1, sigmoid, softplus
from glissando.kernels.products import add_weighted_rows

#: rows of the backward's matrices are padded to a multiple of it: sums over them take four or eight at a time
_ROWS = 8
_ONE, _TWO = np.float32(1), np.float32(2)


@kernel
def _copy(source, target):
    """Entry by entry: what Numba compiles for `target[:] = source` takes longer than the rest of the kernel."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel
def forward(q, k, v, a, e, b, s, o, kept, w, every, first, last):
    """s holds S_0 and leaves as S_T; where n > 0, kept (B, H, n, K, V) takes the state before every `every` tokens, and
    w what each token finds under its key."""
    heads, size, width = q.shape[2], q.shape[3], v.shape[3]
    keeps = kept.shape[2] > 0
    u = np.empty(width, v.dtype)
    for row in range(first, last):
        i, h = row // heads, row % heads
        state = s[i, h]
        for t in range(q.shape[1]):
            if keeps and t % every == 0:
                for c in range(size):
                    _copy(state[c], kept[i, h, t // every, c])
            key, query, factor, value, out = k[i, t, h], q[i, t, h], a[i, t, h, 0], v[i, t, h], o[i, t, h]
            for j in range(width):
                u[j] = 0
            for c in range(size):
                entry, line = key[c], state[c]
                for j in range(width):
                    line[j] *= factor
                    u[j] += entry * line[j]
            if keeps:
                _copy(u, w[i, t, h])
            erase, write = e[i, t, h], b[i, t, h]
            for j in range(width):
                u[j] = write * value[j] - erase * u[j]
                out[j] = 0
            for c in range(size):
                entry, read, line = key[c], query[c], state[c]
                for j in range(width):
                    line[j] += entry * u[j]
                    out[j] += read * line[j]


@kernel
def _states(k, v, a, e, b, w, state, p, u, i, h, start, end):
    """P, transposed (V, K), and u of each token of head h from `start` to `end`, from the state before them."""
    size, width = k.shape[3], v.shape[3]
    for t in range(start, end):
        n, erase, write, decay = t - start, e[i, t, h], b[i, t, h], a[i, t, h, 0]
        for j in range(width):
            u[n, j] = write * v[i, t, h, j] - erase * w[i, t, h, j]
        if n == 0:
            for j in range(width):
                for c in range(size):
                    p[0, j, c] = decay * state[c, j]
        else:
            key = k[i, t - 1, h]
            for j in range(width):
                to, of, entry = p[n, j], p[n - 1, j], u[n - 1, j]
                for c in range(size):
                    to[c] = decay * (of[c] + entry * key[c])


@kernel
def _add_product(to, x, m):
    """to += the sum over rows r of x[r] m[r]; the number of rows of m, here and below, is a multiple of _ROWS."""
    for r in range(0, len(x), 8):
        x0, x1, x2, x3, x4, x5, x6, x7 = x[r], x[r + 1], x[r + 2], x[r + 3], x[r + 4], x[r + 5], x[r + 6], x[r + 7]
        for c in range(len(to)):
            low = x0 * m[r, c] + x1 * m[r + 1, c] + x2 * m[r + 2, c] + x3 * m[r + 3, c]
            high = x4 * m[r + 4, c] + x5 * m[r + 5, c] + x6 * m[r + 6, c] + x7 * m[r + 7, c]
            to[c] += low + high


@kernel
def _add_products(to_x, to_y, x, y, m):
    """The same of x and of y, with m read once."""
    for r in range(0, len(x), 4):
        x0, x1, x2, x3, y0, y1, y2, y3 = x[r], x[r + 1], x[r + 2], x[r + 3], y[r], y[r + 1], y[r + 2], y[r + 3]
        for c in range(len(to_x)):
            m0, m1, m2, m3 = m[r, c], m[r + 1, c], m[r + 2, c], m[r + 3, c]
            to_x[c] += x0 * m0 + x1 * m1 + x2 * m2 + x3 * m3
            to_y[c] += y0 * m0 + y1 * m1 + y2 * m2 + y3 * m3


@kernel
def backward(  # noqa: C901 - one token's whole step back: calls within it would cost a third of its time
    q, k, v, a, e, b, do, kept, w, grad_s, grad_q, grad_k, grad_v, grad_g, grad_e, grad_b, every, first, last
):
    """grad_s holds the gradient of S_T and leaves as that of S_0.

    States and their gradients lie transposed, (V, K): so du alone needs sums within rows. The last change of D at a
    token, D <- a (D + k dw^T), is made when the token before it reads D: later_a and later_k are that a and k.
    """
    steps, heads, size, width = q.shape[1], q.shape[2], q.shape[3], v.shape[3]
    kind, padded = v.dtype, -(-width // _ROWS) * _ROWS  # rows from `width` on stay 0
    p, u, d = np.zeros((every, padded, size), kind), np.zeros((every, padded), kind), np.zeros((padded, size), kind)
    grad, du, dw = np.zeros(padded, kind), np.zeros(padded, kind), np.zeros(padded, kind)
    dq, dk, by_p, later_k = np.empty(size, kind), np.empty(size, kind), np.empty(size, kind), np.empty(size, kind)
    for row in range(first, last):
        i, h = row // heads, row % heads
        for c in range(size):
            for j in range(width):
                d[j, c] = grad_s[i, h, c, j]
        later_a, later_k[:], dw[:] = kind.type(1), 0, 0
        for part in range(kept.shape[2] - 1, -1, -1):
            start, end = part * every, min(steps, (part + 1) * every)
            _states(k, v, a, e, b, w, kept[i, h, part], p, u, i, h, start, end)
            for t in range(end - 1, start - 1, -1):
                query, key, before, change = q[i, t, h], k[i, t, h], p[t - start], u[t - start]
                # D <- D + q do^T, with what the token after this one has left to do; du = D^T k and dw = -e du
                read = kind.type(0)
                for j in range(width):
                    grad[j] = do[i, t, h, j]
                    read += change[j] * grad[j]
                for j in range(width):
                    line, of_later, of_grad, total = d[j], dw[j], grad[j], kind.type(0)
                    for c in range(size):
                        line[c] = later_a * (line[c] + of_later * later_k[c]) + of_grad * query[c]
                        total += line[c] * key[c]
                    du[j] = total
                for_write, for_erase, erase, write = kind.type(0), kind.type(0), e[i, t, h], b[i, t, h]
                for j in range(width):
                    dw[j] = -erase * du[j]
                    for_write += v[i, t, h, j] * du[j]
                    for_erase -= w[i, t, h, j] * du[j]
                for j in range(width):
                    grad_v[i, t, h, j] = write * du[j]
                grad_b[i, t, h], grad_e[i, t, h] = for_write, for_erase
                # dq = P do + (u . do) k and dk = D u + P dw
                for c in range(size):
                    dq[c] = key[c] * read
                dk[:], by_p[:] = 0, 0
                _add_products(dq, by_p, grad, dw, before)
                _add_product(dk, change, d)
                for c in range(size):
                    grad_q[i, t, h, c] = dq[c]
                for c in range(size):
                    grad_k[i, t, h, c] = dk[c] + by_p[c]
                # dg = sum((D + k dw^T) * P)
                total, x, y = kind.type(0), d.reshape(padded * size), before.reshape(padded * size)
                for c in range(padded * size):
                    total += x[c] * y[c]
                for j in range(width):
                    total += w[i, t, h, j] * dw[j]
                grad_g[i, t, h, 0], later_a = total, a[i, t, h, 0]
                for c in range(size):
                    later_k[c] = key[c]
        for c in range(size):
            for j in range(width):
                grad_s[i, h, c, j] = later_a * (d[j, c] + dw[j] * later_k[c])


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
