"""The spectral recurrence with projections, from what is projected to the gated states, in one pass each way on a CPU.

parts = [v, r, g] (B, T, 4 N); see glissando.mixers.spectral for the equation, and its `numba` for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glissando.kernels.compiled import as_rows, as_stored_rows, over_rows, require_shapes, same_reals, use_numba
from glissando.kernels.plain import without_derivatives
from glissando.precision import exact

#: how much longer a number takes than to read, combine and write it: four exponentials
_COST = 4


def has_kernel(parts: Tensor, *constants: Tensor) -> bool:
    """Whether `gated_scan` serves these tensors, on a CPU."""
    stored = parts.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return stored and use_numba("spectral", "auto", parts) and same_reals(exact(parts[:0]), *constants)


def gated_scan(parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """y = h silu(g) (B, T, 2 N) in the type of `parts`, and the states h (B, T, N, 2), which must not be changed.

    gammas (N,) 8 gamma; bias (N,) of the decay; factor (N, 2) exp(i w); h0 (B, N, 2), zeros if None

    Raises ValueError for shapes that do not fit.
    """
    if parts.shape[1] < 1:
        raise ValueError(f"spectral: x must be (batch, time >= 1, features), got {tuple(parts.shape[:2])}")
    if h0 is None:
        h0 = factor.new_zeros(len(parts), *factor.shape)
    require_shapes("spectral", h0=(h0, (len(parts), *factor.shape)))
    return _GatedScan.apply(parts, gammas, bias, factor, h0.to(factor.dtype))


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor) -> Any:
        from glissando.mixers.spectral.numba import forward

        h = factor.new_empty(*parts.shape[:2], *factor.shape)
        y = parts.new_empty(*parts.shape[:2], factor.numel())
        arrays = *_arrays(parts, gammas, bias, factor, h0), as_rows(h, 2), as_stored_rows(y)
        over_rows(forward, parts, *arrays, cost=_COST)
        ctx.save_for_backward(parts, gammas, bias, factor, h0, h)
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
        from glissando.mixers.spectral.numba import backward

        *inputs, h = ctx.saved_tensors
        parts, _, bias, factor, h0 = inputs
        grad_y = parts.new_zeros(*parts.shape[:2], factor.numel()) if grad_y is None else grad_y.to(parts.dtype)
        grad_h = h[:, :, :0] if grad_h is None else grad_h
        grad_parts = torch.empty_like(parts, memory_format=torch.contiguous_format)
        sums, carry = torch.zeros(len(parts), 4, len(bias), dtype=torch.float64), h.new_zeros(h0.shape)
        past = *_arrays(*inputs), as_rows(h, 2), as_stored_rows(grad_y), as_rows(grad_h, 2)
        over_rows(backward, parts, *past, as_stored_rows(grad_parts), sums.numpy(), as_rows(carry, 1), cost=_COST)
        of_gammas, of_bias, real, imag = sums.sum(0).to(bias.dtype)
        return grad_parts, of_gammas, of_bias, torch.stack((real, imag), -1), carry


def _arrays(parts: Tensor, gammas: Tensor, bias: Tensor, factor: Tensor, h0: Tensor) -> tuple[Any, ...]:
    vectors = gammas, bias, *factor.unbind(-1)
    return as_stored_rows(parts), *(as_rows(vector, 0) for vector in vectors), as_rows(h0, 1)
