"""The gated delta rule on a CPU: S stays in the first-level cache while time passes, compiled by Numba.

q, k (B, T, H, K); v, o (B, T, H, V); a (B, T, H, 1 or K), the decay itself; e, b (B, T, H); s (B, H, K, V). `first` and
`last` count heads of rows of the batch. See glissando/ops/delta.py for the equations.

Loops over the values are short and write to one array each: where several could overlap, they are not vectorised.
"""

from __future__ import annotations

import numpy as np

from glissando.ops.compiled import kernel


@kernel
def forward(q, k, v, a, e, b, s, o, kept, every, first, last):
    """s holds S_0 and leaves as S_T; kept (B, H, n, K, V) takes the state before every `every` tokens where n > 0."""
    heads, size, width = q.shape[2], q.shape[3], v.shape[3]
    by_channel, keeps = a.shape[3] > 1, kept.shape[2] > 0
    u = np.empty(width, v.dtype)
    for row in range(first, last):
        i, h = row // heads, row % heads
        state = s[i, h]
        for t in range(q.shape[1]):
            if keeps and t % every == 0:
                kept[i, h, t // every] = state
            key, query, decay, value, out = k[i, t, h], q[i, t, h], a[i, t, h], v[i, t, h], o[i, t, h]
            for j in range(width):
                u[j] = 0
            for c in range(size):
                factor, entry, line = decay[c if by_channel else 0], key[c], state[c]
                for j in range(width):
                    line[j] *= factor
                    u[j] += entry * line[j]
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
def _again(k, v, a, e, b, state, p, w, u):
    """From the state before some tokens of one head: P, w and u of each of them."""
    size, width = state.shape
    by_channel = a.shape[1] > 1
    for t in range(len(k)):
        for j in range(width):
            w[t, j] = 0
        for c in range(size):
            factor, entry, line, to = a[t, c if by_channel else 0], k[t, c], state[c], p[t, c]
            for j in range(width):
                to[j] = factor * line[j]
                w[t, j] += entry * to[j]
        for j in range(width):
            u[t, j] = b[t] * v[t, j] - e[t] * w[t, j]
        for c in range(size):
            entry, line, of = k[t, c], state[c], p[t, c]
            for j in range(width):
                line[j] = of[j] + entry * u[t, j]


@kernel
def _step_back(q, k, a, e, grad, p, u, d, du, dw, grad_q, grad_k, grad_g):
    """One token of one head: d, the gradient at S, becomes that at the S before it, and du that at u."""
    size, width = d.shape
    by_channel = len(a) > 1
    read = u.dtype.type(0)
    for j in range(width):
        read += u[j] * grad[j]
        du[j] = 0
    for c in range(size):
        line, of = d[c], p[c]
        for j in range(width):
            line[j] += q[c] * grad[j]
        for j in range(width):
            du[j] += k[c] * line[j]
        for_query, for_key = k[c] * read, u.dtype.type(0)
        for j in range(width):
            for_query += of[j] * grad[j]
            for_key += line[j] * u[j]
        grad_q[c], grad_k[c] = for_query, for_key
    for j in range(width):
        dw[j] = -e * du[j]
    grad_g[0] = 0
    for c in range(size):
        factor, line, of = a[c if by_channel else 0], d[c], p[c]
        for j in range(width):
            line[j] += k[c] * dw[j]
        for_key, for_decay = u.dtype.type(0), u.dtype.type(0)
        for j in range(width):
            for_decay += line[j] * of[j]
            for_key += of[j] * dw[j]
        for j in range(width):
            line[j] *= factor
        grad_k[c] += for_key
        if by_channel:
            grad_g[c] = for_decay
        else:
            grad_g[0] += for_decay


@kernel
def backward(q, k, v, a, e, b, grad, kept, grad_s, grad_q, grad_k, grad_v, grad_g, grad_e, grad_b, every, first, last):
    """grad_s holds the gradient of S_T and leaves as that of S_0."""
    steps, heads, size, width = q.shape[1], q.shape[2], q.shape[3], v.shape[3]
    p = np.empty((every, size, width), v.dtype)
    w, u = np.empty((every, width), v.dtype), np.empty((every, width), v.dtype)
    du, dw = np.empty(width, v.dtype), np.empty(width, v.dtype)
    for row in range(first, last):
        i, h = row // heads, row % heads
        for part in range(kept.shape[2] - 1, -1, -1):
            start, end = part * every, min(steps, (part + 1) * every)
            here = (k[i, start:end, h], v[i, start:end, h], a[i, start:end, h], e[i, start:end, h], b[i, start:end, h])
            _again(*here, kept[i, h, part].copy(), p, w, u)
            for t in range(end - 1, start - 1, -1):
                n = t - start
                _step_back(
                    q[i, t, h], k[i, t, h], a[i, t, h], e[i, t, h], grad[i, t, h], p[n], u[n], grad_s[i, h], du, dw,
                    grad_q[i, t, h], grad_k[i, t, h], grad_g[i, t, h],
                )  # fmt: skip
                for_write, for_erase = du.dtype.type(0), du.dtype.type(0)
                for j in range(width):
                    grad_v[i, t, h, j] = b[i, t, h] * du[j]
                    for_write += v[i, t, h, j] * du[j]
                    for_erase -= w[n, j] * du[j]
                grad_b[i, t, h], grad_e[i, t, h] = for_write, for_erase
