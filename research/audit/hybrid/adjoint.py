"""Whether the adjoint's gradients of the Hybrid ODE Transformer are those of the model that is trained."""

from __future__ import annotations

import copy

import torch

from research.audit.claim import Finding, Plan
from research.audit.hybrid.costs import reversible_error
from research.audit.hybrid.training import build, gradient_of, read_tokens, size_of, train
from research.audit.training import losses
from research.published.hybrid_ode import PublishedHybrid

DROPOUT = (0.0, 0.1)  # without, and as published


def as_published(plan: Plan) -> Finding:
    """The error of the adjoint's gradients at four Euler steps, of a new model and after the published training."""
    models = {"new": build(plan, ode=True, seed=0), "trained": train(plan, True, 0).model}
    wrong = {which: {share: adjoint_error(model, plan, share) for share in DROPOUT} for which, model in models.items()}
    said = (
        "relative error of the adjoint's gradient of the ODE block against that of the four Euler steps, without and "
        "with dropout: " + "; ".join(f"{which} model {e[0.0]:.1%}, {e[0.1]:.1%}" for which, e in wrong.items())
    )
    figures = {which: {f"dropout {share:g}": error for share, error in by.items()} for which, by in wrong.items()}
    checks = {
        f"{'with' if share else 'without'} dropout: right within 1 %": max(by[share] for by in wrong.values()) < 0.01
        for share in DROPOUT
    }
    return Finding(said, figures, checks)


def corrected(plan: Plan) -> Finding:
    """The error of our reversible backward, which keeps no states either."""
    size = size_of(plan)
    error = reversible_error(size.width, size.length)
    said = (
        "the reversible backward, which solves the steps themselves the other way and keeps as little: relative error "
        f"{error:.0e} against autograd through the same four steps, in float32"
    )
    return Finding(said, {"relative_error": error}, {"right to rounding (1e-5)": error < 1e-5})


def adjoint_error(model: PublishedHybrid, plan: Plan, dropout: float) -> float:
    """|g' - g| / |g| of the ODE block's gradient at four steps: g of the Euler steps, g' by the adjoint equation.

    Both passes forward draw the same dropout; the adjoint's way back draws another.
    """
    model, size, tokens = copy.deepcopy(model).train(), size_of(plan), read_tokens(plan)
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = dropout  # type: ignore[assignment]
    windows = tokens.train[: 4 * (size.length + 1)].view(4, -1).to(model.head.weight.device)
    gradients = []
    for model.flow.adjoint in (True, False):
        model.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            losses(model, windows).mean().backward()
        gradients.append(gradient_of(model.flow))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
