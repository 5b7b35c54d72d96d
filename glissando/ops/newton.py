"""Nonlinear recurrences x_t = F_t(x_{t-1}) solved for all t at once, by Newton's method.

With a guess x for the whole sequence, each iteration linearises every step and solves what comes out with one scan:

    x_t <- F_t(x_{t-1}) + J_t (x'_{t-1} - x_{t-1}),     J_t = dF_t / dx_{t-1} at the guess,    x' the new sequence

Channels do not couple, so that J_t is a number or a 2 x 2 block for each. The first iterate, from a guess of zeros, is
the linear recurrence without the dependence on the state. k iterations are exact for the first k steps, so that T are
always enough; a contraction takes few. Gradients need no unrolling: at the solution they are one reversed scan,

    s_t = g_t + J'_{t+1} s_{t+1},     dx0 = J'_1 s_1,     and the others by one vector-Jacobian product of F with s.

Lim et al. 2024 (DEER), arXiv 2309.12252; Gonzalez et al. 2024 (damping, quasi-Newton), arXiv 2407.19115.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glissando.ops.block_scan import adjoint, block_scan
from glissando.ops.compiled import require_types
from glissando.ops.scan import scan

#: F: (x_{t-1} (B, T, N, K), *inputs (B, T, ...), *weights) -> x_t (B, T, N, K), position by position
Step = Callable[..., Tensor]

#: the same arguments -> F and its Jacobian dF / dx_{t-1} (B, T, N, K, K)
Linearise = Callable[..., tuple[Tensor, Tensor]]

#: largest change of an iterate, relative to the largest entry of its row (at least 1), that counts as converged
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


@dataclass
class Report:
    """What it took, row by row (B,).

    iterations  Newton iterations until the row converged
    residual    max |x_t - F_t(x_{t-1})| there, relative as the tolerance is
    sequential  rows that did not converge and were computed one step after the other
    """

    iterations: Tensor
    residual: Tensor
    sequential: Tensor


def solve(
    step: Step,
    x0: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] = (),
    *,
    linearise: Linearise | None = None,
    tolerance: float | None = None,
    max_iterations: int = 50,
) -> tuple[Tensor, Report]:
    """x_t = step(x_{t-1}, inputs at t, weights) for t = 1..T -> x (B, T, N, K) and a Report.

    step     computes each position, row and channel on its own: nothing but x_{t-1} may carry from one to another
    x0       (B, N, K), K = 1 or 2: channels of one number, or of two that depend on each other
    inputs   tensors (B, T, ...);  weights  tensors of any shape. Both get gradients, as x0 does; what `step` uses
             besides gets none.
    linearise  F and its Jacobian, where they are known in closed form; by automatic differentiation if None

    A row whose change falls below the tolerance is frozen, and computed no more: rows know nothing of each other. Where
    a row's change grows, its Jacobian is damped by a half, which leaves the solution where it is. A row that has not
    converged after `max_iterations` is computed one step after the other, with a warning.

    Raises ValueError for shapes that do not fit, or an x0 that is neither float32 nor float64.
    """
    if x0.ndim != 3 or x0.shape[2] not in (1, 2):
        raise ValueError(f"newton: x0 must be (batch, channels, 1 or 2), got {tuple(x0.shape)}")
    if not inputs or any(i.shape[:2] != inputs[0].shape[:2] or len(i) != len(x0) for i in inputs):
        shapes = ", ".join(str(tuple(i.shape)) for i in inputs)
        raise ValueError(
            f"newton: inputs must be (batch {len(x0)}, time, ...) with one length, got: {shapes or 'none'}"
        )
    if not inputs[0].shape[1]:
        raise ValueError(f"newton: at least one step is needed, got inputs of shape {tuple(inputs[0].shape)}")
    require_types("newton", x0=x0)
    tolerance = TOLERANCE[x0.dtype] if tolerance is None else tolerance
    report: list[Report] = []
    jacobian = by_differentiation(step) if linearise is None else linearise
    x = _Solve.apply(step, jacobian, tolerance, max_iterations, report, len(inputs), x0, *inputs, *weights)
    _warn_of_slowness(report[0], x, max_iterations)
    return x, report[0]


def _warn_of_slowness(report: Report, x: Tensor, limit: int) -> None:
    if not bool(report.sequential.any()):
        return
    finite = bool(x.isfinite().all())
    why = (
        "The step may not be a contraction: lower the learning rate or the adaptation"
        if finite
        else "What they were given, or what it makes of it, is not finite"
    )
    warnings.warn(
        f"newton: {int(report.sequential.sum())} of {len(report.sequential)} sequences had not converged after {limit} "
        f"iterations and were computed one step after the other, which is exact and slow. {why}.",
        RuntimeWarning,
        stacklevel=3,
    )


def sequential(step: Step, x0: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> Tensor:
    """The definition, one step after the other, under autograd."""
    x, steps = x0.unsqueeze(1), []
    for given in zip(*(i.split(1, 1) for i in inputs), strict=True):
        x = step(x, *given, *weights)
        steps.append(x)
    return torch.cat(steps, 1)


class _Solve(torch.autograd.Function):
    """See the module's docstring for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        linearise: Linearise,
        tolerance: float,
        limit: int,
        report: list,
        n: int,
        x0: Tensor,
        *rest: Tensor,
    ) -> Tensor:
        inputs, weights = rest[:n], rest[n:]
        x, found = _iterate(step, linearise, x0, inputs, weights, tolerance, limit)
        report.append(found)
        ctx.step, ctx.linearise, ctx.n = step, linearise, n
        ctx.save_for_backward(x, x0, *rest)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, x0, *rest = ctx.saved_tensors
        inputs, weights = rest[: ctx.n], rest[ctx.n :]
        past = _shift(x, x0)
        jacobian = ctx.linearise(past, *inputs, *weights)[1]
        carried, first = _adjoint(jacobian, grad)
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[7:]) if needs]
        found: list[Tensor | None] = [None] * len(rest)
        if needed:
            with torch.enable_grad():
                given = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(rest)]
                out = ctx.step(past, *given)
            grads = torch.autograd.grad(out, [given[i] for i in needed], carried, allow_unused=True)
            for i, value in zip(needed, grads, strict=True):
                found[i] = value
        return None, None, None, None, None, None, first, *found


