"""The gradients of attention by |lambda_q - lambda_k| on a CPU, along the same cuts as the forward (cut.py).

With p_ij = exp(e_j - |q_i - k_j| / T - lse_i), g_i what arrives at o_i, and D_i = g_i . o_i:

    ds_ij = p_ij (g_i . v_j - D_i)                                  the gradient of a logit
    dv_j = sum_i p_ij g_i,     de_j = sum_i ds_ij
    dq_i = -1/T sum_j ds_ij sign(q_i - k_j),     dk_j = 1/T sum_i ds_ij sign(q_i - k_j)
    dT = 1/T^2 sum_ij ds_ij |q_i - k_j|

All are sums over keys below and above, or queries below and above. What a query needs is found as in the forward; for a
key, queries take the keys' place with exponents -lse_i and values (g_i, D_i). Equal lambdas have sign 0. dT needs a
second sum up and down, of the distances; from dq and dk it would be a small difference of large numbers.

sum_j ds_ij is 0, but for rounding, which would be all of a small dT where no key is near and |q - k| / T is in the
hundreds. So distances count from their mean over the keys, and signs from theirs:

    sum_j ds_ij f_ij = sum_j ds_ij (f_ij - m_i),    m_i = sum_j p_ij f_ij
"""

from __future__ import annotations

import numpy as np

from glissando.kernels.compiled import kernel

from .cut import _BLOCK, _exp, gather, partition, running, scratch_for, start_of, strictly, widest_from

#: what is summed for each query: ds, p sign and ds sign, p |q - k| / T and ds |q - k| / T
_DS, _SIGN, _DS_SIGN, _GAP, _DS_GAP, _SUMS = range(6)


@kernel
def _queries(work, n_keys, n_queries, v, g, delta, lse, sums, with_lag, is_up):
    """What the keys below give to the sums of each query; or, not `is_up`, those above, with the other sign."""
    s, lag, size = work.s, work.lag, work.s.shape[0]
    factors, top, ends = work.up, work.top_up, work.strict
    if not is_up:
        factors, top, ends = work.down, work.top_down, work.below
    sign, begin = (1, 0) if is_up else (-1, n_keys - 1)
    s[:] = 0
    lag[:] = 0
    zero = s.dtype.type(0)
    one, one_lag, seen = zero, zero, 0
    for number in range(n_queries):
        i = number if is_up else n_queries - 1 - number
        item, n = work.queries[i], ends[i] if is_up else n_keys - ends[i]
        while seen < n:
            r = begin + sign * seen
            row, a, w = work.keys[r], factors[0, r], factors[1, r]
            if with_lag and seen > 0:
                step = s.dtype.type(sign * (work.x[r] - work.x[r - sign]))
                one_lag = a * (one_lag + step * one)
                for d in range(size):
                    lag[d] = a * (lag[d] + step * s[d])
            one = a * one + w
            for d in range(size):
                s[d] = a * s[d] + w * v[row, d]
            seen += 1
        if n == 0:
            continue
        nearest = begin + sign * (n - 1)
        c, dot, dot_lag = _exp(s.dtype.type(top[nearest] - sign * work.y[i] - lse[item])), zero, zero
        for d in range(size):
            dot += g[item, d] * s[d]
        ds = np.float64(c * (dot - delta[item] * one))
        sums[item, _DS] += ds
        sums[item, _SIGN] += sign * (c * one)
        sums[item, _DS_SIGN] += sign * ds
        if with_lag:
            gap = sign * (work.y[i] - work.x[nearest])
            for d in range(size):
                dot_lag += g[item, d] * lag[d]
            sums[item, _GAP] += gap * (c * one) + c * one_lag
            sums[item, _DS_GAP] += gap * ds + c * (dot_lag - delta[item] * one_lag)


@kernel
def _sum_equal(exponents, items, first, last, factors, vectors, s):
    """s = sum w vectors, w = exp(exponent - top), over items first..last; returns top and sum w factors."""
    top, total = -np.inf, s.dtype.type(0)
    s[:] = 0
    for i in range(first, last):
        top = max(top, exponents[i])
    for i in range(first, last):
        row, w = items[i], _exp(s.dtype.type(exponents[i] - top))
        total += w * factors[row]
        for d in range(s.shape[0]):
            s[d] += w * vectors[row, d]
    return top, total


