"""Attention by |lambda_q - lambda_k| on a CPU, forward: compiled by Numba, one head after the other.

At each cut of cut.py one walk up the sorted keys and one down give every query of the right half its two sums over
the left half, in a vector that stays in the first-level cache; they are added to the query's sums so far in the
log-sum-exp manner. Blocks of `_BLOCK` positions are done directly.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import kernel

from .cut import _BLOCK, _exp, gather, partition, running, scratch_for, start_of, strictly, widest_from

#: keys that `single` takes at once
_STRETCH = 256


@kernel
def _merge(work, n_keys, n_queries, m, total):
    """Take both sums into each query's maximum m and total; work.beta, c_up and c_down do the same to its values."""
    for i in range(n_queries):
        n, item = work.strict[i], work.queries[i]
        up = work.top_up[n - 1] - work.y[i] if n > 0 else -np.inf
        down = work.top_down[n] + work.y[i] if n < n_keys else -np.inf
        highest = max(m[item], up, down)
        work.beta[i] = m[item] - highest
        work.c_up[i] = up - highest
        work.c_down[i] = down - highest
        m[item] = highest
    for i in range(n_queries):
        work.beta[i] = _exp(work.beta[i])
        work.c_up[i] = _exp(work.c_up[i])
        work.c_down[i] = _exp(work.c_down[i])
    for i in range(n_queries):
        n, item = work.strict[i], work.queries[i]
        fresh = total[item] * work.beta[i]
        if n > 0:
            fresh += work.c_up[i] * work.sum_up[n - 1]
        if n < n_keys:
            fresh += work.c_down[i] * work.sum_down[n]
        total[item] = fresh


@kernel
def _totals(work, count):
    """The running sums of 1 in place of v."""
    s = work.sum_up.dtype.type(0)
    for r in range(count):
        s = work.up[0, r] * s + work.up[1, r]
        work.sum_up[r] = s
    s = work.sum_up.dtype.type(0)
    for r in range(count - 1, -1, -1):
        s = work.down[0, r] * s + work.down[1, r]
        work.sum_down[r] = s


@kernel
def _walk_up(work, n_queries, v, o):
    """o_i <- beta_i o_i + c_i times the sum over the keys below."""
    s, size, r = work.s, work.s.shape[0], 0
    s[:] = 0
    for i in range(n_queries):
        while r < work.strict[i]:
            row, a, w = v[work.keys[r]], work.up[0, r], work.up[1, r]
            for d in range(size):
                s[d] = a * s[d] + w * row[d]
            r += 1
        out, b, c = o[work.queries[i]], work.beta[i], work.c_up[i]
        for d in range(size):
            out[d] = b * out[d] + c * s[d]


@kernel
def _walk_down(work, n_keys, n_queries, v, o):
    """o_i <- o_i + c_i times the sum over the keys at and above."""
    s, size, r = work.s, work.s.shape[0], n_keys - 1
    s[:] = 0
    for i in range(n_queries - 1, -1, -1):
        while r >= work.strict[i]:
            row, a, w = v[work.keys[r]], work.down[0, r], work.down[1, r]
            for d in range(size):
                s[d] = a * s[d] + w * row[d]
            r -= 1
        out, c = o[work.queries[i]], work.c_down[i]
        for d in range(size):
            out[d] += c * s[d]


@kernel
def _cut(q, k, e, v, inverse, m, total, o, work, n_keys, n_queries):
    """The right queries attend to the left keys."""
    gather(work, q, k, e, inverse, n_keys, n_queries)
    strictly(work.x, work.y, n_queries, work.below, work.strict)
    running(work.x, work.e, n_keys, True, work.top_up, work.up)
    running(work.x, work.e, n_keys, False, work.top_down, work.down)
    _totals(work, n_keys)
    _merge(work, n_keys, n_queries, m, total)
    _walk_up(work, n_queries, v, o)
    _walk_down(work, n_keys, n_queries, v, o)


