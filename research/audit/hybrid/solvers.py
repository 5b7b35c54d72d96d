"""Whether it matters how the flow of the Hybrid ODE Transformer is solved."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from research.audit.claim import Finding, Plan
from research.audit.hybrid.training import build, read_tokens, size_of, train
from research.published.hybrid_ode import ODEBlock, PublishedHybrid

SOLVERS = ("euler", "midpoint", "rk4", "dopri5")


def as_published(plan: Plan) -> Finding:
    """A new field, four steps by each method (dopri5: its own): the distance from a fine solution over |H(1)|."""
    gaps, moved, size = solver_gaps(build(plan, ode=True, seed=0), plan)
    share = {name: gap / size for name, gap in gaps.items()}
    said = f"a new model, distance over |H(1)|: {_shares(share)}; the flow itself moves {moved / size:.2%} of |H(1)|"
    checks = {"all within 1 % of |H(1)|": max(share.values()) < 0.01}
    return Finding(said, {"over_h": share, "moved_over_h": moved / size}, checks)


def corrected(plan: Plan) -> Finding:
    """The same over |H(1) - H(0)|, of a new field, a trained one and the run's; and whether dopri5 sees the future."""
    models = {"new": build(plan, ode=True, seed=0), "trained": train(plan, True, 0).model}
    shares: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        gaps, moved, _ = solver_gaps(model, plan)
        shares[name] = {solver: gap / moved for solver, gap in gaps.items()}
    if plan.run is not None:
        shares[f"run {plan.run}"] = _run_gaps(plan)
    leak = future_leak(models["trained"], plan)
    said = "distance over |H(1) - H(0)|: " + "; ".join(f"{name}: {_shares(share)}" for name, share in shares.items())
    said += (
        f"\nanother last token moves the first one's H(1) by {leak['dopri5']:.1e} of |H(1) - H(0)| under dopri5 "
        f"(rtol 1e-3), whose steps follow a norm over all tokens, and by {leak['rk4']:g} under rk4"
    )
    checks = {f"{name}: all within 1 %": max(share.values()) < 0.01 for name, share in shares.items()}
    checks["dopri5: no token depends on later ones"] = leak["dopri5"] == 0
    return Finding(said, {"over_way": shares, "leak": leak}, checks)


@torch.no_grad()
def solver_gaps(model: PublishedHybrid, plan: Plan) -> tuple[dict[str, float], float, float]:
    """|H_s(1) - H*(1)| for each solver s, with |H*(1) - H(0)| and |H*(1)|; H* by 64 steps of rk4, in float64."""
    x, block = flow_input(model, plan)
    fine = _solved(block, x, "rk4", 64)
    gaps = {name: float((_solved(block, x, name, 4) - fine).norm()) for name in SOLVERS}
    return gaps, float((fine - x).norm()), float(fine.norm())


@torch.no_grad()
def future_leak(model: PublishedHybrid, plan: Plan) -> dict[str, float]:
    """How far the first token's H(1) moves, over |H(1) - H(0)|, where the last token's H(0) is ten times as large."""
    x, block = flow_input(model, plan)
    changed = x.clone()
    changed[:, -1] *= 10
    leak = {}
    for name, options in (("dopri5", {"rtol": 1e-3, "atol": 1e-3}), ("rk4", {})):
        before, after = (_solved(block, given, name, 4, **options) for given in (x, changed))
        leak[name] = float((after - before)[:, 0].norm() / (before - x)[:, 0].norm())
    return leak


def flow_input(model: PublishedHybrid, plan: Plan) -> tuple[Tensor, ODEBlock]:
    """H(0) of two windows of the text, and the ODE block: in float64, without dropout."""
    model = copy.deepcopy(model).double().eval().cpu()
    ids = read_tokens(plan).held_out[: 2 * size_of(plan).length].view(2, -1)
    seen: list[Tensor] = []
    hook = model.flow.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids)
    hook.remove()
    model.flow.adjoint = False
    return seen[0], model.flow


def _solved(block: ODEBlock, x: Tensor, method: str, n_steps: int, **options: float) -> Tensor:
    kept, block.n_steps = block.n_steps, n_steps
    try:
        return block.solve(x, None, method, **options)
    finally:
        block.n_steps = kept


def _run_gaps(plan: Plan) -> dict[str, float]:
    """Those of a run of ours at four steps of each of its methods."""
    from glissando.depth.solvers import TABLEAUS
    from glissando.loading import load
    from research.flow_steps import Setting, distances, one_text, sample
    from research.runs import corpus_of

    assert plan.run is not None
    model = load(plan.run)
    row = one_text(sample(corpus_of(plan.run, model), 4096)[0])
    found = distances(model, [Setting(method, 4) for method in TABLEAUS], row)
    return {setting.method: gap for setting, gap in found.items()}


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1e}" for name, share in shares.items())
