"""The spectral operator on a CPU, each kernel one pass over memory, compiled by Numba: the rational filter and the
phase gate, element by element, and with projections the gated recurrence and one decoded token of it.

Complex numbers are interleaved pairs, (B, T, 2 N). Sums over tokens run in the working precision for `_RUN` tokens and
are then added to float64 totals. The filter's transforms and the phase gate's tanh stay with PyTorch.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp, expm1, logistic
from glissando.kernels.products import as_computed, as_stored

#: steps summed in the working precision before they are added to a float64 total
_RUN = 256

_TURN = 2 * math.pi
_TWO, _TINY = np.float32(2), np.finfo(np.float32).tiny


@kernel
def filter_forward(z, f, g, floor, out, first, last):
    """out = z f / (|z| g + floor), g real."""
    steps, size = z.shape[1], z.shape[2] // 2
    floor = z.dtype.type(floor)
    for b in range(first, last):
        for t in range(steps):
            entry, result = z[b, t], out[b, t]
            for d in range(size):
                x, y = entry[2 * d], entry[2 * d + 1]
                p, q = f[2 * d], f[2 * d + 1]
                w = 1 / (np.sqrt(x * x + y * y) * g[d] + floor)
                result[2 * d] = (x * p - y * q) * w
                result[2 * d + 1] = (x * q + y * p) * w


@kernel
def filter_backward(z, f, g, floor, grad, grad_z, grad_f, grad_g, first, last):
    """With q = |z| g + floor and r = Re(conj(grad) z f) / q^2:

    grad_z = conj(f) grad / q - g r z / |z|,   grad_f += conj(z) grad / q,   grad_g -= |z| r;   z / |z| is 0 at 0.
    """
    steps, size = z.shape[1], z.shape[2] // 2
    floor, tiny = z.dtype.type(floor), z.dtype.type(1e-30)
    sum_f, sum_g = np.zeros_like(f), np.zeros_like(g)
    for b in range(first, last):
        for t in range(steps):
            entry, arrived, result = z[b, t], grad[b, t], grad_z[b, t]
            for d in range(size):
                x, y = entry[2 * d], entry[2 * d + 1]
                u, v = arrived[2 * d], arrived[2 * d + 1]
                p, q = f[2 * d], f[2 * d + 1]
                modulus = np.sqrt(x * x + y * y)
                w = 1 / (modulus * g[d] + floor)
                r = (u * (x * p - y * q) + v * (x * q + y * p)) * w * w
                pull = g[d] * r / max(modulus, tiny)
                result[2 * d] = (p * u + q * v) * w - pull * x
                result[2 * d + 1] = (p * v - q * u) * w - pull * y
                sum_f[2 * d] += (x * u + y * v) * w
                sum_f[2 * d + 1] += (x * v - y * u) * w
                sum_g[d] -= modulus * r
            if t % _RUN == _RUN - 1 or t == steps - 1:
                grad_f[b] += sum_f
                grad_g[b] += sum_g
                sum_f[:] = 0
                sum_g[:] = 0


@kernel
def _wrapped(angle):
    """The angle in [-pi, pi)."""
    return angle - _TURN * np.floor((angle + math.pi) / _TURN)


@kernel
def gate_argument(s, alpha, beta, omega, position, out, first, last):
    """out (B, T, N) = |s| alpha + phi beta, phi_t = t omega in [-pi, pi), t = position, position + 1, ...

    The phase walks in float64 from its exact start: after 10^7 steps it is off by less than 10^-8.
    """
    steps, size = s.shape[1], s.shape[2] // 2
    phase, turn = np.empty(size), np.empty(size)
    for b in range(first, last):
        for d in range(size):
            turn[d] = _wrapped(np.float64(omega[d]))
            phase[d] = _wrapped(np.float64(position[b]) * np.float64(omega[d]))
        for t in range(steps):
            entry, result = s[b, t], out[b, t]
            for d in range(size):
                x, y = entry[2 * d], entry[2 * d + 1]
                result[d] = np.sqrt(x * x + y * y) * alpha[d] + s.dtype.type(phase[d]) * beta[d]
            for d in range(size):
                moved = phase[d] + turn[d]
                moved = moved - _TURN if moved >= math.pi else moved
                phase[d] = moved + _TURN if moved < -math.pi else moved


@kernel
def gate_backward(s, tanh, alpha, beta, omega, position, grad, grad_s, sums, first, last):
    """u = s tanh(e), e = |s| alpha + phi beta. With r = Re(conj(s) grad) (1 - tanh^2), the gradient of e:

    grad_s = tanh grad + alpha r s / |s|;   sums[b] (3, N) += |s| r, phi r, t r   (of alpha, beta, omega / beta)
    """
    steps, size = s.shape[1], s.shape[2] // 2
    phase, turn = np.empty(size), np.empty(size)
    one, tiny = s.dtype.type(1), s.dtype.type(1e-30)
    near, flat, far = np.zeros_like(alpha), np.zeros_like(alpha), np.zeros_like(alpha)
    run = np.zeros_like(alpha)
    for b in range(first, last):
        for d in range(size):
            turn[d] = _wrapped(np.float64(omega[d]))
            phase[d] = _wrapped(np.float64(position[b]) * np.float64(omega[d]))
        start = 0
        for t in range(steps):
            entry, gates, arrived, result = s[b, t], tanh[b, t], grad[b, t], grad_s[b, t]
            since = s.dtype.type(t - start)
            for d in range(size):
                x, y = entry[2 * d], entry[2 * d + 1]
                u, v, g = arrived[2 * d], arrived[2 * d + 1], gates[d]
                modulus = np.sqrt(x * x + y * y)
                r = (x * u + y * v) * (one - g * g)
                pull = alpha[d] * r / max(modulus, tiny)
                result[2 * d] = g * u + pull * x
                result[2 * d + 1] = g * v + pull * y
                near[d] += modulus * r
                flat[d] += s.dtype.type(phase[d]) * r
                run[d] += r
                far[d] += since * r
            for d in range(size):
                moved = phase[d] + turn[d]
                moved = moved - _TURN if moved >= math.pi else moved
                phase[d] = moved + _TURN if moved < -math.pi else moved
            if t - start == _RUN - 1 or t == steps - 1:
                for d in range(size):
                    sums[b, 0, d] += near[d]
                    sums[b, 1, d] += flat[d]
                    sums[b, 2, d] += far[d] + np.float64(run[d]) * (position[b] + start)
                near[:] = 0
                flat[:] = 0
                far[:] = 0
                run[:] = 0
                start = t + 1


@register_jitable(inline="always")
def _advance(v, rate, gammas, bias, cos, sin, before, h):
    """One token with projections: h (2 N) after it from `before`; gammas is 8 gamma, cos and sin those of w."""
    for i in range(len(bias)):
        g = gammas[i] * logistic(as_computed(rate[i]) + bias[i])
        kept = -expm1(-_TWO * g)
        kept = kept if kept > _TINY else _TINY
        u, a = as_computed(v[i]) * math.sqrt(kept), exp(-g)
        real, imag = a * before[2 * i], a * before[2 * i + 1]
        h[2 * i] = real * cos[i] - imag * sin[i] + u
        h[2 * i + 1] = real * sin[i] + imag * cos[i]


@kernel
def _token(v, rate, gammas, bias, cos, sin, before, h):
    """`_advance` on its own: within the loops of `forward` the compiler does not vectorise it."""
    _advance(v, rate, gammas, bias, cos, sin, before, h)


@kernel
def forward(parts, gammas, bias, cos, sin, h0, h, y, first, last):
    """h (B, T, 2 N), and y = h silu(gate), of parts = [v, rate, gate] (B, T, 4 N)."""
    n = len(bias)
    for b in range(first, last):
        before = h0[b]
        for t in range(parts.shape[1]):
            gate, states, out = parts[b, t, 2 * n :], h[b, t], y[b, t]
            _token(parts[b, t, :n], parts[b, t, n : 2 * n], gammas, bias, cos, sin, before, states)
            for i in range(2 * n):
                a = as_computed(gate[i])
                out[i] = as_stored(states[i] * a * logistic(a), gate[i])
            before = states


@kernel
def _decays(rate, gammas, bias, s, a, m):
    """sigmoid(r), a = exp(-g) and m = sqrt(1 - a^2) of one token."""
    for i in range(len(bias)):
        s[i] = logistic(as_computed(rate[i]) + bias[i])
    for i in range(len(bias)):
        g = gammas[i] * s[i]
        kept = -expm1(-_TWO * g)
        a[i], m[i] = exp(-g), math.sqrt(kept if kept > _TINY else _TINY)


@kernel
def _gate_back(gate, h, grad_y, grad_gate, flow):
    """With s = sigmoid(gate):  grad_gate = grad_y h s (1 + gate (1 - s)),  flow += grad_y gate s."""
    for i in range(len(flow)):
        x, grad = as_computed(gate[i]), as_computed(grad_y[i])
        s = logistic(x)
        grad_gate[i] = as_stored(grad * h[i] * s * (1 + x * (1 - s)), gate[i])
        flow[i] += grad * x * s


@kernel
def backward(  # noqa: C901 - many short loops: each is one that the compiler vectorises
    parts, gammas, bias, cos, sin, h0, h, grad_y, grad_h, grad_parts, sums, carry, first, last
):
    """carry (B, 2 N) is 0 before and the gradient of h0 after; grad_h (B, T, 2 N or 0). With s the gradient that
    arrives at h_t, R = exp(i w) h_{t-1}, a = exp(-g), m^2 = 1 - a^2 and g = gammas sigmoid(r):

    dv = m Re s,   dg = v Re(s) a^2 / m - a Re(conj(s) R),   carry = a exp(-i w) s
    sums[b] (4, N) += dg sigmoid(r), dg gammas sigmoid'(r), and the pairs of a s conj(h_{t-1})

    Loops write to two arrays at most: where more could overlap, they are not vectorised.
    """
    n = len(bias)
    scratch, run = np.empty((6, n), h.dtype), np.zeros((4, n), h.dtype)
    s, a, m, slope, real, imag = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], scratch[5]
    of_gamma, of_bias, of_real, of_imag = run[0], run[1], run[2], run[3]
    for b in range(first, last):
        flow = carry[b]
        for t in range(parts.shape[1] - 1, -1, -1):
            v, rate, gate = parts[b, t, :n], parts[b, t, n : 2 * n], parts[b, t, 2 * n :]
            grad_v, grad_rate, grad_gate = grad_parts[b, t, :n], grad_parts[b, t, n : 2 * n], grad_parts[b, t, 2 * n :]
            arrived, states, past = grad_y[b, t], h[b, t], h[b, t - 1] if t > 0 else h0[b]
            _gate_back(gate, states, arrived, grad_gate, flow)
            for i in range(grad_h.shape[2]):
                flow[i] += grad_h[b, t, i]
            _decays(rate, gammas, bias, s, a, m)
            for i in range(n):
                x, y, p, q = flow[2 * i], flow[2 * i + 1], past[2 * i], past[2 * i + 1]
                real[i], imag[i] = a[i] * (x * p + y * q), a[i] * (y * p - x * q)
            for i in range(n):
                slope[i] = -(real[i] * cos[i] + imag[i] * sin[i])
            for i in range(n):
                slope[i] += as_computed(v[i]) * flow[2 * i] * a[i] * a[i] / m[i]
            for i in range(n):
                grad_v[i] = as_stored(m[i] * flow[2 * i], v[i])
            for i in range(n):
                change = slope[i] * gammas[i] * s[i] * (1 - s[i])
                grad_rate[i] = as_stored(change, v[i])
                of_bias[i] += change
            for i in range(n):
                of_gamma[i] += slope[i] * s[i]
            for i in range(n):
                of_real[i] += real[i]
                of_imag[i] += imag[i]
            for i in range(n):
                x, y = flow[2 * i], flow[2 * i + 1]
                flow[2 * i], flow[2 * i + 1] = a[i] * (x * cos[i] + y * sin[i]), a[i] * (y * cos[i] - x * sin[i])
            if t % _RUN == 0:
                sums[b] += run
                run[:] = 0


@kernel
def step(v, rate, vectors, h, y):
    """One decoded token with projections: y (2 N) pairs are h moved on, and h becomes them.

    vectors (4 N): 8 gamma, the decay's bias, cos w, sin w
    """
    n = len(v)
    # Not h to h: what may overlap is not vectorised.
    _advance(v, rate, vectors[:n], vectors[n : 2 * n], vectors[2 * n : 3 * n], vectors[3 * n :], h, y)
    for i in range(2 * n):
        h[i] = y[i]
