"""SwiGLU on a CPU, one pass over memory forward and one backward, compiled by Numba.

h (B, T, 2 F), y, g (B, T, F): float32, float64, or the bits of bfloat16 as uint16, computed in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from glissando.kernels.compiled import kernel
from glissando.kernels.exponentials import exp64, sigmoid
from glissando.kernels.products import from_bfloat16, to_bfloat16


def _read(number: Any) -> Any:
    """A stored number in the type that it is computed in."""
    return from_bfloat16(number) if number.dtype == np.uint16 else number


@overload(_read)
def _read_of_type(number):
    if number == types.uint16:
        return lambda number: from_bfloat16(number)
    return lambda number: number


def _stored(number: Any, like: Any) -> Any:
    """A computed number in the type of `like`."""
    return to_bfloat16(number) if like.dtype == np.uint16 else number


@overload(_stored)
def _stored_of_type(number, like):
    if like == types.uint16:
        return lambda number, like: to_bfloat16(number)
    return lambda number, like: number


def _logistic(x: Any) -> Any:
    """1 / (1 + exp(-x)) in the type of x."""
    return 1 / (1 + np.exp(-x))


@overload(_logistic)
def _logistic_of_type(x):
    if x == types.float32:
        return lambda x: sigmoid(x)

    def logistic64(x):
        e = exp64(-abs(x))
        return (1.0 if x >= 0 else e) / (1.0 + e)

    return logistic64


@kernel
def forward(h, y, first, last):
    """y = a sigmoid(a) b,   h = [a, b]."""
    size = y.shape[2]
    for b in range(first, last):
        for t in range(y.shape[1]):
            gate, up, result = h[b, t, :size], h[b, t, size:], y[b, t]
            for i in range(size):
                a = _read(gate[i])
                result[i] = _stored(a * _logistic(a) * _read(up[i]), gate[i])


@kernel
def backward(h, g, grad_h, first, last):
    """grad_a = g b s (1 + a (1 - s)),   grad_b = g a s,   s = sigmoid(a)."""
    size = g.shape[2]
    for b in range(first, last):
        for t in range(g.shape[1]):
            gate, up, arrived = h[b, t, :size], h[b, t, size:], g[b, t]
            grad_gate, grad_up = grad_h[b, t, :size], grad_h[b, t, size:]
            for i in range(size):
                a, flow = _read(gate[i]), _read(arrived[i])
                s = _logistic(a)
                silu = a * s
                grad_up[i] = _stored(flow * silu, gate[i])
                grad_gate[i] = _stored(flow * _read(up[i]) * (s + silu * (1 - s)), gate[i])