@kernel
def _direct(q, k, e, v, past, inverse, first, last, m, total, o, work):
    """The keys of the own block up to each query itself, and the normalisation; m becomes the log of the sum."""
    size, start, p = o.shape[1], past + first, work.up[0]
    logits, own_k, own_e = work.top_up, work.x, work.e
    for j in range(_BLOCK):  # whole blocks, so that the compiler knows how long the loops are
        at = min(start + j, k.shape[0] - 1)
        own_k[j], own_e[j] = k[at], e[at]
    for i in range(first, last):
        seen, query, highest = i - first, np.float64(q[i]), m[i]
        for j in range(_BLOCK):
            logits[j] = own_e[j] - abs(query - own_k[j]) * inverse if j <= seen else -np.inf
        for j in range(_BLOCK):
            highest = max(highest, logits[j])
        share, kept = o.dtype.type(0), _exp(o.dtype.type(m[i] - highest))
        for j in range(_BLOCK):
            p[j] = _exp(o.dtype.type(logits[j] - highest))
        for j in range(_BLOCK):
            share += p[j]
        share += total[i] * kept
        scale = o.dtype.type(1) / share
        kept *= scale
        for d in range(size):
            o[i, d] *= kept
        for j in range(0, seen - 2, 4):
            a, b, c, f = p[j] * scale, p[j + 1] * scale, p[j + 2] * scale, p[j + 3] * scale
            at = start + j
            for d in range(size):
                o[i, d] += a * v[at, d] + b * v[at + 1, d] + c * v[at + 2, d] + f * v[at + 3, d]
        for j in range(seen + 1 - (seen + 1) % 4, seen + 1):
            w = p[j] * scale
            for d in range(size):
                o[i, d] += w * v[start + j, d]
        m[i] = highest + math.log(share)


@kernel
def _head(q, k, e, v, past, inverse, order, o, lse, work, ids, total):
    length, n_keys = q.shape[0], k.shape[0]
    o[:] = 0
    total[:] = 0
    lse[:] = -np.inf
    end = start_of(ids, order, n_keys, past, length)
    if past > 0:
        keys, queries = partition(ids, 0, end, past, n_keys, past, work)
        _cut(q, k, e, v, inverse, lse, total, o, work, keys, queries)
    # Each part of time before its halves: the lower cuts find in the cache what the upper ones have just moved.
    for first in range(0, length, _BLOCK):
        width = widest_from(first, length)
        while width > _BLOCK:
            half = width // 2
            if first + half < length:
                at, until = past + 2 * first, past + 2 * min(first + width, length)
                keys, queries = partition(ids, at, until, past + first + half, n_keys, past, work)
                _cut(q, k, e, v, inverse, lse, total, o, work, keys, queries)
            width = half
        _direct(q, k, e, v, past, inverse, first, min(first + _BLOCK, length), lse, total, o, work)


@kernel
def forward(q, k, e, v, past, inverse, order, o, lse, first, last):
    """Rows first..last of q (R, T), k and e (R, L), v (R, L, K), order (R, L + T), o (R, T, K), lse (R, T)."""
    length, n_keys = q.shape[1], k.shape[1]
    work = scratch_for(v, max(n_keys, length) + _BLOCK, v.shape[2])
    ids, total = np.empty(n_keys + length, np.int32), np.empty(length, v.dtype)
    for row in range(first, last):
        _head(q[row], k[row], e[row], v[row], past[row], inverse[row], order[row], o[row], lse[row], work, ids, total)


@kernel
def single(q, k, e, v, past, inverse, o, first, last):
    """One query a row, that of the latest key: q (R, 1), otherwise as `forward`. Keys are read in their order."""
    p, logits = np.empty(_STRETCH, v.dtype), np.empty(_STRETCH, np.float64)
    for row in range(first, last):
        count, out, query, scale = past[row] + 1, o[row, 0], np.float64(q[row, 0]), inverse[row]
        out[:] = 0
        highest, total = -np.inf, v.dtype.type(0)
        for start in range(0, count, _STRETCH):
            length = min(_STRETCH, count - start)
            top = highest
            for j in range(length):
                logits[j] = e[row, start + j] - abs(query - k[row, start + j]) * scale
            for j in range(length):
                top = max(top, logits[j])
            for j in range(length):
                p[j] = _exp(v.dtype.type(logits[j] - top))
            kept = _exp(v.dtype.type(highest - top))
            total *= kept
            for j in range(length):
                total += p[j]
            for d in range(out.shape[0]):
                out[d] *= kept
            _add(p, v[row], start, length, out)
            highest = top
        share = v.dtype.type(1) / total
        for d in range(out.shape[0]):
            out[d] *= share


@kernel
def _add(p, v, start, length, out):
    """out <- out + sum_j p_j v_{start + j}, four rows at once: out is read and written less often."""
    whole = length - length % 4
    for j in range(0, whole, 4):
        a, b, c, f, at = p[j], p[j + 1], p[j + 2], p[j + 3], start + j
        for d in range(out.shape[0]):
            out[d] += a * v[at, d] + b * v[at + 1, d] + c * v[at + 2, d] + f * v[at + 3, d]
    for j in range(whole, length):
        for d in range(out.shape[0]):
            out[d] += p[j] * v[start + j, d]