@kernel
def _queries_equal(work, n_queries, v, g, delta, lse, sums):
    """What the keys give that are equal to a query: neither sign nor distance, but they are part of sum_j ds_ij."""
    s, size = work.s, work.s.shape[0]
    zero = s.dtype.type(0)
    one, top, summed = zero, 0.0, -1
    for i in range(n_queries):
        first, last, item = work.strict[i], work.below[i], work.queries[i]
        if first == last:
            continue
        if summed != first:
            top, one = _sum_equal(work.e, work.keys, first, last, work.ones, v, s)
            summed = first
        c, dot = _exp(s.dtype.type(top - lse[item])), zero
        for d in range(size):
            dot += g[item, d] * s[d]
        sums[item, _DS] += c * (dot - delta[item] * one)


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
def _keys(work, n_keys, n_queries, v, g, delta, dv, de, dk, is_up):
    """What the queries below give to the keys, or, not `is_up`, those above: dv, de, and dk times T."""
    s, size = work.s, work.s.shape[0]
    factors, top, ends = work.up, work.top_up, work.before
    if not is_up:
        factors, top, ends = work.down, work.top_down, work.loose
    sign, begin = (1, 0) if is_up else (-1, n_queries - 1)
    s[:] = 0
    zero = s.dtype.type(0)
    along, seen = zero, 0
    for number in range(n_keys):
        r = number if is_up else n_keys - 1 - number
        key, n = work.keys[r], ends[r] if is_up else n_queries - ends[r]
        while seen < n:
            i = begin + sign * seen
            row, a, w = work.queries[i], factors[0, i], factors[1, i]
            along = a * along + w * delta[row]
            for d in range(size):
                s[d] = a * s[d] + w * g[row, d]
            seen += 1
        if n == 0:
            continue
        c, dot = _exp(s.dtype.type(top[begin + sign * (n - 1)] - sign * work.x[r] + work.e[r])), zero
        for d in range(size):
            dot += s[d] * v[key, d]
            dv[key, d] += c * s[d]
        ds = c * (dot - along)
        de[key] += ds
        dk[key] -= sign * ds


@kernel
def _keys_equal(work, n_keys, v, g, delta, dv, de):
    """What the queries give that are equal to a key: summed once for all the keys that share them."""
    s, size = work.s, work.s.shape[0]
    zero = s.dtype.type(0)
    along, top, summed = zero, 0.0, -1
    for r in range(n_keys):
        first, last, key = work.before[r], work.loose[r], work.keys[r]
        if first == last:
            continue
        if summed != first:
            top, along = _sum_equal(work.f, work.queries, first, last, delta, g, s)
            summed = first
        c, dot = _exp(s.dtype.type(top + work.e[r])), zero
        for d in range(size):
            dot += s[d] * v[key, d]
            dv[key, d] += c * s[d]
        de[key] += c * (dot - along)


@kernel
def _cut(q, k, e, v, g, delta, lse, inverse, sums, dk, de, dv, work, n_keys, n_queries, with_lag):
    """What passes between the right queries and the left keys."""
    gather(work, q, k, e, inverse, n_keys, n_queries)
    strictly(work.x, work.y, n_queries, work.below, work.strict)
    running(work.x, work.e, n_keys, True, work.top_up, work.up)
    running(work.x, work.e, n_keys, False, work.top_down, work.down)
    _queries(work, n_keys, n_queries, v, g, delta, lse, sums, with_lag, True)
    _queries(work, n_keys, n_queries, v, g, delta, lse, sums, with_lag, False)
    _queries_equal(work, n_queries, v, g, delta, lse, sums)
    for i in range(n_queries):
        work.f[i] = -lse[work.queries[i]]
    _loosely(work.x, work.y, n_keys, n_queries, work.before, work.loose)
    running(work.y, work.f, n_queries, True, work.top_up, work.up)
    running(work.y, work.f, n_queries, False, work.top_down, work.down)
    _keys(work, n_keys, n_queries, v, g, delta, dv, de, dk, True)
    _keys(work, n_keys, n_queries, v, g, delta, dv, de, dk, False)
    _keys_equal(work, n_keys, v, g, delta, dv, de)


