"""The gradients of attention by |lambda_q - lambda_k| on a CPU, along the same cuts as the forward (tau_cut.py).

With p_ij = exp(e_j - |q_i - k_j| / T - lse_i), g_i what arrives at o_i, and D_i = g_i . o_i less what arrives at lse_i:

    ds_ij = p_ij (g_i . v_j - D_i)                                  the gradient of a logit
    dv_j = sum_i p_ij g_i,     de_j = sum_i ds_ij
    dq_i = -1/T sum_j ds_ij sign(q_i - k_j),     dk_j = 1/T sum_i ds_ij sign(q_i - k_j)
    dT = 1/T^2 sum_ij ds_ij |q_i - k_j|

All are sums over keys below and above, or queries below and above. What a query needs is found as in the forward; for a
key, queries take the keys' place with exponents -lse_i and values (g_i, D_i). Equal lambdas have sign 0. dT needs a
second sum up and down, of the distances; from dq and dk it would be a small difference of large numbers.
"""

from __future__ import annotations

import numpy as np

from glissando.ops.compiled import kernel
from glissando.ops.tau_cut import (
    _BLOCK,
    _exp,
    gather,
    partition,
    running,
    scratch_for,
    smallest_cover,
    start_of,
    strictly,
)


@kernel
def _queries_up(room, n_queries, v, g, delta, lse, dq, with_lag):
    """dq of the keys below, times -T; returns sum ds |q - k| / T over them."""
    s, lag, size = room.s, room.lag, room.s.shape[0]
    s[:] = 0
    lag[:] = 0
    zero, far = s.dtype.type(0), 0.0
    one, one_lag, r = zero, zero, 0
    for i in range(n_queries):
        n, item = room.strict[i], room.queries[i]
        while r < n:
            row, a, w = room.keys[r], room.up[0, r], room.up[1, r]
            if with_lag and r > 0:
                step = s.dtype.type(room.x[r] - room.x[r - 1])
                one_lag = a * (one_lag + step * one)
                for d in range(size):
                    lag[d] = a * (lag[d] + step * s[d])
            one = a * one + w
            for d in range(size):
                s[d] = a * s[d] + w * v[row, d]
            r += 1
        if n == 0:
            continue
        c, dot, dot_lag = _exp(s.dtype.type(room.top_up[n - 1] - room.y[i] - lse[item])), zero, zero
        for d in range(size):
            dot += g[item, d] * s[d]
        ds = c * (dot - delta[item] * one)
        dq[item] += ds
        if with_lag:
            for d in range(size):
                dot_lag += g[item, d] * lag[d]
            far += (room.y[i] - room.x[n - 1]) * ds + c * (dot_lag - delta[item] * one_lag)
    return far


@kernel
def _queries_down(room, n_keys, n_queries, v, g, delta, lse, dq, with_lag):
    """The same of the keys above, with the other sign."""
    s, lag, size = room.s, room.lag, room.s.shape[0]
    s[:] = 0
    lag[:] = 0
    zero, far = s.dtype.type(0), 0.0
    one, one_lag, r = zero, zero, n_keys - 1
    for i in range(n_queries - 1, -1, -1):
        n, item = room.below[i], room.queries[i]
        while r >= n:
            row, a, w = room.keys[r], room.down[0, r], room.down[1, r]
            if with_lag and r < n_keys - 1:
                step = s.dtype.type(room.x[r + 1] - room.x[r])
                one_lag = a * (one_lag + step * one)
                for d in range(size):
                    lag[d] = a * (lag[d] + step * s[d])
            one = a * one + w
            for d in range(size):
                s[d] = a * s[d] + w * v[row, d]
            r -= 1
        if n == n_keys:
            continue
        c, dot, dot_lag = _exp(s.dtype.type(room.top_down[n] + room.y[i] - lse[item])), zero, zero
        for d in range(size):
            dot += g[item, d] * s[d]
        ds = c * (dot - delta[item] * one)
        dq[item] -= ds
        if with_lag:
            for d in range(size):
                dot_lag += g[item, d] * lag[d]
            far += (room.x[n] - room.y[i]) * ds + c * (dot_lag - delta[item] * one_lag)
    return far


