"""Experiment 1 of the Hybrid ODE Transformer: loss and gradient norms of the hybrid and its baseline in training."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from research.audit.claim import Finding, Plan
from research.audit.hybrid.training import CLIP, Trained, build, clip, norm_of, read_tokens, size_of, train
from research.audit.training import losses, running_median
from research.intervals import gap_of

EXPLODING = 100.0  # a norm above it, measured after clipping to 1
FACTOR = 100.0  # by which the norm of a part that vanishes or explodes departs
KINDS = {"hybrid": True, "baseline": False}


def as_published(plan: Plan) -> Finding:
    """Training loss and norms after clipping, the mean of the last 50 steps."""
    tokens, runs = read_tokens(plan), {kind: train(plan, ode, 0) for kind, ode in KINDS.items()}
    last = min(50, max(1, size_of(plan).steps // 2))
    loss = {kind: statistics.fmean(run.losses[-last:]) for kind, run in runs.items()}
    norm = {kind: _mean_sd(run.after[-last:]) for kind, run in runs.items()}
    hybrid = runs["hybrid"]
    shares = [after / before for after, before in zip(hybrid.after, hybrid.before, strict=True)]
    ode = _mean_sd([n * s for n, s in zip(hybrid.parts["ODE block"], shares, strict=True)][-last:])
    said = (
        f"{tokens.source}; {size_of(plan).steps} steps, mean of the last {last}: loss {loss['hybrid']:.3f} against "
        f"{loss['baseline']:.3f} nats a token; norm after clipping {_pm(norm['hybrid'])} against "
        f"{_pm(norm['baseline'])}; ODE block {_pm(ode)}"
    )
    checks = {
        "the hybrid's training loss is at most the baseline's": loss["hybrid"] <= loss["baseline"],
        "its norm is within a tenth of the baseline's": abs(norm["hybrid"][0] / norm["baseline"][0] - 1) <= 0.1,
    }
    figures = {
        "text": tokens.source, "steps": size_of(plan).steps, "averaged": last, "loss": loss, "norm_after": norm,
        "ode_block_after": ode,
    }  # fmt: skip
    return Finding(said, figures, checks, tokens.needs)


def corrected(plan: Plan) -> Finding:
    """Held-out loss over seeds, and norms before clipping."""
    pairs = [(train(plan, True, seed), train(plan, False, seed)) for seed in plan.each_seed]
    gap = gap_of(torch.stack([hybrid.held_out - baseline.held_out for hybrid, baseline in pairs]))
    held_out = [[float(run.held_out.mean()) for run in pair] for pair in pairs]
    norm = [_mean_sd(run.before[-50:]) for run in pairs[0]]
    ours, theirs = np.mean(held_out, axis=0)
    said = (
        f"{read_tokens(plan).source}; held out, {len(pairs)} seed(s): {ours:.3f} against {theirs:.3f} nats a token, "
        f"difference {gap}; norm before clipping {_pm(norm[0])} against {_pm(norm[1])} (seed 0)"
    )
    checks = {
        "the held-out loss is as low as the baseline's within 1 %": gap.below(0.01 * theirs),
        "its norm is within a tenth of the baseline's": abs(norm[0][0] / norm[1][0] - 1) <= 0.1,
    }
    figures = {
        "text": read_tokens(plan).source, "held_out_hybrid_baseline": held_out, "difference_95": gap.interval,
        "norm_before": norm,
    }  # fmt: skip
    return Finding(said, figures, checks, draw=lambda target: _draw_training(*pairs[0], target))


# ---------------------------------------------------------------------- exploding


def exploding_as_published(plan: Plan) -> Finding:
    """Steps of the two trainings whose norm after clipping is above EXPLODING, and whether any gradient's could be."""
    runs = {kind: train(plan, ode, 0) for kind, ode in KINDS.items()}
    flagged = {kind: sum(norm > EXPLODING for norm in run.after) for kind, run in runs.items()}
    blown = _blown_up(plan, 1e6)
    said = (
        f"{size_of(plan).steps} steps: {flagged['hybrid']} and {flagged['baseline']} with a norm above {EXPLODING:g} "
        f"after clipping to {CLIP:g}. None could be: the norm of a gradient a million times too large is "
        f"{blown[0]:.3g} before clipping and {blown[1]:.3g} after"
    )
    checks = {"no step explodes by the test": not any(flagged.values()), "the test finds one": blown[1] > EXPLODING}
    return Finding(said, {"flagged": flagged, "blown_up_before_after": blown}, checks)


def _blown_up(plan: Plan, factor: float) -> tuple[float, float]:
    """The norm before and after clipping of a new hybrid's gradient times `factor`."""
    model, size, tokens = build(plan, ode=True, seed=0), size_of(plan), read_tokens(plan)
    window = tokens.train[: size.length + 1].unsqueeze(0).to(model.head.weight.device)
    (factor * losses(model, window).mean()).backward()
    return clip(model), norm_of(model.parameters())


def exploding_corrected(plan: Plan) -> Finding:
    """The same trainings before clipping, part by part, and a test that would find an explosion."""
    hybrid = train(plan, True, 0)
    largest, departed = max(hybrid.before), _departed(hybrid.parts)
    growth = 1e6 ** (np.arange(1, len(hybrid.before) + 1) / len(hybrid.before))
    spoiled = (np.array(hybrid.before) * growth).tolist()
    found = bool(_departed({"all": spoiled}))
    parts = ", ".join(f"{part} {what}" for part, what in departed.items()) or "none"
    said = (
        f"before clipping: the largest of {len(hybrid.before)} norms is {largest:.3g}; parts whose median left a "
        f"factor of 100 of its first: {parts}. Norms made to grow a millionfold in as many steps "
        f"are {'found' if found else 'not found'}"
    )
    checks = {
        "no step is above 100 before clipping": largest <= EXPLODING,
        "no part's gradient vanishes or explodes": not departed,
        "the test finds one": found,
    }
    return Finding(said, {"largest_before": largest, "departed": departed}, checks)


def _departed(norms: dict[str, list[float]]) -> dict[str, str]:
    """What left a factor of 100 of its first norm, and how."""
    ratios = {part: departure(np.array(each), max(5, len(each) // 10)) for part, each in norms.items()}
    return {
        part: f"{'explodes' if ratio > 1 else 'vanishes'} ({ratio:.2g}x)"
        for part, ratio in ratios.items()
        if ratio is not None
    }


def departure(norms: NDArray[np.float64], window: int) -> float | None:
    """The first ratio, beyond FACTOR, of the median over a window of steps to that over the first window; None for
    none, for a first median of 0, and for fewer steps than two windows."""
    first = float(np.median(norms[:window]))
    if len(norms) < 2 * window or not first > 0:
        return None
    later = np.median(np.lib.stride_tricks.sliding_window_view(norms[window:], window), 1) / first
    return next((float(ratio) for ratio in later if ratio > FACTOR or ratio < 1 / FACTOR), None)


def _mean_sd(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _pm(both: tuple[float, float]) -> str:
    return f"{both[0]:.3f}+-{both[1]:.3f}"


def _draw_training(hybrid: Trained, baseline: Trained, target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    figure, (left, right) = figure_and_axes(columns=2)
    for name, run, color in (("hybrid", hybrid, "#0b6e99"), ("baseline", baseline, "#c77700")):
        steps = range(1, len(run.losses) + 1)
        window = max(1, len(run.losses) // 25)
        left.plot(steps, run.losses, color=color, alpha=0.25, linewidth=0.8)
        left.plot(steps, running_median(run.losses, window), color=color, linewidth=1.8, label=name)
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