def _iterate(
    step: Step,
    linearise: Linearise,
    x0: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    tolerance: float,
    limit: int,
) -> tuple[Tensor, Report]:
    batch, length = inputs[0].shape[:2]
    x = x0.new_zeros(batch, length, *x0.shape[1:])
    iterations = torch.zeros(batch, dtype=torch.int64, device=x0.device)
    before, damping = (x0.new_full((batch,), value) for value in (float("inf"), 1.0))
    active = torch.arange(batch, device=x0.device)
    for _ in range(limit):
        new = _newton(linearise, x[active], x0[active], [i[active] for i in inputs], weights, damping[active])
        change = _relative(new - x[active], new)
        iterations[active] += 1
        # A row that leaves the finite numbers starts again, more damped.
        finite = change.isfinite()
        x[active] = torch.where(finite.view(-1, 1, 1, 1), new, 0.0)
        grew = ~(change <= before[active])
        damping[active] = torch.where(grew, damping[active] / 2, (2 * damping[active]).clamp_max(1.0))
        before[active] = torch.where(finite, change, torch.inf)
        active = active[~(change <= tolerance)]
        if not len(active):
            break
    is_sequential = torch.zeros(batch, dtype=torch.bool, device=x0.device)
    if len(active):
        is_sequential[active] = True
        x[active] = sequential(step, x0[active], [i[active] for i in inputs], weights)
    residual = _relative(step(_shift(x, x0), *inputs, *weights) - x, x)
    return x, Report(iterations, residual, is_sequential)


def _newton(
    linearise: Linearise, x: Tensor, x0: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], damping: Tensor
) -> Tensor:
    past = _shift(x, x0)
    value, jacobian = linearise(past, *inputs, *weights)
    if bool((damping < 1).any()):
        jacobian = jacobian * damping.view(-1, 1, 1, 1, 1)
    rest = value - (jacobian * past.unsqueeze(-2)).sum(-1)
    if x.shape[-1] == 1:
        return scan(jacobian[..., 0], rest, x0)[0]
    return block_scan(jacobian, rest, x0)[0]


def _adjoint(jacobian: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if grad.shape[-1] == 2:
        return adjoint(jacobian, grad)
    factors = torch.cat([torch.zeros_like(grad[:, :1]), jacobian[:, 1:, ..., 0].flip(1)], 1)
    carried = scan(factors, grad.flip(1))[0].flip(1)
    return carried, jacobian[:, 0, ..., 0] * carried[:, 0]


def by_differentiation(step: Step) -> Linearise:
    """Positions and channels are apart, so that the gradient of a sum over all has the rows of every Jacobian."""

    def linearise(past: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            # Autograd cannot keep what inference mode has made, but a copy of it.
            past, *given = (x.clone() if x.is_inference() else x.detach() for x in (past, *given))  # type: ignore[assignment]
            past.requires_grad_()
            value = step(past, *given)
            sums = [value[..., k].sum() for k in range(past.shape[-1])]
            rows = [torch.autograd.grad(total, past, retain_graph=True)[0] for total in sums]
        return value.detach(), torch.stack(rows, -2)

    return linearise


def _shift(x: Tensor, x0: Tensor) -> Tensor:
    """x_{t-1} for each t."""
    return torch.cat([x0.unsqueeze(1), x[:, :-1]], 1)


def _relative(difference: Tensor, x: Tensor) -> Tensor:
    """(B,) largest |difference| beside the largest |x| of the row, at least 1."""
    return difference.flatten(1).abs().amax(1) / x.flatten(1).abs().amax(1).clamp_min(1.0)
