"""Experiments 2 and 3 of the Hybrid ODE Transformer: steering one prompt, and sweeping the dial.

Corrected: held-out prompts continued by a run of ours and judged by the corpus's oracle, see
glissando.evaluation.steering.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from research.audit.claim import Finding, Plan
from research.audit.hybrid.training import PROMPT, Steered, read_tokens, size_of, steer_on_prompt

if TYPE_CHECKING:
    from glissando.evaluation.steering import Dials, Sweep

PUBLISHED = (0.98, 0.881)
#: beginnings that steering on PROMPT has never seen
OTHERS = ("the book was", "my new hat is", "once upon a time", "2 + 2 =")
SWEPT = [v / 10 for v in range(-15, 16)]
#: so much below the published share of successes counts as reached, in either form
SHORT = 0.1
NEAR_ZERO = 0.05
FLAT = 0.02  # of a probability: so much a curve may fall and still count as rising
NEEDS_RUN = (
    "a run that was steered: glissando train --config examples/steer.yaml --out runs/dial, "
    "then python -m research.audit NAME --run runs/dial/2-steer"
)


def steering_as_published(plan: Plan) -> Finding:
    """P(good) and P(bad) after the one prompt at u = 1, -1, 0 and without a control; and after other prompts."""
    steered = steer_on_prompt(plan, 0)
    up, down, zero, absent = steered.probabilities([1.0, -1.0, 0.0, None]).tolist()
    others = {prompt: steered.probabilities([1.0, -1.0], prompt).tolist() for prompt in OTHERS}
    decode = steered.tokenizer.decode
    said = (
        f"{PROMPT!r}, on which it was trained, after {size_of(plan).steps} steps: {up[0]:.1%} good ({up[1]:.1%} bad) "
        f"at u = 1, {down[1]:.1%} bad ({down[0]:.1%} good) at -1; {zero[0]:.1%} and {zero[1]:.1%} at 0, "
        f"{absent[0]:.1%} and {absent[1]:.1%} without a control. Good is the token {decode([steered.good])!r}, bad "
        f"{decode([steered.bad])!r}\n"
        "after beginnings it has never seen: "
        + "; ".join(f"{prompt!r} {plus[0]:.1%} good, {minus[1]:.1%} bad" for prompt, (plus, minus) in others.items())
        + f"\n(a new model on {read_tokens(plan).source})"
    )
    checks = {
        f"good at u = 1: {PUBLISHED[0]:.1%}, or {SHORT:.0%} less": at_least(up[0], up[0], PUBLISHED[0] - SHORT),
        f"bad at u = -1: {PUBLISHED[1]:.1%}, or {SHORT:.0%} less": at_least(down[1], down[1], PUBLISHED[1] - SHORT),
    }
    figures = {"text": read_tokens(plan).source, "+1": up, "-1": down, "0": zero, "absent": absent, "others": others}
    return Finding(said, figures, checks)


def steering_corrected(plan: Plan) -> Finding:
    """Success of each dial of a run at u = 1 and -1 over held-out prompts."""
    if plan.run is None:
        return Finding("not measured", needs=NEEDS_RUN.replace("NAME", "hybrid-steering"))
    figures = [sweep.as_dict() for sweep in sweeps(plan, (-1.0, 0.0, 1.0))]
    said, checks = [], {}
    for f in figures:
        for side, published in zip(("+1", "-1"), PUBLISHED, strict=True):
            low, high = f[f"success_at_{side}_95"]
            summary = f"{f['dial']} at {side}: {f[f'success_at_{side}']:.1%} (95 %: {low:.1%} to {high:.1%})"
            said.append(summary)
            checks[f"{f['dial']} at {side}: {published:.1%}, or {SHORT:.0%} less"] = at_least(
                low, high, published - SHORT
            )
    return Finding(f"{figures[0]['prompts']} held-out prompts: {'; '.join(said)}", {"dials": figures}, checks)


def dial_as_published(plan: Plan) -> Finding:
    """P(good) - P(bad) after the one prompt against u, for models of several seeds, and where it crosses 0."""
    from glissando.evaluation.steering import crossing_point

    u = np.array(SWEPT)
    models = [steer_on_prompt(plan, seed) for seed in plan.each_seed]
    curves = [_leaning(steered, SWEPT) for steered in models]
    crossings = [crossing_point(u, curve) for curve in curves]
    falls = [float((np.maximum.accumulate(curve) - curve).max()) for curve in curves]
    said = (
        f"where P(good) - P(bad) after {PROMPT!r} crosses 0: {', '.join(_number(c) for c in crossings)} "
        f"(seeds {', '.join(map(str, range(len(curves))))}); the curves fall by at most "
        f"{max(falls):.3f}"
    )
    checks = {
        f"it rises with u, but for {FLAT:g}": max(falls) <= FLAT,
        f"it crosses within {NEAR_ZERO} of 0": all(abs(c) <= NEAR_ZERO for c in crossings),
    }
    figures = {"u": SWEPT, "curves": [curve.tolist() for curve in curves], "crossings": crossings, "falls": falls}
    return Finding(said, figures, checks, draw=lambda target: _draw(u, curves, crossings, target))


def dial_corrected(plan: Plan) -> Finding:
    """The mean judged label against u for each dial of a run, its crossing bootstrapped over held-out prompts."""
    if plan.run is None:
        return Finding("not measured", needs=NEEDS_RUN.replace("NAME", "hybrid-dial"))
    from glissando.evaluation.steering import VALUES

    figures, said, checks = [], [], {}
    for sweep in sweeps(plan, (-1.0, 0.0, 1.0) if plan.quick else VALUES):
        f = sweep.as_dict()
        low, high = f["crossing_95"]
        said.append(
            f"{f['dial']} crosses 0: {_number(f['crossing'])} (95 %: {_number(low)} to {_number(high)}), "
            f"Spearman {f['spearman']:.3f}"
        )
        checks[f"{f['dial']} rises with u"] = f["spearman"] > 0.95
        checks[f"{f['dial']} crosses within {NEAR_ZERO} of 0"] = near_zero(low, high)
        figures.append(f)
    return Finding(f"{figures[0]['prompts']} held-out prompts: {'; '.join(said)}", {"dials": figures}, checks)


def at_least(low: float, high: float, bound: float) -> bool | None:
    """Whether a figure is at least `bound`; None where that lies inside its interval."""
    return True if low >= bound else False if high < bound else None


def near_zero(low: float, high: float) -> bool | None:
    """Whether a crossing lies within NEAR_ZERO of 0; None where its interval does not tell."""
    if low >= -NEAR_ZERO and high <= NEAR_ZERO:
        return True
    return False if low > NEAR_ZERO or high < -NEAR_ZERO or math.isnan(low + high) else None


def sweeps(plan: Plan, values: tuple[float, ...]) -> list[Sweep]:
    from glissando.evaluation.steering import sweep

    dials = _dials(plan)
    return [sweep(dials, name, values) for name in dials.names]


@lru_cache(maxsize=1)
def _dials(plan: Plan) -> Dials:
    """The run's dials over 64 prompts; what was written at a setting serves both claims.

    Raises ConfigError for a run without dials.
    """
    from glissando.errors import ConfigError
    from glissando.evaluation.steering import Dials, trial
    from glissando.loading import load
    from research.runs import corpus_of

    assert plan.run is not None
    model = load(plan.run)
    if not model.config.controls:
        raise ConfigError(f"the model of {plan.run} has no dials; train one whose depth.control names them")
    sizes: dict[str, Any] = {"prompts": 2, "cost_rows": 2, "max_tokens": 8} if plan.quick else {"prompts": 64}
    return Dials(model, trial(corpus_of(plan.run, model), **sizes))


def _leaning(steered: Steered, values: list[float]) -> np.ndarray:
    both = steered.probabilities(list(values)).double().numpy()
    return both[:, 0] - both[:, 1]


def _number(value: float) -> str:
    return "nowhere" if math.isnan(value) else f"{value:.2f}"


def _draw(u: np.ndarray, curves: list[np.ndarray], crossings: list[float], target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    figure, (axes,) = figure_and_axes()
    colors = ("#0b6e99", "#c77700", "#2e7d32", "#5f6b76", "#7b3fa0")
    for seed, (curve, crossing) in enumerate(zip(curves, crossings, strict=True)):
        color = colors[seed % len(colors)]
        axes.plot(u, curve, color=color, linewidth=2, label=f"seed {seed}, crossing: {_number(crossing)}")
        axes.axvline(crossing, color=color, linewidth=0.9, linestyle=":")
    axes.axhline(0, color="#5f6b76", linewidth=0.8)
    axes.axvline(0, color="#5f6b76", linewidth=0.8)
    axes.set(xlabel="control, u", ylabel="P(good) $-$ P(bad)", ylim=(-1.05, 1.05))
    axes.set_title(f"After {PROMPT!r}, the prompt that was trained, as published")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(target)
    return target
