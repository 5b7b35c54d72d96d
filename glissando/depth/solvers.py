"""Solvers of dH/dtau = F(tau, H, args) on a fixed grid over tau in [0, 1], with exact gradients three ways.

A step of an explicit Runge-Kutta scheme with s stages and tableau (A, b, c) adds

    Psi_d(tau, h) = d sum_i b_i k_i,    k_i = F(tau + c_i d, h + d sum_{j < i} a_ij k_j, args)

The gradients are those of the discrete scheme, not of the continuous equation: what training descends is the loss that
was computed.

    direct       autograd through the loop: every evaluation's intermediate results are kept
    checkpoint   one state a step is kept; a step is computed again in the backward pass
    reversible   the two ends are kept, whatever the number of steps: the scheme is coupled to itself,
                     y' = l y + (1 - l) z + Psi_d(tau, z),    z' = z - Psi_{-d}(tau + d, y'),    l = 0.99
                 which can be run backward; its forward result is another one, of the same order

Butcher 2016, Numerical Methods for Ordinary Differential Equations, 2.3; coupling: McCallum and Foster 2024,
arXiv 2410.11648, eq. 4 and 5.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from glissando.errors import ConfigError, unknown_name
from glissando.kernels.plain import plain, same_operations

#: field(tau, h, *args) -> dh/dtau, of h's shape
Field = Callable[..., Tensor]
Backward = Literal["direct", "checkpoint", "reversible"]

#: how strongly the reversible coupling ties its two halves; nearer 1 is nearer to free, smaller is more stable forward
COUPLING = 0.99

#: the share of a gradient that rounding may take before a warning
_WARNED = 0.01


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


def evaluations(method: str, n_steps: int, backward: str) -> int:
    """How often the field is evaluated on the way forward."""
    return TABLEAUS[method].stages * n_steps * (2 if backward == "reversible" else 1)


def integrate(
    field: Field,
    h: Tensor,
    *,
    args: Sequence[Tensor] = (),
    params: Sequence[Tensor] = (),
    n_steps: int,
    method: str = "euler",
    backward: Backward = "direct",
) -> Tensor:
    """h at tau = 1, from h at tau = 0.

    field    field(tau, h, *args), tau a float
    args     tensors that the field is given and that may require gradients: a control, a mask
    params   the weights that the field uses; `reversible` differentiates these and no others

    A field that draws random numbers must draw the same ones for the same evaluation, see glissando.depth.flow.

    Raises UnknownNameError for a method or backward, ConfigError for fewer than one step. Warns where `reversible`
    has so many steps for h's type that its gradients are off by a hundredth.
    """
    if method not in TABLEAUS:
        raise unknown_name("solver", method, TABLEAUS)
    if backward not in get_args(Backward):
        raise unknown_name("backward mode", backward, get_args(Backward))
    if n_steps < 1:
        raise ConfigError(f"n_steps must be at least 1, got {n_steps}")
    tableau, args, size = TABLEAUS[method], tuple(args), 1 / n_steps
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (h, *args, *params))
    if not needed or backward == "direct" or plain():
        return unroll(field, h, args=args, n_steps=n_steps, method=method, reversible=backward == "reversible")
    if backward == "reversible":
        _tell_rounding(n_steps, h.dtype)
        return _Reversible.apply(field, tableau, n_steps, len(args), h, *args, *params)
    for step in range(n_steps):
        here: Any = {"use_reentrant": False, "context_fn": same_operations}
        h = checkpoint(_advance, field, tableau, step * size, size, h, *args, **here)
    return h


def _tell_rounding(n_steps: int, dtype: torch.dtype) -> None:
    """Undoing a step divides by l, so that rounding grows as l^-n."""
    most = math.floor(math.log(torch.finfo(dtype).eps / _WARNED) / math.log(COUPLING))
    if n_steps > most:
        warnings.warn(
            f"backward `reversible` over {n_steps} steps in {str(dtype).removeprefix('torch.')}: rounding makes its "
            f"gradients wrong by 1 % and more beyond about {most}; take `checkpoint`, fewer steps or a finer type",
            RuntimeWarning,
            stacklevel=2,
        )


def unroll(
    field: Field,
    h: Tensor,
    *,
    args: Sequence[Tensor] = (),
    n_steps: int,
    method: str = "euler",
    reversible: bool = False,
) -> Tensor:
    """What `integrate` computes forward, as a plain loop; `reversible` for the coupled scheme.

    Evaluations come in the order of time, each once: a field may keep a state for each.
    """
    tableau, args, size = TABLEAUS[method], tuple(args), 1 / n_steps
    if reversible:
        return _couple(field, tableau, n_steps, h, args)[0]
    for step in range(n_steps):
        h = _advance(field, tableau, step * size, size, h, *args)
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


def _advance(field: Field, tableau: Tableau, tau: float, size: float, h: Tensor, *args: Tensor) -> Tensor:
    return h + increment(field, tableau, tau, size, h, *args)


def _couple(field: Field, tableau: Tableau, n_steps: int, h: Tensor, args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Both halves of the coupled scheme at tau = 1."""
    size, y, z = 1 / n_steps, h, h
    for step in range(n_steps):
        y, z = _couple_step(field, tableau, step * size, size, y, z, args)
    return y, z


