"""What is said of the flow: that alpha bounds its Jacobian, that reused weights save time, and its neutral setting."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from research.audit.claim import Finding, Plan
from research.audit.hybrid.costs import latency_of
from research.audit.hybrid.solvers import flow_input
from research.audit.hybrid.steering import NEEDS_RUN, sweeps
from research.audit.hybrid.training import PROMPT, build, size_of, steer_on_prompt, train
from research.audit.training import seeded
from research.intervals import Median, median_of
from research.published.hybrid_ode import Layer, PublishedHybrid

#: alpha times the step, as published
BOUND = 0.025
_ITERATIONS = 24


def jacobian_as_published(plan: Plan) -> Finding:
    """The norm of an Euler step's Jacobian less one, dt alpha J_F, of a new model."""
    norm, alpha = _step_norm(build(plan, ode=True, seed=0), plan)
    said = (
        f"a new model, alpha {alpha:.3f}, four steps: the Jacobian of a step is away from 1 by {norm:.3f} in the "
        f"2-norm, so that |J_F| = {4 * norm / alpha:.2f} where alpha dt = {alpha / 4:g} alone requires at most 1"
    )
    return Finding(said, {"norm": norm, "alpha": alpha}, {f"within {BOUND}": norm <= BOUND})


def jacobian_corrected(plan: Plan) -> Finding:
    """The same of a trained model, whose alpha is learned, and where what enters is a tenth as large."""
    model = train(plan, True, 0).model
    norm, alpha = _step_norm(model, plan)
    small, _ = _step_norm(model, plan, scale=0.1)
    bound = alpha / 4
    said = (
        f"after {size_of(plan).steps} steps, alpha {alpha:.3f}: away from 1 by {norm:.3f}, and by {small:.3f} where H "
        f"is a tenth as large; alpha dt is {bound:.3f}. It is a bound only where |J_F| is at most 1, and alpha does "
        "not determine that: weights are free, and the norms of attention and MLP divide by the size of H"
    )
    checks = {"trained: within alpha dt": norm <= bound, "trained, a smaller H: within alpha dt": small <= bound}
    return Finding(said, {"norm": norm, "norm_at_a_tenth": small, "alpha": alpha}, checks)


def _step_norm(model: PublishedHybrid, plan: Plan, scale: float = 1.0) -> tuple[float, float]:
    """|dt alpha J_F| at H(0) of a window, by power iterations with its transpose; alpha."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given, block = flow_input(model, plan)
    h = (scale * given[:1]).requires_grad_()
    alpha = block.field.alpha.item()
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():  # of the fused kernels none has a second derivative
        step = block.field(torch.zeros((), dtype=h.dtype), h) / 4
        dummy = torch.zeros_like(step, requires_grad=True)
        (back,) = torch.autograd.grad(step, h, dummy, create_graph=True)
        v = torch.randn(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(0))
        size = 0.0
        for _ in range(_ITERATIONS):
            (forward,) = torch.autograd.grad(back, dummy, v / v.norm(), retain_graph=True)
            size = float(forward.norm())
            (v,) = torch.autograd.grad(step, h, forward, retain_graph=True)
    return size, alpha


# ---------------------------------------------------------------------- locality


def locality_as_published(plan: Plan) -> Finding:
    """The latency measured, against the theory of the publication, which counts no head."""
    found = latency_of(plan, head=True)
    said = f"{found.ratio} measured with the head, below the 1.33 of eight layers over six, which count no head"
    return Finding(said, found._asdict(), {"less than 1.33x": found.ratio.between(0, 4 / 3)})


def locality_corrected(plan: Plan) -> Finding:
    """Against the multiplications of the very call; and one layer eight times against eight layers, by themselves."""
    found, share = latency_of(plan, head=True), _one_or_eight(plan)
    said = (
        f"{found.ratio} measured, of {found.counted:.3f}x the multiplications, the head among them; one layer applied "
        f"eight times takes {share} the time of eight layers"
    )
    checks = {
        "the hybrid is faster than its multiplications predict, by 3 %": found.ratio.between(0, 0.97 * found.counted),
        "one layer eight times is faster than eight layers, by 3 %": share.between(0, 0.97),
    }
    return Finding(said, {**found._asdict(), "one_over_eight": share}, checks)


@lru_cache(maxsize=2)
def _one_or_eight(plan: Plan) -> Median:
    """The time of one layer eight times over that of eight layers."""
    from benchmarks.flow import seconds
    from benchmarks.speed import in_turn

    size = size_of(plan)
    layers = seeded(0, lambda: nn.ModuleList(Layer(size.width, size.heads, 0.0) for _ in range(8)).eval())
    x = torch.randn(size.batch // 4, size.length, size.width, generator=torch.Generator().manual_seed(0))

    one, eight = nn.Sequential(*[layers[0]] * 8), nn.Sequential(*layers)
    pairs = in_turn(lambda: seconds(lambda: one(x)), lambda: seconds(lambda: eight(x)), 2 if plan.quick else 31)
    return median_of([shared / own for shared, own in pairs])


# ---------------------------------------------------------------------- neutral

NEUTRAL = 0.914
#: a mean judged label, from -1 to 1, of which three texts in four lean one way
MOSTLY = 0.5


def neutral_as_published(plan: Plan) -> Finding:
    """P(good) and P(bad) after the one prompt at u = 0 and without a control, models of several seeds."""
    models = [steer_on_prompt(plan, seed) for seed in plan.each_seed]
    rest = [model.probabilities([0.0, None]).tolist() for model in models]
    summary = "; ".join(
        f"seed {seed}: {zero[0]:.1%} good, {zero[1]:.1%} bad at u = 0, {none[0]:.1%} and {none[1]:.1%} without"
        for seed, (zero, none) in enumerate(rest)
    )
    said = f"after {PROMPT!r}, {summary}; no step of training has shown the model a neutral control"
    checks = {
        f"good within 10 points of {NEUTRAL:.1%} at u = 0, every seed": all(
            abs(z[0] - NEUTRAL) <= 0.1 for z, _ in rest
        ),
        "u = 0 is what the absence of a control is (5 points)": all(abs(z[0] - n[0]) <= 0.05 for z, n in rest),
    }
    return Finding(said, {"rest": rest}, checks)


def neutral_corrected(plan: Plan) -> Finding:
    """A run whose training shows it u = 0: what its dials do at u = 0, and what that costs."""
    if plan.run is None:
        return Finding("not measured", needs=NEEDS_RUN.replace("NAME", "hybrid-neutral"))
    summary, checks, figures = [], {}, []
    for swept in sweeps(plan, (-1.0, 0.0, 1.0)):
        f = swept.as_dict()
        at = f["u"].index(0.0)
        lean, cost = f["mean_label"][at], f["perplexity_against_uncontrolled"][at]
        summary.append(
            f"{f['dial']}: mean judged label {lean:+.2f} at u = 0, perplexity {cost:.4f} of that without a control"
        )
        checks[f"{f['dial']}: perplexity at u = 0 within 1 % of that without a control"] = abs(cost - 1) <= 0.01
        checks[f"{f['dial']}: mostly as at u = 1"] = lean > MOSTLY
        figures.append(f)
    return Finding("; ".join(summary), {"dials": figures}, checks)
