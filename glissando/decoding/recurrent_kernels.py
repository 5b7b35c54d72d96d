"""One decoded token of the mixers whose state has a constant size, see the mixers' own docstrings for the equations."""

from __future__ import annotations

import math

import numpy as np

from glissando.decoding.kernels import exp, expm1, sigmoid, softplus
from glissando.ops.compiled import kernel

_ONE, _TWO, _TINY = np.float32(1), np.float32(2), np.float32(np.finfo(np.float32).tiny)


@kernel
def spectral(v, rate, has_rate, vectors, h, y):
    """`spectral` with projections: h (2 N) pairs, moved on, and copied to y.

    vectors (4, N) flat: gamma (8 gamma where the decay depends on the input), the decay's bias, cos w, sin w
    """
    n = len(v)
    gamma, bias, cos, sin = vectors[:n], vectors[n : 2 * n], vectors[2 * n : 3 * n], vectors[3 * n :]
    for i in range(n):
        g = gamma[i] * sigmoid(rate[i] + bias[i]) if has_rate else gamma[i]
        kept = -expm1(-_TWO * g)
        kept = kept if kept > _TINY else _TINY
        u, a = v[i] * math.sqrt(kept), exp(-g)
        real, imag = a * h[2 * i], a * h[2 * i + 1]
        p = real * cos[i] - imag * sin[i] + u
        q = real * sin[i] + imag * cos[i]
        h[2 * i], h[2 * i + 1], y[2 * i], y[2 * i + 1] = p, q, p, q


@kernel
def spectral_pairs(x, vectors, h, y):
    """`spectral` without projections: h <- lambda h + x for pairs; vectors (2, N) flat: Re lambda, Im lambda."""
    n = len(x) // 2
    real, imag = vectors[:n], vectors[n:]
    for i in range(n):
        p = real[i] * h[2 * i] - imag[i] * h[2 * i + 1] + x[2 * i]
        q = imag[i] * h[2 * i] + real[i] * h[2 * i + 1] + x[2 * i + 1]
        h[2 * i], h[2 * i + 1], y[2 * i], y[2 * i + 1] = p, q, p, q


@kernel
def liquid(b, z, vectors, coupled, x, y):
    """`liquid` with diagonal dynamics: x (2 N) pairs, moved on over dt = 1, and copied to y.

    vectors (10, N) flat: decay, turn, step, tau0, a, p, q, sin(k w), 1 - cos(k w), the bias of z
    """
    n = len(z)
    decay, turn, step = vectors[:n], vectors[n : 2 * n], vectors[2 * n : 3 * n]
    tau, adapt = vectors[3 * n : 4 * n], vectors[4 * n : 5 * n]
    p, q = vectors[5 * n : 6 * n], vectors[6 * n : 7 * n]
    sines, versines, bias = vectors[7 * n : 8 * n], vectors[8 * n : 9 * n], vectors[9 * n :]
    for i in range(n):
        u, v = x[2 * i], x[2 * i + 1]
        s = z[i] + bias[i] + p[i] * u + q[i] * v
        e = expm1(-_TWO * abs(s))
        phi = -e / (_TWO + e)
        phi = -phi if s < 0 else phi
        rate = _ONE / (tau[i] * (_ONE + adapt[i] * phi))
        real, imag = -(decay[i] + rate), turn[i]
        growth = expm1(step[i] * real)
        less = growth - versines[i] - growth * versines[i]
        turned = (growth + _ONE) * sines[i]
        scale = (rate if coupled else _ONE) / (real * real + imag * imag)
        c_real, c_imag = (less * real + turned * imag) * scale, (turned * real - less * imag) * scale
        kept = less + _ONE
        new = kept * u - turned * v + c_real * b[i]
        new_imag = turned * u + kept * v + c_imag * b[i]
        x[2 * i], x[2 * i + 1], y[2 * i], y[2 * i + 1] = new, new_imag, new, new_imag


@kernel
def _normalized(x):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1 / max(math.sqrt(total), 1e-12))
    for i in range(len(x)):
        x[i] *= scale