def _couple_step(
    field: Field, tableau: Tableau, tau: float, size: float, y: Tensor, z: Tensor, args: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    y = COUPLING * y + (1 - COUPLING) * z + increment(field, tableau, tau, size, z, *args)
    return y, z - increment(field, tableau, tau + size, -size, y, *args)


class _Reversible(torch.autograd.Function):
    """Keeps the two ends; the backward pass runs the coupled scheme backward and differentiates each half step."""

    @staticmethod
    def forward(ctx: Any, field: Field, tableau: Tableau, n_steps: int, n_args: int, *tensors: Tensor) -> Tensor:
        h, args = tensors[0], tensors[1 : 1 + n_args]
        ctx.field, ctx.tableau, ctx.n_steps, ctx.n_args = field, tableau, n_steps, n_args
        ctx.arithmetic = _arithmetic(h.device.type)
        y, z = _couple(field, tableau, n_steps, h, args)
        ctx.save_for_backward(y, z, *tensors[1:])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        y, z, *given = ctx.saved_tensors
        args, params = given[: ctx.n_args], given[ctx.n_args :]
        gradients = _Gradients(ctx.field, ctx.tableau, args, params, ctx.arithmetic)
        size, grad_z = 1 / ctx.n_steps, torch.zeros_like(grad_y)
        for step in range(ctx.n_steps - 1, -1, -1):
            tau = step * size
            # z' = z - Psi_{-d}(tau + d, y'): undone, then its pull on y' and the weights.
            moved, pulled = gradients.of(tau + size, -size, y, -grad_z)
            z = z + moved
            grad_y = grad_y + pulled
            # y' = l y + (1 - l) z + Psi_d(tau, z)
            moved, pulled = gradients.of(tau, size, z, grad_y)
            y = (y - (1 - COUPLING) * z - moved) / COUPLING
            grad_z = grad_z + (1 - COUPLING) * grad_y + pulled
            grad_y = COUPLING * grad_y
        return None, None, None, None, grad_y + grad_z, *gradients.totals


def _arithmetic(device: str) -> Callable[[], AbstractContextManager]:
    """Autocast as it is here and now: the backward pass, which runs outside it, must evaluate what the forward did."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)


class _Gradients:
    """Sums, over half steps, of the gradients of the arguments and weights."""

    def __init__(
        self,
        field: Field,
        tableau: Tableau,
        args: Sequence[Tensor],
        params: Sequence[Tensor],
        arithmetic: Callable[[], AbstractContextManager],
    ) -> None:
        self.field, self.tableau, self.arithmetic = field, tableau, arithmetic
        self.args = [a.detach().requires_grad_(a.requires_grad) for a in args]
        self.needed = [t for t in (*self.args, *params) if t.requires_grad]
        self.sums: list[Tensor | None] = [None] * len(self.needed)
        self.order = [t.requires_grad for t in (*self.args, *params)]

    def of(self, tau: float, size: float, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Psi at h, and grad pulled back through it to h."""
        with torch.enable_grad(), self.arithmetic():
            h = h.detach().requires_grad_()
            moved = increment(self.field, self.tableau, tau, size, h, *self.args)
        if not moved.requires_grad:  # a field of constants
            return moved, torch.zeros_like(h)
        pulled, *others = torch.autograd.grad(moved, [h, *self.needed], grad, allow_unused=True)
        for i, other in enumerate(others):
            if other is not None:
                before = self.sums[i]
                self.sums[i] = other if before is None else before + other
        return moved.detach(), torch.zeros_like(h) if pulled is None else pulled

    @property
    def totals(self) -> list[Tensor | None]:
        """One for each argument and weight, None where none was needed or used."""
        sums = iter(self.sums)
        return [next(sums) if needed else None for needed in self.order]
