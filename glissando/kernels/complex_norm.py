"""Standardisation of complex vectors: y = (z - mu) / sqrt(mean |z - mu|^2 + eps), mu and mean over the features.

The Continuous Transformer as published divides by the root of the pseudo-variance mean((z - mu)^2), which can be almost
zero; this is the right form.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, over_rows, use_numba
from glissando.kernels.plain import without_derivatives


def complex_norm(x: Tensor, eps: float = 1e-6, backend: Literal["auto", "reference", "numba"] = "auto") -> Tensor:
    """x (..., 2 N), complex numbers as interleaved pairs -> the same shape; statistics at least in float32.

    `numba` (a CPU only; `auto` there) passes over memory once each way.

    Raises ValueError for an odd width.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"complex_norm: x holds pairs and needs an even last dimension, got {tuple(x.shape)}")
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    if use_numba("complex_norm", backend, exact):
        rows = exact if exact.ndim == 3 else exact.reshape(1, -1, exact.shape[-1])
        y = _ComplexNorm.apply(rows, eps) if torch.is_grad_enabled() else _normed(rows, eps)[0]
        return y.view(x.shape).to(x.dtype)
    pairs = exact.unflatten(-1, (-1, 2))
    centred = pairs - pairs.mean(-2, keepdim=True)
    # The mean of |z|^2 over N numbers is twice the mean over their 2 N parts.
    power = 2 * centred.square().mean((-2, -1), keepdim=True)
    return (centred * torch.rsqrt(power + eps)).flatten(-2).to(x.dtype)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and the scale 1 / sqrt(mean |z - mu|^2 + eps) of every vector."""
    from glissando.kernels.layers_numba import complex_norm_forward

    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty(x.shape[:-1])
    over_rows(complex_norm_forward, x, as_rows(x, 2), eps, as_rows(y, 2), scale.numpy())
    return y, scale


class _ComplexNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean |c|^2 + eps), y = c r:  dc = r (g - y mean Re(conj(y) g)),  dz = dc - mean dc."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, scale = _normed(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from glissando.kernels.layers_numba import complex_norm_backward

        y, scale = ctx.saved_tensors
        grad_x = torch.empty_like(y)
        over_rows(complex_norm_backward, y, as_rows(y, 2), scale.numpy(), as_rows(grad, 2), as_rows(grad_x, 2))
        return grad_x, None
