"""Sums over many tokens and angles at far positions: in float64, and what takes its place on devices without it.

There sums are in float32, whose relative error after 65,536 tokens is 1e-3. Angles, which grow with the position, are
computed on the CPU and taken modulo a full turn: they are exact to float32's rounding at any position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: types of devices that have no float64 at all
_WITHOUT = {"mps"}


def has_float64(device: torch.device | str) -> bool:
    """Whether tensors on `device` can be float64."""
    device = torch.device(device)
    if device.type == "xpu" and "xpu" not in _WITHOUT:
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in _WITHOUT


def widest_float(device: torch.device | str) -> torch.dtype:
    """The widest floating type of `device`."""
    return torch.float64 if has_float64(device) else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in the widest type of its device."""
    return x.to(widest_float(x.device))


def double(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its own device has none."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def angle(t: Tensor, omega: Tensor | np.ndarray) -> Tensor:
    """t omega, broadcast, in float64; in float32, modulo 2 pi, where there is none."""
    if has_float64(t.device):
        return t.double() * torch.as_tensor(omega, device=t.device).double()
    near = omega if isinstance(omega, Tensor) else torch.from_numpy(omega.astype(np.float32)).to(t.device)
    return _modulo_a_turn(np.multiply, t, omega, rounded=t * near)


def angle_sum(x: Tensor, dim: int) -> Tensor:
    """sum_{s <= t} x_s along `dim` in float64; in float32, modulo 2 pi, where there is none."""
    total = wide(x).cumsum(dim)
    if has_float64(x.device):
        return total
    return _modulo_a_turn(lambda array: array.cumsum(dim), x, rounded=total)


def _modulo_a_turn(f: Callable[..., Any], *arguments: Tensor | np.ndarray, rounded: Tensor) -> Tensor:
    """f of the arguments as NumPy's float64, modulo 2 pi, with the gradient of `rounded`."""
    arrays = [x if isinstance(x, np.ndarray) else x.detach().cpu().numpy() for x in arguments]
    exact = np.remainder(f(*(array.astype(np.float64) for array in arrays)), 2 * math.pi)
    return torch.from_numpy(exact.astype(np.float32)).to(rounded.device) + (rounded - rounded.detach())