@kernel
def _loosely(x, others, n_x, n_others, before, loose):
    """loose_r: how many of the sorted others are at most x_r, before_r of them being less."""
    for r in range(n_x):
        n = before[r]
        if r > 0 and x[r] == x[r - 1]:
            n = loose[r - 1]
        else:
            while n < n_others and others[n] == x[r]:
                n += 1
        loose[r] = n


@kernel
def _keys_up(room, n_keys, v, g, delta, dv, de, dk):
    """What the queries below give to the keys: dv, de, and dk times T."""
    s, size = room.s, room.s.shape[0]
    s[:] = 0
    zero = s.dtype.type(0)
    along, i = zero, 0
    for r in range(n_keys):
        n, key = room.before[r], room.keys[r]
        while i < n:
            row, a, w = room.queries[i], room.up[0, i], room.up[1, i]
            along = a * along + w * delta[row]
            for d in range(size):
                s[d] = a * s[d] + w * g[row, d]
            i += 1
        if n == 0:
            continue
        c, dot = _exp(s.dtype.type(room.top_up[n - 1] - room.x[r] + room.e[r])), zero
        for d in range(size):
            dot += s[d] * v[key, d]
            dv[key, d] += c * s[d]
        ds = c * (dot - along)
        de[key] += ds
        dk[key] -= ds


@kernel
def _keys_down(room, n_keys, n_queries, v, g, delta, dv, de, dk):
    """What the queries above give to the keys."""
    s, size = room.s, room.s.shape[0]
    s[:] = 0
    zero = s.dtype.type(0)
    along, i = zero, n_queries - 1
    for r in range(n_keys - 1, -1, -1):
        n, key = room.loose[r], room.keys[r]
        while i >= n:
            row, a, w = room.queries[i], room.down[0, i], room.down[1, i]
            along = a * along + w * delta[row]
            for d in range(size):
                s[d] = a * s[d] + w * g[row, d]
            i -= 1
        if n == n_queries:
            continue
        c, dot = _exp(s.dtype.type(room.top_down[n] + room.x[r] + room.e[r])), zero
        for d in range(size):
            dot += s[d] * v[key, d]
            dv[key, d] += c * s[d]
        ds = c * (dot - along)
        de[key] += ds
        dk[key] += ds


@kernel
def _keys_equal(room, n_keys, v, g, delta, dv, de):
    """What the queries give that are equal to a key: summed once for all the keys that share them."""
    s, size = room.s, room.s.shape[0]
    zero = s.dtype.type(0)
    along, top, summed = zero, 0.0, -1
    for r in range(n_keys):
        first, last, key = room.before[r], room.loose[r], room.keys[r]
        if first == last:
            continue
        if summed != first:
            s[:] = 0
            along, top, summed = zero, -np.inf, first
            for i in range(first, last):
                top = max(top, room.f[i])
            for i in range(first, last):
                row, w = room.queries[i], _exp(s.dtype.type(room.f[i] - top))
                along += w * delta[row]
                for d in range(size):
                    s[d] += w * g[row, d]
        c, dot = _exp(s.dtype.type(top + room.e[r])), zero
        for d in range(size):
            dot += s[d] * v[key, d]
            dv[key, d] += c * s[d]
        de[key] += c * (dot - along)


@kernel
def _cut(q, k, e, v, g, delta, lse, inverse, dq, dk, de, dv, room, n_keys, n_queries, with_lag):
    """What passes between the right queries and the left keys; returns sum ds |q - k| / T."""
    gather(room, q, k, e, inverse, n_keys, n_queries)
    strictly(room.x, room.y, n_queries, room.below, room.strict)
    running(room.x, room.e, n_keys, True, room.top_up, room.up)
    running(room.x, room.e, n_keys, False, room.top_down, room.down)
    far = _queries_up(room, n_queries, v, g, delta, lse, dq, with_lag)
    far += _queries_down(room, n_keys, n_queries, v, g, delta, lse, dq, with_lag)
    for i in range(n_queries):
        room.f[i] = -lse[room.queries[i]]
    _loosely(room.x, room.y, n_keys, n_queries, room.before, room.loose)
    running(room.y, room.f, n_queries, True, room.top_up, room.up)
    running(room.y, room.f, n_queries, False, room.top_down, room.down)
    _keys_up(room, n_keys, v, g, delta, dv, de, dk)
    _keys_down(room, n_keys, n_queries, v, g, delta, dv, de, dk)
    _keys_equal(room, n_keys, v, g, delta, dv, de)
    return far


