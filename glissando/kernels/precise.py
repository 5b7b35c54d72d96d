"""Sums over many tokens and angles at far positions, on devices with float64 and on those without.

A *wide* number is a float64 tensor (...) where the device has float64. Elsewhere it is a pair of float32 numbers in a
last dimension of size 2, high + low with |low| at most half a unit in the last place of high: 48 bits. The type tells
which of the two a tensor is. Pairs are made by sums and products whose rounding errors are computed too:

    a + b = s + ((a - (s - t)) + (b - t)),   s = fl(a + b),  t = fl(s - a)
    a b   = p + (((ah bh - p) + ah bl + al bh) + al bl),   p = fl(a b),  a = ah + al with 12 bits each

Gradients flow through the high parts alone: rounding errors have none.

Knuth 1969, The Art of Computer Programming 2, 4.2.2; Dekker 1971, "A floating-point technique for extending the
available precision"; the reduction of angles by parts of 2 pi: Cody and Waite 1980.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.kernels.plain import plain

#: types of devices that have no float64 at all
_WITHOUT = {"mps"}

_TURN = 2 * math.pi
_TURN_HIGH = float(np.float32(_TURN))
_TURN_LOW = _TURN - _TURN_HIGH


def has_float64(device: torch.device | str) -> bool:
    """Whether tensors on `device` can be float64."""
    device = torch.device(device)
    if device.type == "xpu" and "xpu" not in _WITHOUT:
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in _WITHOUT


@contextmanager
def standing_in(device_type: str) -> Iterator[None]:
    """Devices of this type count as without float64 meanwhile, in every thread: for tests."""
    if device_type in _WITHOUT:
        yield
        return
    _WITHOUT.add(device_type)
    try:
        yield
    finally:
        _WITHOUT.discard(device_type)


def widest(device: torch.device | str) -> torch.dtype:
    """The widest floating type of `device`."""
    return torch.float64 if has_float64(device) else torch.float32


def double(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its own device has none."""
    return x.double() if has_float64(x.device) else x.cpu().double()


# ---------------------------------------------------------------------- wide numbers


def is_pair(x: Tensor) -> bool:
    """Whether the wide number x is a pair of float32."""
    return x.dtype != torch.float64


def wide(x: Tensor) -> Tensor:
    """x as a wide number of the same value."""
    if has_float64(x.device):
        return x.double()
    x = x.float()
    return torch.stack([x, torch.zeros_like(x)], -1)


def wide_zeros(*shape: int, device: torch.device | None = None) -> Tensor:
    """Zeros of this shape as a wide number."""
    if device is None or has_float64(device):
        return torch.zeros(shape, dtype=torch.float64, device=device)
    return torch.zeros(*shape, 2, dtype=torch.float32, device=device)


def rounded(x: Tensor) -> Tensor:
    """The wide number x in the widest type of its device: its high part, where it is a pair."""
    return x[..., 0] if is_pair(x) else x


def wide_to_double(x: Tensor) -> Tensor:
    """The wide number x in float64, on the CPU where its device has none."""
    return double(x).sum(-1) if is_pair(x) else x


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, both wide, to 2^-45 of the larger of the two where they are pairs."""
    if not is_pair(a):
        return a + b
    high, low = two_sum(a[..., 0], b[..., 0])
    return _pair(high, low + (a[..., 1] + b[..., 1]).detach())


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b in the widest type, both wide: pairs are rounded once, to 2^-24 of the difference and 2^-45 of a."""
    if not is_pair(a):
        return a - b
    high, low = two_sum(a[..., 0], -b[..., 0])
    return high + (low + (a[..., 1] - b[..., 1]).detach())


def filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """The wide number x, and `value` where the mask is true."""
    if not is_pair(x):
        return x.masked_fill(mask, value)
    return torch.where(mask.unsqueeze(-1), x.new_tensor([value, 0.0]), x)


def cumulative(x: Tensor, dim: int) -> Tensor:
    """sum_{s <= t} x_s along `dim` >= 0 as a wide number: pairs to 2^-43 of the largest sum, whatever the length."""
    if has_float64(x.device):
        return x.double().cumsum(dim)
    return _pair_sums(x.float(), dim) if plain() else _Cumulative.apply(x.float(), dim)


def _pair_sums(x: Tensor, dim: int) -> Tensor:
    """Pairs by Hillis and Steele's scan: after k passes each holds the sum of the last 2^k terms."""
    length, reach, total = x.shape[dim], 1, wide(x)
    while reach < length:
        later = add(total.narrow(dim, reach, length - reach), total.narrow(dim, 0, length - reach))
        total = torch.cat([total.narrow(dim, 0, reach), later], dim)
        reach *= 2
    return total


class _Cumulative(torch.autograd.Function):
    """`_pair_sums`, whose gradient is one sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _pair_sums(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., 0].flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None


# ---------------------------------------------------------------------- angles


def angle(t: Tensor, omega: Tensor) -> Tensor:
    """t omega modulo 2 pi in the widest type, for whole t and omega in radians, broadcast.

    In float32 the angle is within 1e-6 of the exact one, in [-pi, pi] but for rounding, for |t| <= 2^24 and
    |t omega| <= 2^24: float32 holds no larger whole numbers. In float64 it is t omega itself.
    """
    if has_float64(t.device):
        return t.double() * omega.double()
    return _reduced(*two_product(t.float(), omega.float()))


def angle_of_constants(t: Tensor, omega: list[float]) -> Tensor:
    """t omega modulo 2 pi in float32 (..., N) for whole t (...), as `angle`, and omega that keep all their digits."""
    exact = np.array(omega)
    high = exact.astype(np.float32)
    low = torch.from_numpy((exact - high).astype(np.float32)).to(t.device)
    t = t.float().unsqueeze(-1)
    product, rest = two_product(t, torch.from_numpy(high).to(t.device))
    return _reduced(product, rest + t * low)


def angle_sum(x: Tensor, dim: int) -> Tensor:
    """sum_{s <= t} x_s along `dim` >= 0 in the widest type, modulo 2 pi where that is float32: within 1e-6, for sums to
    2^24."""
    total = cumulative(x, dim)
    return _reduced(total[..., 0], total[..., 1].detach()) if is_pair(total) else total


def _reduced(high: Tensor, low: Tensor) -> Tensor:
    """high + low modulo 2 pi: whole turns are taken off in two parts, of which the first leaves no rounding error."""
    turns = (high.detach() / _TURN).round()
    product, rest = two_product(turns, torch.full_like(turns, _TURN_HIGH))
    return (high - product) + ((low - rest) - turns * _TURN_LOW)


# ---------------------------------------------------------------------- without rounding errors


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """fl(a + b) and its rounding error, which has no gradient; 0 where the sum is not finite."""
    total = a + b
    with torch.no_grad():
        t = total - a
        return total, ((a - (total - t)) + (b - t)).nan_to_num_(0.0, 0.0, 0.0)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """fl(a b) and its rounding error, which has no gradient; for float32 below 2^115."""
    product = a * b
    with torch.no_grad():
        (ah, al), (bh, bl) = _halves(a), _halves(b)
        return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the sum of two numbers of 12 bits each."""
    scaled = x * 4097.0
    high = scaled - (scaled - x)
    return high, x - high


def _pair(high: Tensor, low: Tensor) -> Tensor:
    """high + low, |low| well below |high|, as a pair."""
    total = high + low
    with torch.no_grad():
        rest = (low - (total - high)).nan_to_num_(0.0, 0.0, 0.0)
    return torch.stack([total, rest], -1)
