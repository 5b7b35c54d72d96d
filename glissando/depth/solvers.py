"""Solvers of dH/dtau = F(tau, H, args) on a fixed grid over tau in [0, 1].

A step of an explicit Runge-Kutta scheme with s stages and tableau (A, b, c) adds

    Psi_d(tau, h) = d sum_i b_i k_i,    k_i = F(tau + c_i d, h + d sum_{j < i} a_ij k_j, args)

The gradients are those of the discrete scheme, not of the continuous equation: what training descends is the loss that
was computed.

Butcher 2016, Numerical Methods for Ordinary Differential Equations, 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glissando.errors import ConfigError, UnknownNameError, unknown_name
from glissando.kernels.plain import plain, same_operations

#: field(tau, h, *args) -> dh/dtau, of h's shape
Field = Callable[..., Tensor]


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta scheme: a (strictly lower triangular rows), b, and its order; c are the row sums of a.

    Raises ValueError for coefficients that are not those of a consistent explicit scheme.
    """

    order: int
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    def __post_init__(self) -> None:
        if [len(row) for row in self.a] != list(range(len(self.b))):
            raise ValueError(f"row i of an explicit tableau has i entries, {len(self.b)} rows in all; got {self.a}")
        if not math.isclose(sum(self.b), 1.0, abs_tol=1e-14):
            raise ValueError(f"the weights of a consistent scheme add up to 1, these to {sum(self.b)}")

    @property
    def c(self) -> tuple[float, ...]:
        return tuple(sum(row) for row in self.a)

    @property
    def stages(self) -> int:
        return len(self.b)


TABLEAUS: dict[str, Tableau] = {
    "euler": Tableau(1, ((),), (1.0,)),
    "midpoint": Tableau(2, ((), (0.5,)), (0.0, 1.0)),
    "heun": Tableau(2, ((), (1.0,)), (0.5, 0.5)),
    "rk4": Tableau(4, ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


def tableau_of(method: str) -> Tableau:
    """The coefficients of a solver of fixed steps.

    Raises UnknownNameError for another name. An adaptive solver, such as dopri5, chooses its steps by an error over all
    tokens, so that a later token would change what is computed for an earlier one.
    """
    if method not in TABLEAUS:
        error = unknown_name("depth.method", method, TABLEAUS)
        raise UnknownNameError(
            f"{error} A solver that adapts its steps, such as dopri5, follows an error over all tokens, and a later "
            "token would change an earlier one; rk4 with more depth.n_steps is as exact"
        )
    return TABLEAUS[method]


def evaluations(method: str, n_steps: int) -> int:
    """How often the field is evaluated on the way forward."""
    return TABLEAUS[method].stages * n_steps


def integrate(
    field: Field,
    h: Tensor,
    *,
    args: Sequence[Tensor] = (),
    n_steps: int,
    method: str = "euler",
    checkpointed: bool = False,
) -> Tensor:
    """h at tau = 1, from h at tau = 0.

    field         field(tau, h, *args), tau a float, in the order of time
    args          tensors that the field is given and that may require gradients: a control, dt
    checkpointed  one state a step is kept, and a step is computed again in the backward pass, with the same dropout

    Raises UnknownNameError for a method, ConfigError for fewer than one step.
    """
    if n_steps < 1:
        raise ConfigError(f"n_steps must be at least 1, got {n_steps}")
    tableau, size = tableau_of(method), 1 / n_steps
    again = checkpointed and torch.is_grad_enabled() and not plain()
    for step in range(n_steps):
        inputs: Any = field, tableau, step * size, size, h, *args
        if again:
            h = h + checkpoint(increment, *inputs, use_reentrant=False, context_fn=same_operations)
        else:
            h = h + increment(*inputs)
    return h


def increment(field: Field, tableau: Tableau, tau: float, size: float, h: Tensor, *args: Tensor) -> Tensor:
    """Psi_size(tau, h): what one step adds. A negative size steps backward."""
    slopes: list[Tensor] = []
    for row, share in zip(tableau.a, tableau.c, strict=True):
        slopes.append(field(tau + share * size, moved(h, row, slopes, size), *args))
    return weighted(tableau.b, slopes, size)


def moved(h: Tensor, weights: Sequence[float], slopes: Sequence[Tensor], size: float) -> Tensor:
    """h + size sum_j w_j k_j."""
    for weight, slope in zip(weights, slopes, strict=True):
        h = h if weight == 0 else torch.add(h, slope, alpha=size * weight)
    return h


def weighted(weights: Sequence[float], slopes: Sequence[Tensor], size: float) -> Tensor:
    """size sum_j w_j k_j."""
    (first, slope), *others = [pair for pair in zip(weights, slopes, strict=True) if pair[0] != 0]
    return moved(slope * (size * first), [weight for weight, _ in others], [k for _, k in others], size)