@kernel
def _direct(q, k, e, v, g, delta, lse, past, inverse, first, last, dq, dk, de, dv, room):
    """The keys of the own block up to each query itself."""
    size, start, p = g.shape[1], past + first, room.up[0]
    logits, own_k, own_e = room.top_up, room.x, room.e
    far = 0.0
    for j in range(_BLOCK):
        at = min(start + j, k.shape[0] - 1)
        own_k[j], own_e[j] = k[at], e[at]
    for i in range(first, last):
        seen, own = i - first, np.float64(q[i])
        for j in range(_BLOCK):
            logits[j] = own_e[j] - abs(own - own_k[j]) * inverse - lse[i] if j <= seen else -np.inf
        for j in range(_BLOCK):
            p[j] = _exp(v.dtype.type(min(logits[j], 0.0)))
        for j in range(seen + 1):
            at, w, dot = start + j, p[j], v.dtype.type(0)
            for d in range(size):
                dot += g[i, d] * v[at, d]
                dv[at, d] += w * g[i, d]
            ds = np.float64(w * (dot - delta[i]))
            gap = own - own_k[j]
            sign = ds if gap > 0 else (-ds if gap < 0 else 0.0)
            de[at] += ds
            dq[i] += sign
            dk[at] += sign
            far += ds * abs(gap)
    return far * inverse


@kernel
def _head(q, k, e, v, g, delta, lse, past, inverse, order, dq, dk, de, dv, room, ids, stack, with_lag):
    """dq becomes -T dq and dk becomes T dk: the caller divides."""
    length, n_keys = q.shape[0], k.shape[0]
    end = start_of(ids, order, n_keys, past, length)
    far = 0.0
    if past > 0:
        keys, queries = partition(ids, 0, end, past, n_keys, past, room)
        far += _cut(q, k, e, v, g, delta, lse, inverse, dq, dk, de, dv, room, keys, queries, with_lag)
    stack[0, 0], stack[0, 1] = 0, smallest_cover(length)
    depth = 1
    while depth > 0:
        depth -= 1
        first, width = stack[depth, 0], stack[depth, 1]
        last = min(first + width, length)
        if width == _BLOCK:
            far += _direct(q, k, e, v, g, delta, lse, past, inverse, first, last, dq, dk, de, dv, room)
            continue
        half = width // 2
        if first + half < last:
            at, until = past + 2 * first, past + 2 * last
            keys, queries = partition(ids, at, until, past + first + half, n_keys, past, room)
            far += _cut(q, k, e, v, g, delta, lse, inverse, dq, dk, de, dv, room, keys, queries, with_lag)
            stack[depth, 0], stack[depth, 1] = first + half, half
            depth += 1
        stack[depth, 0], stack[depth, 1] = first, half
        depth += 1
    return far


@kernel
def backward(q, k, e, v, g, delta, lse, past, inverse, order, dq, dk, de, dv, far, with_lag, first, last):
    """Rows first..last; dq, dk, de, dv come in as zeros, dq, dk and de in float64. far (R, n) is sum ds |q - k| / T."""
    length, n_keys = q.shape[2], k.shape[2]
    room = scratch_for(v, max(n_keys, length) + _BLOCK, v.shape[2])
    ids, stack = np.empty(n_keys + length, np.int32), np.empty((64, 2), np.int64)
    for row in range(first, last):
        for head in range(q.shape[1]):
            scale = inverse[row, head]
            far[row, head] = _head(
                q[row, head],
                k[row, head],
                e[row, head],
                v[row],
                g[row, head],
                delta[row, head],
                lse[row, head],
                past[row],
                scale,
                order[row, head],
                dq[row, head],
                dk[row, head],
                de[row, head],
                dv[row],
                room,
                ids,
                stack,
                with_lag,
            )
            for i in range(length):
                dq[row, head, i] *= -scale
            for j in range(n_keys):
                dk[row, head, j] *= scale
