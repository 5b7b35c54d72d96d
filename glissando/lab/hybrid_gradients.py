"""Experiment 1 of the Hybrid ODE Transformer: loss and gradient norms of the hybrid and its baseline in training."""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path

import numpy as np
import torch

from glissando.lab.claim import Finding, Plan
from glissando.lab.hybrid_training import (
    CLIP,
    Trained,
    build,
    clip,
    gradient_of,
    next_token_loss,
    norm_of,
    read_tokens,
    size_of,
    train,
)
from glissando.lab.published.hybrid_ode import PublishedHybrid

EXPLODING = 100.0  # a norm above it, measured after clipping to 1
KINDS = {"hybrid": True, "baseline": False}


def as_published(plan: Plan) -> Finding:
    """Training loss and norms after clipping, the mean of the last 50 steps; steps above EXPLODING."""
    tokens, runs = read_tokens(plan), {kind: train(plan, ode, 0) for kind, ode in KINDS.items()}
    last = min(50, max(1, size_of(plan).steps // 2))
    loss = {kind: statistics.fmean(run.losses[-last:]) for kind, run in runs.items()}
    norm = {kind: _mean_sd(run.after[-last:]) for kind, run in runs.items()}
    hybrid = runs["hybrid"]
    shares = [after / before for after, before in zip(hybrid.after, hybrid.before, strict=True)]
    ode = _mean_sd([n * s for n, s in zip(hybrid.parts["ODE block"], shares, strict=True)][-last:])
    flagged = {kind: sum(norm > EXPLODING for norm in run.after) for kind, run in runs.items()}
    blown = _blown_up(plan, 1e6)
    largest = max(hybrid.before), max(hybrid.after)
    said = (
        f"{tokens.source}; {size_of(plan).steps} steps, mean of the last {last}: loss {loss['hybrid']:.3f} against "
        f"{loss['baseline']:.3f} nats a token; norm after clipping {_pm(norm['hybrid'])} against "
        f"{_pm(norm['baseline'])}; ODE block {_pm(ode)}\n"
        f"steps with a norm above {EXPLODING:g} after clipping to {CLIP:g}: {flagged['hybrid']} and "
        f"{flagged['baseline']}. None could be: the largest norm of the hybrid is {largest[0]:.3g} before clipping and "
        f"{largest[1]:.3g} after, that of a gradient a million times too large {blown[0]:.3g} and {blown[1]:.3g}"
    )
    checks = {
        "the hybrid's training loss is at most the baseline's": loss["hybrid"] <= loss["baseline"],
        "no step explodes by the test": not any(flagged.values()),
        "the test would find one": blown[1] > EXPLODING,
    }
    figures = {
        "text": tokens.source, "steps": size_of(plan).steps, "averaged": last, "loss": loss, "norm_after": norm,
        "ode_block_after": ode, "flagged": flagged, "largest_before_after": largest, "blown_up_before_after": blown,
    }  # fmt: skip
    return Finding(said, figures, checks, tokens.needs)


def _blown_up(plan: Plan, factor: float) -> tuple[float, float]:
    """The norm before and after clipping of a new hybrid's gradient times `factor`."""
    model, size, tokens = build(plan, ode=True, seed=0), size_of(plan), read_tokens(plan)
    window = tokens.train[: size.length + 1].unsqueeze(0).to(model.head.weight.device)
    (factor * next_token_loss(model, window).mean()).backward()
    return clip(model), norm_of(model.parameters())


def corrected(plan: Plan) -> Finding:
    """Held-out loss over seeds, norms before clipping by part, and the error of the adjoint's gradients."""
    pairs = [(train(plan, True, seed), train(plan, False, seed)) for seed in range(plan.seeds)]
    # Windows are the sample: the same ones for both models and for every seed.
    gaps = torch.stack([hybrid.held_out - baseline.held_out for hybrid, baseline in pairs]).mean(0)
    gap, error = float(gaps.mean()), 1.96 * float(gaps.std()) / math.sqrt(len(gaps))
    held_out = [[float(run.held_out.mean()) for run in pair] for pair in pairs]
    hybrid = pairs[0][0]
    departed = _departed(hybrid)
    wrong = {
        "new model": {share: adjoint_error(build(plan, ode=True, seed=0), plan, share) for share in (0.0, 0.1)},
        "trained model": {share: adjoint_error(hybrid.model, plan, share) for share in (0.0, 0.1)},
    }
    ours, theirs = np.mean(held_out, axis=0)
    said = (
        f"{read_tokens(plan).source}; held out, {len(pairs)} seed(s): {ours:.3f} against {theirs:.3f} nats a token, "
        f"difference {gap:+.3f} +- {error:.3f} (95 %, over {len(gaps)} windows)\n"
        f"norm before clipping {_pm(_mean_sd(hybrid.before[-50:]))}, ODE block "
        f"{_pm(_mean_sd(hybrid.parts['ODE block'][-50:]))}; parts whose median left a factor of 100 of its first: "
        f"{', '.join(f'{part} {what}' for part, what in departed.items()) or 'none'}\n"
        "relative error of the adjoint's gradient of the ODE block against that of the Euler steps, without and with "
        "dropout: " + "; ".join(f"{which} {e[0.0]:.1%}, {e[0.1]:.1%}" for which, e in wrong.items())
    )
    checks = {
        "the held-out loss may be as low as the baseline's": gap - error <= 0,
        "no part's gradient vanishes or explodes before clipping": not departed,
        "the adjoint's gradients are right within 1 %": max(max(e.values()) for e in wrong.values()) < 0.01,
    }
    figures = {
        "text": read_tokens(plan).source, "seeds": plan.seeds, "held_out_hybrid_baseline": held_out,
        "difference_95": [gap - error, gap + error], "departed": departed,
        "adjoint_error": {which: {f"dropout {s:g}": e for s, e in by.items()} for which, by in wrong.items()},
    }  # fmt: skip
    return Finding(said, figures, checks, draw=lambda target: _draw_training(*pairs[0], target))


def _departed(run: Trained) -> dict[str, str]:
    from glissando.evaluation.gradients import departure, window_of

    window = window_of(len(run.losses))
    found = {part: departure(np.array(norms), window) for part, norms in run.parts.items()}
    return {part: f"{what.verb} ({what.ratio:.2g}x)" for part, what in found.items() if what is not None}


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
            next_token_loss(model, windows).mean().backward()
        gradients.append(gradient_of(model.flow))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def _mean_sd(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _pm(both: tuple[float, float]) -> str:
    return f"{both[0]:.3f}+-{both[1]:.3f}"


def _draw_training(hybrid: Trained, baseline: Trained, target: Path) -> Path:
    from glissando.evaluation.gradients import running_median
    from glissando.evaluation.plots import figure_and_axes

    figure, (left, right) = figure_and_axes(columns=2)
    for name, run, color in (("hybrid", hybrid, "#0b6e99"), ("baseline", baseline, "#c77700")):
        steps = range(1, len(run.losses) + 1)
        window = max(1, len(run.losses) // 25)
        left.plot(steps, run.losses, color=color, alpha=0.25, linewidth=0.8)
        left.plot(steps, running_median(np.array(run.losses), window), color=color, linewidth=1.8, label=name)
        right.plot(steps, run.before, color=color, linewidth=1.2, label=f"{name}, before clipping")
        right.plot(steps, run.after, color=color, linewidth=1.2, linestyle=":", label=f"{name}, after")
    right.plot(steps, hybrid.parts["ODE block"], color="#2e7d32", linewidth=1.2, label="ODE block, before clipping")
    right.axhline(EXPLODING, color="#b3261e", linewidth=1.2, linestyle="--", label="called exploding, after clipping")
    left.set(xlabel="steps", ylabel="training loss, nats a token", title="The published training")
    right.set(xlabel="steps", ylabel="|gradient|", yscale="log", title="Norms")
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.94), ncols=2)
    figure.savefig(target)
    return target