@kernel
def _direct(q, k, e, v, g, delta, lse, past, inverse, first, last, sums, dk, de, dv, work):
    """The keys of the own block up to each query itself; what they have beyond it is in sums already."""
    size, start, p = g.shape[1], past + first, work.up[0]
    logits, own_k, own_e, ds = work.top_up, work.x, work.e, work.y
    for j in range(_BLOCK):
        at = min(start + j, k.shape[0] - 1)
        own_k[j], own_e[j] = k[at], e[at]
    for i in range(first, last):
        seen, query = i - first, np.float64(q[i])
        for j in range(_BLOCK):
            logits[j] = own_e[j] - abs(query - own_k[j]) * inverse - lse[i] if j <= seen else -np.inf
        for j in range(_BLOCK):
            p[j] = _exp(v.dtype.type(min(logits[j], 0.0)))
        for j in range(seen + 1):
            at, w, dot = start + j, p[j], v.dtype.type(0)
            for d in range(size):
                dot += g[i, d] * v[at, d]
                dv[at, d] += w * g[i, d]
            ds[j] = w * (dot - delta[i])
            sums[i, _DS] += ds[j]
        # Where one key takes nearly all the weight, all of its ds is rounding of D_i, and dk has it over T.
        rounding = sums[i, _DS]
        for j in range(seen + 1):
            at, gap = start + j, query - own_k[j]
            sign = 1.0 if gap > 0 else (-1.0 if gap < 0 else 0.0)
            gap = abs(gap) * inverse
            kept = ds[j] - p[j] * rounding
            de[at] += kept
            dk[at] += kept * sign
            sums[i, _SIGN] += p[j] * sign
            sums[i, _DS_SIGN] += ds[j] * sign
            sums[i, _GAP] += p[j] * gap
            sums[i, _DS_GAP] += ds[j] * gap


@kernel
def _head(q, k, e, v, g, delta, lse, past, inverse, order, sums, dk, de, dv, work, ids, with_lag):
    """dk becomes T dk: the caller divides."""
    length, n_keys = q.shape[0], k.shape[0]
    end = start_of(ids, order, n_keys, past, length)
    if past > 0:
        keys, queries = partition(ids, 0, end, past, n_keys, past, work)
        _cut(q, k, e, v, g, delta, lse, inverse, sums, dk, de, dv, work, keys, queries, with_lag)
    for first in range(0, length, _BLOCK):
        width = widest_from(first, length)
        while width > _BLOCK:
            half = width // 2
            if first + half < length:
                at, until = past + 2 * first, past + 2 * min(first + width, length)
                keys, queries = partition(ids, at, until, past + first + half, n_keys, past, work)
                _cut(q, k, e, v, g, delta, lse, inverse, sums, dk, de, dv, work, keys, queries, with_lag)
            width = half
        last = min(first + _BLOCK, length)
        _direct(q, k, e, v, g, delta, lse, past, inverse, first, last, sums, dk, de, dv, work)


@kernel
def _gathered(sums, inverse, dq):
    """dq of a head from its queries' sums; returns sum ds |q - k| / T."""
    far = 0.0
    for i in range(len(dq)):
        rounding = sums[i, _DS]
        dq[i] = -inverse * (sums[i, _DS_SIGN] - sums[i, _SIGN] * rounding)
        far += sums[i, _DS_GAP] - sums[i, _GAP] * rounding
    return far


@kernel
def backward(q, k, e, v, g, delta, lse, past, inverse, order, dq, dk, de, dv, far, with_lag, first, last):
    """Rows first..last; dk, de, dv come in as zeros, dq, dk and de in float64; far (R,) becomes sum ds |q - k| / T if
    with_lag."""
    length, n_keys = q.shape[1], k.shape[1]
    work = scratch_for(v, max(n_keys, length) + _BLOCK, v.shape[2])
    ids, sums = np.empty(n_keys + length, np.int32), np.empty((length, _SUMS), np.float64)
    for row in range(first, last):
        scale = inverse[row]
        sums[:] = 0
        _head(
            q[row], k[row], e[row], v[row], g[row], delta[row], lse[row], past[row], scale, order[row], sums, dk[row],
            de[row], dv[row], work, ids, with_lag,
        )  # fmt: skip
        far[row] = _gathered(sums, scale, dq[row])
        for j in range(n_keys):
            dk[row, j] *= scale
