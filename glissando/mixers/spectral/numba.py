"""The element-wise halves of the spectral operator on a CPU, each one pass over memory, compiled by Numba.

Arrays are (B, T, 2 N): complex numbers as interleaved pairs. Sums over tokens run in the working precision for `_RUN`
tokens and are then added to float64 totals. What is transcendental (tanh, the transforms) stays with PyTorch, whose
vector library has it and Numba's wheel has not.
"""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp, expm1, sigmoid

#: steps summed in the working precision before they are added to a float64 total
_RUN = 256

_TURN = 2 * math.pi
_TWO, _TINY = np.float32(2), np.float32(np.finfo(np.float32).tiny)


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


@kernel
def step(v, rate, vectors, h, y):
    """One decoded token with projections: h (2 N) pairs, moved on, and copied to y.

    vectors (4, N) flat: 8 gamma, the decay's bias, cos w, sin w
    """
    n = len(v)
    gamma, bias, cos, sin = vectors[:n], vectors[n : 2 * n], vectors[2 * n : 3 * n], vectors[3 * n :]
    for i in range(n):
        g = gamma[i] * sigmoid(rate[i] + bias[i])
        kept = -expm1(-_TWO * g)
        kept = kept if kept > _TINY else _TINY
        u, a = v[i] * math.sqrt(kept), exp(-g)
        real, imag = a * h[2 * i], a * h[2 * i + 1]
        p = real * cos[i] - imag * sin[i] + u
        q = real * sin[i] + imag * cos[i]
        h[2 * i], h[2 * i + 1], y[2 * i], y[2 * i + 1] = p, q, p, q
