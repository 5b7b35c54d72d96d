"""SwiGLU: y = silu(a) * b for h = [a, b], silu(a) = a sigmoid(a). Shazeer 2020, arXiv 2002.05202, eq. 6."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.kernels.compiled import require_backend
from glissando.kernels.plain import resolved


def swiglu(h: Tensor, backend: Literal["auto", "reference"] = "auto") -> Tensor:
    """h (..., 2 F) -> (..., F). `auto` keeps only h for the backward and writes its gradient in one piece; where
    torch.compile looks on, which cannot write into a part of a tensor, it is the reference. Only `reference` has second
    derivatives.

    Raises ValueError for an odd width, UnknownNameError for a backend that there is not.
    """
    require_backend("swiglu", backend, ("auto", "reference"))
    backend = resolved(backend)
    if h.shape[-1] % 2:
        raise ValueError(f"swiglu: h holds two halves and needs an even last dimension, got {tuple(h.shape)}")
    if backend == "auto" and not torch.is_grad_enabled():
        return _forward(h)
    if backend == "reference" or torch.compiler.is_compiling():
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return _SwiGLU.apply(h)


def _forward(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """With s = sigmoid(a):  da = g b (s + silu(a) (1 - s)),  db = g silu(a)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _forward(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        gate, up = h.chunk(2, -1)
        grad_h = torch.empty_like(h, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad_h.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad, gate)).mul_(up)
        return grad_h
