"""Rotary position embedding: relative position as the angle between rotated pairs.

    (x_i, x_{i+K/2}) -> (x_i cos a - x_{i+K/2} sin a,  x_i sin a + x_{i+K/2} cos a),   a = p * base^(-2i / width)

for i < K/2 at position p. `width` is the head size K unless a model pins another (the Minimal Transformer
divides by its model width; growth keeps old frequencies). Su et al. 2021, arXiv 2104.09864, eq. 15. Pairs are
(i, i + K/2), which differs from the paper's (2i, 2i + 1) by a fixed permutation of the features.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from glissando.kernels.compiled import kernels_serve, over_rows, require_backend
from glissando.kernels.loop import exporting
from glissando.kernels.plain import plain, resolved
from glissando.kernels.precise import angle, has_float64, wide

#: positions whose rotations are kept once they are needed: 16 MiB at head size 64
_TABLE = 1 << 16
#: numbers from which a kernel pays
_LARGE = 1 << 13


def rotation(positions: Tensor, head_size: int, base: float, width: int, dtype: torch.dtype) -> Tensor:
    """cos and sin (2, *positions.shape, K/2) at `positions`, int64 or times.

    Raises ValueError for an odd head size, which has no pairs to rotate.
    """
    if head_size % 2:
        raise ValueError(f"RoPE rotates pairs: head size must be even, got {head_size}")
    # Angles grow with position: plain float32 loses 1e-3 rad at position 10^4.
    if has_float64(positions.device):
        pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
        turned = angle(positions.unsqueeze(-1), base ** (-pairs / width))
    else:
        turned = angle(positions.unsqueeze(-1), base ** (-np.arange(0, head_size, 2) / width))
    return torch.stack([turned.cos(), turned.sin()]).to(dtype)


def rotation_from_zero(
    length: int, head_size: int, base: float, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`rotation` at positions 0 .. length - 1, cached: every layer of every step uses the same."""
    # A compiled graph has its own ways to share it, and cannot read our memory; what is made under a mode such as
    # FakeTensorMode or a transform of torch.func holds no numbers, and is not to be remembered.
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or plain():
        return rotation(torch.arange(length, device=device), head_size, base, width, dtype)
    return _remembered(length, head_size, base, width, dtype, device)


def rotation_after(
    position: Tensor | None,
    length: int,
    head_size: int,
    base: float,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    dt: Tensor | None = None,
) -> Tensor:
    """`rotation` of `length` tokens that follow `position` (B,), or of the first: (2, 1 or B, length, K/2); with dt
    (B, length) by the time at which each stands."""
    if dt is not None:  # a sum, so that with dt = 1 times are the positions
        summed = wide(dt).cumsum(1)
        times = summed - 1 if position is None else position.to(summed.dtype).unsqueeze(1) + summed - 1
        return rotation(times, head_size, base, width, dtype)
    if position is None:
        return rotation_from_zero(length, head_size, base, width, dtype, device).unsqueeze(1)
    if exporting() or plain() or position.is_floating_point():  # nothing depends on a value, or times differ
        return rotation(position.unsqueeze(1) + torch.arange(length, device=device), head_size, base, width, dtype)
    starts = position.tolist()
    if len(set(starts)) == 1 and starts[0] + length <= _TABLE:
        # Decoding: all rows stand at one place, and a slice of a table that every layer shares is free.
        table = rotation_from_zero(_TABLE, head_size, base, width, dtype, device)
        return table[:, None, starts[0] : starts[0] + length]
    where = position.unsqueeze(1) + torch.arange(length, device=device)
    if max(starts, default=0) + length <= _TABLE:
        return rotation_from_zero(_TABLE, head_size, base, width, dtype, device)[:, where]
    return rotation(where, head_size, base, width, dtype)


@lru_cache(maxsize=16)
def _remembered(
    length: int, head_size: int, base: float, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return rotation(torch.arange(length, device=device), head_size, base, width, dtype)


def rotate(x: Tensor, cos_sin: Tensor, backend: Literal["auto", "reference"] = "auto") -> Tensor:
    """x (..., K) rotated by cos_sin (2, ..., K/2) -> (..., K) in the type of x.

    `auto` writes both halves into one tensor and rotates the gradient back by the opposite angle, on a CPU in one pass
    for x (B, T, H, K) and cos_sin (2, 1 or B, T, 1, K/2) where that pays; where torch.compile looks on, which cannot
    write into a part of a tensor, and where cos_sin has a gradient, as times have one, it is the reference. Derivatives
    of any order.

    Raises UnknownNameError for a backend that there is not, ValueError for a table of another K.
    """
    require_backend("rotate", backend, ("auto", "reference"))
    backend = resolved(backend)
    if 2 * cos_sin.shape[-1] != x.shape[-1]:
        raise ValueError(f"rotate: cos_sin must end in K/2 = {x.shape[-1] / 2:g} angles, got {cos_sin.shape[-1]}")
    if backend == "reference" or torch.compiler.is_compiling() or cos_sin.requires_grad:
        cos, sin = cos_sin[0], cos_sin[1]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return _Rotate.apply(x, cos_sin) if torch.is_grad_enabled() else _turn(None, x, cos_sin)


def _turn(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
    if ctx is not None:
        ctx.save_for_backward(cos_sin)
    cos, sin = cos_sin[0], cos_sin[1]
    if kernels_serve(x.device) and x.ndim == 4 and x.numel() >= _LARGE and _has_kernel(x, cos):
        from glissando.kernels.layers_numba import rotate_pairs

        # In the table's precision, rounded once.
        table = (part.squeeze(2).contiguous().numpy() for part in (cos, sin))
        pairs = x.detach().to(cos.dtype).contiguous()
        y = torch.empty_like(pairs)
        over_rows(rotate_pairs, pairs, pairs.numpy(), *table, y.numpy())
        return y.to(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (y_first, y_second) = x.chunk(2, -1), y.chunk(2, -1)
    torch.mul(first, cos, out=y_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=y_second).addcmul_(first, sin)
    return y


def _has_kernel(x: Tensor, cos: Tensor) -> bool:
    """Where all heads of a token turn alike, by a table no less exact than x and in numbers that Numba has."""
    if cos.dtype not in (torch.float32, torch.float64) or torch.promote_types(x.dtype, cos.dtype) != cos.dtype:
        return False
    return cos.ndim == 4 and cos.shape[2] == 1 and cos.shape[1] == x.shape[1] and cos.shape[0] in (1, x.shape[0])


class _Rotate(torch.autograd.Function):
    forward = staticmethod(_turn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        back = torch.stack([cos_sin[0], -cos_sin[1]])
        return _Rotate.apply(grad, back), None
