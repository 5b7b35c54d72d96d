"""Root-mean-square normalisation: y = w * x / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019, arXiv 1910.07467."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.kernels.compiled import (
    as_rows,
    in_batches,
    over_rows,
    require_backend,
    require_shapes,
    require_types,
    same_reals,
    use_numba,
)
from glissando.kernels.plain import resolved, without_derivatives

#: numbers from which a kernel pays without gradients
_LARGE = 1 << 13


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, backend: Literal["auto", "reference", "numba"] = "auto"
) -> Tensor:
    """x (..., D), weight (D,) -> (..., D) in the type of x; computed at least in float32, and rounded once.

    reference  the plain formula under autograd
    numba      one pass over memory forward and one backward, for float32 and float64 on a CPU
    auto       the kernel where it can run and pays, `reference` elsewhere

    Only `reference` has second derivatives. Raises ValueError for shapes that do not fit, or types that the kernel
    given does not take; UnknownNameError for an unknown backend.
    """
    require_backend("rms_norm", backend, ("auto", "numba", "reference"))
    backend = resolved(backend)
    require_shapes("rms_norm", weight=(weight, x.shape[-1:]))
    if use_numba("rms_norm", backend, x) and (backend == "numba" or _pays(x, weight)):
        require_types("rms_norm", x=x, weight=weight)
        run = _Kernel.apply if torch.is_grad_enabled() else partial(_in_one_pass, None)
        if torch.compiler.is_compiling():  # it cannot trace the kernel
            run = torch.compiler.disable(run)
        return run(x, weight, eps)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Where the kernel can run and its call is not what costs: a decoded token's 16 microseconds would be 17."""
    return (torch.is_grad_enabled() or x.numel() >= _LARGE) and same_reals(x, weight)


def _in_one_pass(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y; a context keeps what gradients need: 1 / sqrt(mean x^2 + eps) of each row beside x and the weight."""
    from glissando.kernels.layers_numba import rms_norm_forward

    rows, y = in_batches(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = rows.new_empty(rows.shape[:2])
    if ctx is not None:
        ctx.save_for_backward(x, scale, weight)
    over_rows(rms_norm_forward, rows, as_rows(rows, 2), as_rows(weight, 0), eps, in_batches(y).numpy(), scale.numpy())
    return y


class _Kernel(torch.autograd.Function):
    """With n = x r, r = 1/sqrt(mean x^2 + eps):  dx = r (g w - n mean(g w n)),  dw = sum g n."""

    forward = staticmethod(_in_one_pass)

    @staticmethod
    @without_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from glissando.kernels.layers_numba import rms_norm_backward

        x, scale, weight = ctx.saved_tensors
        rows, grad_x = in_batches(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        sums = torch.zeros(len(rows), weight.numel(), dtype=torch.float64)
        arrays = as_rows(rows, 2), as_rows(weight, 0), scale.numpy(), as_rows(in_batches(grad), 2)
        over_rows(rms_norm_backward, rows, *arrays, in_batches(grad_x).numpy(), sums.numpy())
        return grad_x, sums.sum(0).to(weight.dtype), None
