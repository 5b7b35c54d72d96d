"""Causal depthwise convolution of a few taps: y_t = sum_j w_j x_{t-W+1+j}, one filter a channel."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.kernels.compiled import as_rows, over_rows, require_shapes, require_types, same_reals, use_numba
from glissando.kernels.loop import exporting
from glissando.kernels.plain import without_derivatives


def short_conv(
    x: Tensor, weight: Tensor, past: Tensor | None = None, backend: Literal["auto", "reference", "numba"] = "auto"
) -> Tensor:
    """x (B, T, D), weight (D, W), past (B, W - 1, D) the inputs before x (zeros if None) -> (B, T, D).

    `reference` is W shifted multiply-adds, several times faster on a CPU than torch's grouped conv1d for W <= 8; the
    kernel makes them in one pass, and has no second derivatives. `auto` is the kernel in float32 and float64 on a CPU.

    Raises ValueError for shapes that do not fit, or types that the kernel does not take.
    """
    require_shapes("short_conv", weight=(weight, (x.shape[-1], weight.shape[-1])))
    if past is not None:
        require_shapes("short_conv", past=(past, (x.shape[0], weight.shape[1] - 1, x.shape[2])))
    extended = F.pad(x, (0, 0, weight.shape[1] - 1, 0)) if past is None else torch.cat([past, x], 1)
    if not use_numba("short_conv", backend, x) or (backend == "auto" and not same_reals(extended, weight)):
        return _shifted(extended, weight)
    require_types("short_conv", x=extended, weight=weight)
    return _ShortConv.apply(extended, weight) if torch.is_grad_enabled() else _in_one_pass(None, extended, weight)


def _shifted(extended: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[1]
    length = extended.shape[1] - width + 1
    y = extended[:, width - 1 :] * weight[:, width - 1]
    for tap in range(width - 1):
        y = torch.addcmul(y, extended[:, tap : tap + length], weight[:, tap])
    return y


def _in_one_pass(ctx: Any, extended: Tensor, weight: Tensor) -> Tensor:
    from glissando.kernels.layers_numba import short_conv_forward

    if ctx is not None:
        ctx.save_for_backward(extended, weight)
    batch, length, size = extended.shape
    y = extended.new_empty(batch, length - weight.shape[1] + 1, size)
    over_rows(short_conv_forward, y, as_rows(extended, 2), as_rows(weight.t().clone(), 1), y.numpy())
    return y


class _ShortConv(torch.autograd.Function):
    """With g the gradient at y and z = [past, x]:  dz_s = sum_j w_j g_{s-j},  dw_j = sum_t g_t z_{t+j}."""

    forward = staticmethod(_in_one_pass)

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from glissando.kernels.layers_numba import short_conv_backward

        extended, weight = ctx.saved_tensors
        grad_extended = torch.empty_like(extended, memory_format=torch.contiguous_format)
        sums = torch.zeros(len(extended), weight.shape[1], extended.shape[2], dtype=torch.float64)
        arrays = as_rows(extended, 2), as_rows(weight.t().clone(), 1), as_rows(grad, 2)
        over_rows(short_conv_backward, extended, *arrays, grad_extended.numpy(), sums.numpy())
        return grad_extended, sums.sum(0).t().to(weight.dtype)


def next_past(x: Tensor, past: Tensor, counts: Tensor | None) -> Tensor:
    """The last W - 1 real inputs of each row: of [past, x], those that end at real token number `counts` (B,).

    `counts` None means that every token of x is real.
    """
    width, length = past.shape[1], x.shape[1]
    if counts is None and exporting():
        return torch.cat([past, x], 1)[:, length:].clone()
    if counts is None:
        # Copied, and no more than that: a view would keep the whole prompt alive.
        return torch.cat([past[:, length:], x[:, max(length - width, 0) :]], 1)
    extended = torch.cat([past, x], 1)
    index = counts.unsqueeze(1) + torch.arange(width, device=x.device)
    return extended.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