@kernel
def _decayed(s, rate, share, keys, values, rates):
    """Each row of S (K, V) times exp(-share * its rate)."""
    for i in range(keys):
        index = 0 if rates == 1 else (i if rates == keys else i // 2)
        kept = exp(-share * rate[index])
        row = s[i * values : (i + 1) * values]
        for j in range(values):
            row[j] *= kept


@kernel
def _turned(s, angle, values):
    """Pairs of rows of S turned by half of their angles."""
    for i in range(len(angle)):
        cos, sin = np.float32(math.cos(angle[i] / 2)), np.float32(math.sin(angle[i] / 2))
        first, second = s[2 * i * values : (2 * i + 1) * values], s[(2 * i + 1) * values : (2 * i + 2) * values]
        for j in range(values):
            a, b = first[j], second[j]
            first[j], second[j] = a * cos - b * sin, a * sin + b * cos


@kernel
def _write(s, k, v, erase, store, keys, values, read):
    """S <- S + k (store v - erase S'k)'."""
    for j in range(values):
        read[j] = np.float32(0)
    for i in range(keys):
        row = s[i * values : (i + 1) * values]
        for j in range(values):
            read[j] += k[i] * row[j]
    for j in range(values):
        read[j] = store * v[j] - erase * read[j]
    for i in range(keys):
        row = s[i * values : (i + 1) * values]
        for j in range(values):
            row[j] += k[i] * read[j]


@kernel
def delta(parts, sizes, vectors, s, latest, work, y):  # noqa: C901 - one head's whole step
    """One head after the other: decay (and turn), write, read. S (H, K, V) flat, moved on.

    parts    q, k, v, write, decay and turn as the projection leaves them, one behind the other
    sizes    H, K, V, writes, rates, whether it turns, whether writes reflect, whether keys are earlier queries
    vectors  8 exp(log_rate) and the decay's bias (H, rates), the write's bias (H,), the norm (V,), omega (H, K / 2)
    latest   (H, K) the query of the token before, where keys are such; work (V + K / 2)
    """
    heads, keys, values, writes, rates = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    turns, reflects, shifts = sizes[5] != 0, sizes[6] != 0, sizes[7] != 0
    by_channel = rates > 1
    at_k = heads * keys
    at_v = at_k if shifts else at_k + writes * heads * keys
    at_write = at_v + writes * heads * values
    at_decay = at_write + writes * heads
    at_turn = at_decay + heads * rates
    bias = vectors[heads * rates :]
    write_bias, norm = vectors[2 * heads * rates :], vectors[2 * heads * rates + heads :]
    omega = norm[values:]
    read, angle = work[:values], work[values : values + keys // 2]
    rate = np.empty(rates, np.float32)
    for h in range(heads):
        state, out = s[h * keys * values : (h + 1) * keys * values], y[h * values : (h + 1) * values]
        q = parts[h * keys : (h + 1) * keys]
        _normalized(q)
        for r in range(rates):
            i = h * rates + r
            rate[r] = vectors[i] * sigmoid(parts[at_decay + i] + bias[i])
        if by_channel:
            _decayed(state, rate, np.float32(0.5), keys, values, rates)
        else:
            _decayed(state, rate, _ONE, keys, values, rates)
        if turns:
            for i in range(keys // 2):
                angle[i] = _TWO * sigmoid(parts[at_turn + h]) * omega[h * (keys // 2) + i]
            _turned(state, angle, values)
        for n in range(writes):
            z = parts[at_write + n * heads + h] + write_bias[h]
            v = parts[at_v + (n * heads + h) * values : at_v + (n * heads + h + 1) * values]
            for j in range(values):
                v[j] *= sigmoid(v[j])
            if reflects:
                erase = store = _TWO * sigmoid(z)
            else:
                strength = softplus(z)
                erase = store = -expm1(-strength)
                if writes == 1 and not by_channel:
                    total = strength + rate[0]
                    # The mean of exp(-s) from 0 to the total, by its series near 0.
                    if total < np.float32(0.01):
                        mean = _ONE - total / _TWO * (_ONE - total / np.float32(3) * (_ONE - total / np.float32(4)))
                    else:
                        mean = -expm1(-total) / total
                    store = strength * mean
            if shifts:
                _write(state, latest[h * keys : (h + 1) * keys], v, erase, store, keys, values, read)
            else:
                k = parts[at_k + (n * heads + h) * keys : at_k + (n * heads + h + 1) * keys]
                for i in range(keys):
                    k[i] *= sigmoid(k[i])
                _normalized(k)
                _write(state, k, v, erase, store, keys, values, read)
        if turns:
            _turned(state, angle, values)
        if by_channel:
            _decayed(state, rate, np.float32(0.5), keys, values, rates)
        for j in range(values):
            out[j] = np.float32(0)
        for i in range(keys):
            row = state[i * values : (i + 1) * values]
            for j in range(values):
                out[j] += q[i] * row[j]
        total = np.float32(0)
        for j in range(values):
            total += out[j] * out[j]
        scale = np.float32(1 / math.sqrt(total / values + 1e-6))
        for j in range(values):
            out[j] *= scale * norm[j]
        if shifts:
            before = latest[h * keys : (h + 1) * keys]
            for i in range(keys):
                before[i] = q[i]


@kernel
def mean_update(y, mean, passed):
    """The running mean of y over the tokens, `passed` (1,) float64 of them so far."""
    passed[0] += 1.0
    share = np.float32(1.0 / passed[0])
    for i in range(len(y)):
        mean[i] = (_ONE - share) * mean[i] + share * y[i]
