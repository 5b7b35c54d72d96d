"""Causal attention and its gradients on a CPU by `tiles_numba`: in float32, rounded once.

    p = 2^(scale log2(e) q k' - L),  y = p v,  dS = p (g v' - g y),  dq = scale dS k,  dk = scale dS' q,  dv = p' g

L is the logarithm of the sum of a query's weights, to the base 2. A weight below 2^-101 counts as 0. A thread takes
20 T K bytes. In bfloat16 y comes from PyTorch's fused kernel, whose products are faster. There are no second
derivatives. Later keys of a query's own tile of 64 are kept out by adding -1e30 to their logits: logits must be much
smaller than that, and a key that is not finite reaches the queries of its tile before it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from glissando.kernels.compiled import compiles, over_rows, use_numba
from glissando.kernels.plain import without_derivatives
from glissando.kernels.products import is_wide
from glissando.precision import autocast_type

#: lengths from which the tiles pay
_SHORTEST = {torch.float32: 128, torch.bfloat16: 16}


def fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal` takes these tensors and is faster than the fused kernel."""
    if not use_numba("attention", "auto", q) or autocast_type("cpu") not in (None, q.dtype):
        return False
    if len({(x.dtype, x.shape) for x in (q, k, v)}) > 1 or not takes(q, k, v):
        return False
    length, size = q.shape[2:]
    if q.dtype == torch.bfloat16:
        # Without gradients it is the fused kernel itself, whose gradients gain by size and length.
        return torch.is_grad_enabled() and length >= _SHORTEST[q.dtype] and length * size**2 <= 1 << 23
    return length >= _SHORTEST[q.dtype] and size <= 128


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel computes with such tensors on this processor."""
    fits = q.dtype in (torch.float32, torch.bfloat16) and q.shape[3] % 32 == 0 and 0 not in q.shape
    return fits and is_wide() and compiles() and all(x.stride(3) == 1 for x in (q, k, v))


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k, v (B, H, T, K) -> (B, H, T, K), float32 or bfloat16 on a CPU with AVX-512, K a multiple of 32."""
    return _Causal.apply(q, k, v, scale) if torch.is_grad_enabled() else _forward(q, k, v, scale)[0]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        y, log_sums = _forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, y, log_sums)
        ctx.scale = scale
        return y

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from glissando.mixers.attention.tiles_numba import backward

        *inputs, log_sums = ctx.saved_tensors
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        grads = [_empty(grad) for _ in range(3)]
        arrays = [*map(_numbers, (*inputs, grad)), tuple(grad.shape[1:]), log_sums.numpy(), ctx.scale]
        over_rows(backward, log_sums, *arrays, *map(_numbers, grads), cost=grad.shape[2])
        return *grads, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y (B, H, T, K), and log2 of the sums of weights, (B H, T)."""
    batch, heads, length, size = q.shape
    if q.dtype == torch.bfloat16:
        y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return y, log_sums.float().mul_(math.log2(math.e)).reshape(-1, q.shape[2]).contiguous()
    from glissando.mixers.attention.tiles_numba import forward

    y, log_sums = _empty(q), q.new_empty(batch * heads, length)
    arrays = [*map(_numbers, (q, k, v)), (heads, length, size), scale, _numbers(y), log_sums.numpy()]
    over_rows(forward, log_sums, *arrays, cost=length)
    return y, log_sums


def _empty(like: Tensor) -> Tensor:
    """A tensor (B, H, T, K) that lies as the layer's projections, (B, T, H, K)."""
    return like.new_empty(like.transpose(1, 2).shape).transpose(1, 2)


def _numbers(x: Tensor) -> tuple[Any, ...]:
    """The numbers in one row of the same memory, bfloat16 as its bits, and the strides."""
    x = x.detach().resolve_neg()
    x = x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
    span = 1 + sum((n - 1) * far for n, far in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span,), (1,)).numpy(), *x.stride()
