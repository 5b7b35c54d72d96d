"""Energy of vectors on a graph over their entries, the Rayleigh quotient: E = x'Lx / (x'x + eps), L = Deg - A.

In edges, x'Lx = sum over {i, j} of w_ij (x_i - x_j)^2, so E is 0 for a constant vector and at most the largest
eigenvalue of L. Both forms take statistics at least in float32, also under autocast, and return them so: what is made
of an energy (lambda = E / (E + tau)) distinguishes near ones. x = 0 has E = 0 and gradient 0.

Source: Chung 1997, Spectral Graph Theory, section 1.2.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.errors import ConfigError
from glissando.ops.compiled import over_rows, require_types, same_reals, use_numba
from glissando.precision import exact, without_autocast


def energy(x: Tensor, laplacian: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., K), laplacian (K, K), or (K,) a diagonal -> (...); differentiable in both.

    Rounding may take the energy of a nearly constant vector slightly below 0.
    """
    x = exact(x)
    laplacian = laplacian.to(x.dtype)
    if laplacian.ndim == 1:
        return (x * laplacian * x).sum(-1) / (x.square().sum(-1) + eps)
    with without_autocast(x.device.type):
        smoothed = x @ laplacian
    return (smoothed * x).sum(-1) / (x.square().sum(-1) + eps)


def edges_pay(x: Tensor, laplacian: Tensor) -> bool:
    """Whether `energy_edges` is faster than `energy` for x (..., K): on a CPU, for 4,096 vectors or more, where at most
    a quarter of the entries of L are not 0. Measured in docs/tauformer.md.
    """
    if not use_numba("energy_edges", "auto", x) or x.numel() < 4096 * x.shape[-1]:
        return False
    return bool(4 * laplacian.count_nonzero() <= laplacian.numel())


def energy_edges(
    x: Tensor,
    edges: Tensor,
    weights: Tensor,
    eps: float = 1e-6,
    backend: Literal["auto", "reference", "numba"] = "auto",
) -> Tensor:
    """x (..., K), edges (2, E) int64, each once, weights (E,) -> (...); differentiable in x and weights.

    reference  holds E numbers a vector
    numba      one pass over memory forward and one backward, on a CPU, for weights that take no gradient
    auto       the kernel where it can run

    Never below 0 where no weight is. There is no K x K matrix, so memory is linear in the edges. Only `reference` has
    second derivatives. Raises ConfigError for `numba` elsewhere than on a CPU or with weights that take a gradient.
    """
    x = exact(x)
    weights = weights.to(x.dtype)
    if use_numba("energy_edges", backend, x):
        learned = weights.requires_grad and torch.is_grad_enabled()
        if backend == "numba" and learned:
            raise ConfigError(
                "energy_edges: backend 'numba' gives weights no gradient; use 'auto', or weights.detach()"
            )
        if not learned and (backend == "numba" or same_reals(x, weights)):
            require_types("energy_edges", x=x, weights=weights)
            return _Kernel.apply(x.contiguous(), edges, weights, eps)
    differences = x.index_select(-1, edges[0]) - x.index_select(-1, edges[1])
    with without_autocast(x.device.type):
        rise = differences.square() @ weights
    return rise / (x.square().sum(-1) + eps)


class _Kernel(torch.autograd.Function):
    """dx = 2 (Lx - E x) / (x'x + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: Tensor, weights: Tensor, eps: float) -> Tensor:
        from glissando.ops.energy_numba import forward

        rows = x.detach().reshape(-1, x.shape[-1])
        y = rows.new_empty(len(rows))
        ctx.graph, ctx.cost = (*edges.numpy(), weights.detach().numpy(), eps), 1 + len(weights) // x.shape[-1]
        over_rows(forward, rows, rows.numpy(), *ctx.graph, y.numpy(), cost=ctx.cost)
        ctx.save_for_backward(rows, y)
        return y.view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        from glissando.ops.energy_numba import backward

        rows, y = ctx.saved_tensors
        grad_x = torch.empty_like(rows)
        given = rows.numpy(), *ctx.graph, y.numpy(), grad.reshape(-1).numpy()
        over_rows(backward, rows, *given, grad_x.numpy(), cost=ctx.cost)
        return grad_x.view(*grad.shape, rows.shape[-1]), None, None, None
