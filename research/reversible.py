"""The flow's gradients from its two ends alone, whatever the number of steps: the scheme is coupled to itself,

    y' = l y + (1 - l) z + Psi_d(tau, z),    z' = z - Psi_{-d}(tau + d, y'),    l = 0.99

which can be run backward; its forward result is another one, of the same order. The package's flow keeps one state a
step at least (training.gradient_checkpointing), which is small for the few steps that help: this shows that the
constant memory which the publication claims can be had with exact gradients.

Coupling: McCallum and Foster 2024, arXiv 2410.11648, eq. 4 and 5.
"""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.depth.flow import FlowDepth, FlowField
from glissando.depth.solvers import TABLEAUS, Field, Tableau, increment

#: how strongly the coupling ties its two halves; nearer 1 is nearer to free, smaller is more stable forward
COUPLING = 0.99

#: the share of a gradient that rounding may take before a warning
_WARNED = 0.01


class ReversibleFlow(FlowDepth):
    """A flow whose steps are those of the coupled scheme, without states; `unrolled`: by autograd through its steps."""

    unrolled = False

    def solve(self, field: FlowField, h: Tensor, args: tuple[Tensor, ...]) -> Tensor:
        own = [*self.field.parameters(), *self.time.parameters(), self.alpha]
        own += [] if self.control is None else [*self.control.parameters()]
        options: dict[str, Any] = {"n_steps": self.n_steps, "method": self.config.method, "unrolled": self.unrolled}
        return integrate(Seeded(field, self.training), h, args=args, params=own, **options)


class Seeded:
    """A field whose dropout depends on a seed of the call and on tau alone, so that computing again draws the same."""

    def __init__(self, field: FlowField, drops: bool) -> None:
        self.field, self.seed = field, int(torch.randint(1 << 62, ())) if drops else None

    def __call__(self, tau: float, h: Tensor, *args: Tensor) -> Tensor:
        if self.seed is None:
            return self.field(tau, h, *args)
        with seeded(self.seed, tau, h.device):
            return self.field(tau, h, *args)


@contextmanager
def seeded(seed: int, tau: float, device: torch.device) -> Iterator[None]:
    # A hash, because the CPU's generator reads the low 32 bits of a seed alone, which are 0 in most tau.
    mixed = hashlib.blake2b(struct.pack("<qd", seed, tau), digest_size=7).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(mixed, "little"))
        yield


def integrate(
    field: Field,
    h: Tensor,
    *,
    args: Sequence[Tensor] = (),
    params: Sequence[Tensor] = (),
    n_steps: int,
    method: str = "euler",
    unrolled: bool = False,
) -> Tensor:
    """y at tau = 1, from y = z = h at tau = 0; `params`, the weights that the field uses, and no others get gradients.

    Warns where there are so many steps for h's type that gradients are off by a hundredth.
    """
    tableau = TABLEAUS[method]
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (h, *args, *params))
    if unrolled or not needed:
        return _couple(field, tableau, n_steps, h, tuple(args))[0]
    _tell_rounding(n_steps, h.dtype)
    return _Reversible.apply(field, tableau, n_steps, len(args), h, *args, *params)


def _tell_rounding(n_steps: int, dtype: torch.dtype) -> None:
    """Undoing a step divides by l, so that rounding grows as l^-n."""
    most = math.floor(math.log(torch.finfo(dtype).eps / _WARNED) / math.log(COUPLING))
    if n_steps > most:
        warnings.warn(
            f"{n_steps} reversible steps in {str(dtype).removeprefix('torch.')}: rounding makes their gradients wrong "
            f"by 1 % and more beyond about {most}; take fewer steps or a finer type",
            RuntimeWarning,
            stacklevel=2,
        )


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
