"""Exponentials within kernels: polynomials in float32, which the compiler can vectorise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
_LOG2E, _HIGH, _LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
_COLDEST, _HOTTEST = np.float32(-87.0), np.float32(88.0)
_ZERO, _HALF, _ONE = (np.float32(x) for x in (0, 0.5, 1))


@register_jitable
def _reduced(y: Any) -> Any:
    """2^n (exp(f) - 1) and 2^n in float32 for y = n log 2 + f: exp(y) is their sum."""
    n = np.floor(y * _LOG2E + _HALF)
    f = y - n * _HIGH - n * _LOW
    p = f * (_ONE + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * (_C6 + f * _C7))))))
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * scale, scale


def expm1(x: Any) -> Any:
    """exp(x) - 1 for x <= 0 of the working type, to rounding."""
    return math.expm1(x)


@overload(expm1)
def _expm1_of_type(x):
    if x is not types.float32:
        return lambda x: math.expm1(x)

    def expm1_32(x):
        y = _COLDEST if x <= _COLDEST else x  # compared this way, a NaN stays NaN
        rest, scale = _reduced(y)
        return rest + (scale - _ONE)

    return expm1_32


def exp(x: Any) -> Any:
    """exp(x) in the working type; in float32 for x from -87 to 88, and beyond that the value at the end."""
    return math.exp(x)


@overload(exp)
def _exp_of_type(x):
    if x is not types.float32:
        return lambda x: math.exp(x)

    def exp_32(x):
        y = _COLDEST if x <= _COLDEST else x
        y = _HOTTEST if y >= _HOTTEST else y
        rest, scale = _reduced(y)
        return rest + scale

    return exp_32


@register_jitable
def sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + exp(-x))


def logistic(x: Any) -> Any:
    """sigmoid(x) in the working type; in float32 0 where exp(-x) ends, as its product with a large x is."""
    return 1 / (1 + math.exp(-x))


@overload(logistic)
def _logistic_of_type(x):
    if x is not types.float32:
        return lambda x: 1 / (1 + math.exp(-x))
    return lambda x: _ZERO if x <= _COLDEST else sigmoid(x)


@register_jitable
def softplus(x: Any) -> Any:
    """log(1 + exp(x)), without overflow."""
    return np.float32(max(x, _ZERO) + math.log1p(exp(-abs(x))))


#: of exp64: n = floor(x log2 e + 1/2), f = x - n log 2, exp(x) = 2^n sum f^k / k!, all in float64
LOG2E64, HIGH64, LOW64 = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
SERIES64 = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
#: at it and below exp64 is 0
SMALLEST64 = -708.0


@register_jitable(fastmath=False)
def exp64(x: Any) -> Any:
    """exp(x), x <= 0 in float64, by operations that IEEE 754 defines to the last bit: tensors can repeat them."""
    if x <= SMALLEST64:
        return 0.0
    n = np.floor(x * LOG2E64 + 0.5)
    f = (x - n * HIGH64) - n * LOW64
    p = SERIES64[0]
    for factor in SERIES64[1:]:
        p = p * f + factor
    return p * np.int64((np.int64(n) + np.int64(1023)) << np.int64(52)).view(np.float64)
