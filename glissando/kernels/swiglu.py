"""SwiGLU: y = silu(a) * b for h = [a, b], silu(a) = a sigmoid(a). Shazeer 2020, arXiv 2002.05202, eq. 6."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.kernels.compiled import as_stored_rows, over_rows, require_backend, use_numba
from glissando.kernels.plain import resolved, without_derivatives

#: numbers from which a kernel pays without gradients
_LARGE = 1 << 13


def swiglu(h: Tensor, backend: Literal["auto", "reference"] = "auto") -> Tensor:
    """h (..., 2 F) -> (..., F). `auto` keeps only h for the backward and writes its gradient in one piece, on a CPU by
    a kernel of one pass, which computes bfloat16 in float32 and rounds once; where torch.compile looks on, which cannot
    write into a part of a tensor, it is the reference. Only `reference` has second derivatives.

    Raises ValueError for an odd width, UnknownNameError for a backend that there is not.
    """
    require_backend("swiglu", backend, ("auto", "reference"))
    backend = resolved(backend)
    if h.shape[-1] % 2:
        raise ValueError(f"swiglu: h holds two halves and needs an even last dimension, got {tuple(h.shape)}")
    if backend == "auto" and not torch.is_grad_enabled():
        return _forward(None, h, _has_kernel(h) and h.numel() >= _LARGE)
    if backend == "reference" or torch.compiler.is_compiling():
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return _SwiGLU.apply(h, _has_kernel(h))


def _has_kernel(h: Tensor) -> bool:
    return use_numba("swiglu", "auto", h) and h.dtype in (torch.float32, torch.float64, torch.bfloat16)


def _tokens(x: Tensor) -> Tensor:
    """(..., D) as (N, 1, D): threads share out the tokens, of one text too."""
    return x.detach().resolve_neg().reshape(math.prod(x.shape[:-1]), 1, x.shape[-1])


def _rows(x: Tensor) -> Any:
    return as_stored_rows(_tokens(x))


def _forward(ctx: Any, h: Tensor, by_kernel: bool) -> Tensor:
    if ctx is not None:
        ctx.save_for_backward(h)
        ctx.by_kernel = by_kernel
    if by_kernel:
        from glissando.kernels.layers_numba import swiglu_forward

        y = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
        over_rows(swiglu_forward, _tokens(h), _rows(h), _rows(y))
        return y
    gate, up = h.chunk(2, -1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """With s = sigmoid(a):  da = g b (s + silu(a) (1 - s)),  db = g silu(a)."""

    forward = staticmethod(_forward)

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        grad_h = torch.empty_like(h, memory_format=torch.contiguous_format)
        if ctx.by_kernel:
            from glissando.kernels.layers_numba import swiglu_backward

            over_rows(swiglu_backward, _tokens(h), _rows(h), _rows(grad), _rows(grad_h))
            return grad_h, None
        gate, up = h.chunk(2, -1)
        grad_gate, grad_up = grad_h.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad, gate)).mul_(up)
        return grad_h, None
