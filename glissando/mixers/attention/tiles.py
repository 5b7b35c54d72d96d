"""Causal attention by PyTorch's fused kernel, its gradients on a CPU by `tiles_numba`: in float32, rounded once.

    p = exp(scale q k' - L),  dS = p (g v' - g y),  dq = scale dS k,  dk = scale dS' q,  dv = p' g

L is the logarithm of the sum of a query's weights. A weight below exp(-70) counts as 0. A thread takes 40 T K bytes.
There are no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.kernels.compiled import over_rows, use_numba
from glissando.kernels.products import is_wide
from glissando.precision import autocast_type

#: head size and lengths with which the tiles pay; with heads of 64 and 128 PyTorch's gradients are up to twice as fast
_SIZE = 32
_LENGTHS = {torch.float32: range(512, 1025), torch.bfloat16: range(128, 4097)}


def fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal` takes these tensors and is faster than the fused kernel's own gradients."""
    if not torch.is_grad_enabled() or not use_numba("attention", "auto", q):
        return False
    if len({(x.dtype, x.shape) for x in (q, k, v)}) > 1 or autocast_type("cpu") not in (None, q.dtype):
        return False
    lengths = _LENGTHS.get(q.dtype, range(0))
    return q.shape[3] == _SIZE and q.shape[2] in lengths and takes(q, k, v)


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel computes with such tensors on this processor."""
    fits = q.dtype in (torch.float32, torch.bfloat16) and q.shape[3] % 32 == 0 and 0 not in q.shape
    return fits and is_wide() and all(x.stride(3) == 1 for x in (q, k, v))


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k, v (B, H, T, K) -> (B, H, T, K), float32 or bfloat16 on a CPU with AVX-512, K a multiple of 32."""
    return _Causal.apply(q, k, v, scale)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, log_sums = fused(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, y, log_sums)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from glissando.mixers.attention.tiles_numba import backward

        *inputs, log_sums = ctx.saved_tensors
        batch, heads, length, size = grad.shape
        rows = log_sums.float().reshape(batch * heads, length).contiguous()
        # As the layer's projections lie: (B, T, H, K).
        grads = [inputs[0].new_empty(batch, length, heads, size).transpose(1, 2) for _ in range(3)]
        arrays, written = [_numbers(x) for x in (*inputs, grad)], [_numbers(x) for x in grads]
        over_rows(backward, rows, *arrays, rows.numpy(), ctx.scale, *written, cost=length)
        return *grads, None


def _numbers(x: Tensor) -> Any:
    """An array that shares memory, bfloat16 as its bits."""
    x = x.detach().resolve_neg()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
