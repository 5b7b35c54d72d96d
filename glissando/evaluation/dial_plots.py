"""The picture of a dial that is turned: what it does to texts, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.steering import Sweep
from glissando.evaluation.word_sets import WordSweep

_DIAL, _QUIET, _BASE = "#0b6e99", "#9aa5b1", "#b3261e"


def plot_dial(result: Sweep, target: Path) -> Path:
    """The mean label against u, one point a prompt behind it, what held-out text costs at u, and of word sets their
    probabilities."""
    figure, (left, right, *more) = figure_and_axes(columns=3 if isinstance(result, WordSweep) else 2)
    jitter = np.random.default_rng(0).uniform(-0.05, 0.05, result.labels.shape)
    u = np.asarray(result.values)
    left.scatter((u[:, None] + jitter).ravel(), result.labels.ravel(), s=6, alpha=0.25, color=_QUIET, label="a prompt")
    left.plot(u, result.means(), color=_DIAL, linewidth=2, marker="o", markersize=4, label="mean")
    at, low, high = result.crossing()
    if low <= high:
        left.axvspan(low, high, color=_BASE, alpha=0.15, label=f"crosses 0 at {at:.2f} ({low:.2f} to {high:.2f})")
    left.axhline(0, color="#5f6b76", linewidth=0.8)
    left.set(xlabel=f"{result.name} dial, u", ylabel=result.measure, ylim=(-1.1, 1.1))
    left.set_title(f"{result.labels.shape[1]} prompts")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    _plot_costs(right, result)
    if isinstance(result, WordSweep):
        for each, raw, color in zip(result.sets, result.probabilities, (_DIAL, _BASE), strict=True):
            more[0].plot(u, raw.mean(-1), color=color, linewidth=2, marker="o", markersize=4, label=each.name)
        more[0].set(xlabel=f"{result.name} dial, u", ylabel="P(set | prompt), mean of the prompts", ylim=(0, None))
        more[0].legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


def _plot_costs(axes: Any, result: Sweep) -> None:
    against = result.uncontrolled if result.base is None else result.base
    ratios = [cost.against(against) for cost in result.costs]
    axes.plot(result.values, ratios, color=_DIAL, linewidth=2, marker="o", markersize=4, label="dial at u")
    if result.base is not None:
        axes.axhline(1.0, color=_BASE, linewidth=1.2, linestyle="--", label="the base")
    uncontrolled = result.uncontrolled.against(against)
    axes.axhline(uncontrolled, color=_QUIET, linewidth=1.2, linestyle=":", label="no control")
    whose = "an uncontrolled reader's" if result.base is None else "the base's"
    axes.set(xlabel=f"{result.name} dial, u", ylabel=f"perplexity of held-out text / {whose}", title="What it costs")
    axes.legend(frameon=False, fontsize=8)
