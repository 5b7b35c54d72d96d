"""Pictures of steering: one dial, two dials at once, and a dial beside what can be done without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.scoring import wilson
from glissando.evaluation.steering import Sweep
from glissando.evaluation.steering_baselines import Comparison, Outcome
from glissando.evaluation.steering_pair import PairGrid
from glissando.evaluation.word_sets import WordSweep

_DIAL, _QUIET, _BASE = "#0b6e99", "#9aa5b1", "#b3261e"
_WAYS = (("#8a5a00", "s"), ("#5b3f8c", "^"))  # one for each baseline


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


def plot_pair(grid: PairGrid, target: Path) -> Path:
    """Two heat maps, the mean of either label, over the settings of both dials; the numbers stand in the cells."""
    figure, every = figure_and_axes(columns=2)
    (first, second), ticks = grid.names, range(len(grid.values))
    for axes, name, means in zip(every, grid.names, grid.means(), strict=True):
        axes.grid(False)
        image = axes.imshow(means, cmap="RdBu", vmin=-1, vmax=1, origin="lower", aspect="auto")
        for i, j in np.ndindex(means.shape):
            color = "white" if abs(means[i, j]) > 0.6 else "black"
            axes.text(j, i, f"{means[i, j]:+.2f}", ha="center", va="center", color=color)
        labels = [f"{u:g}" for u in grid.values]
        axes.set_xticks(ticks, labels)
        axes.set_yticks(ticks, labels)
        axes.set(xlabel=f"{second} dial, u", ylabel=f"{first} dial, u", title=f"mean {name} of the text")
        figure.colorbar(image, ax=axes, fraction=0.05)
    figure.suptitle(f"Two dials turned at once, {grid.labels.shape[-1]} held-out prompts")
    figure.savefig(target)
    return target


def plot_comparison(result: Comparison, target: Path) -> Path:
    """Success at +-1 against what it costs in perplexity: the dial, the base left alone, and the baselines.

    Small marks were measured on the prompts to choose by, large ones with 95 % bars on those of the report.
    """
    figure, (axes,) = figure_and_axes()
    _mark(axes, result.unsteered, _QUIET, "X", "no steering")
    for baseline, (color, shape) in zip(result.baselines, _WAYS, strict=True):
        x, y = [_cost_percent(outcome) for outcome in baseline.tried], [outcome.success for outcome in baseline.tried]
        axes.scatter(x, y, s=18, color=color, alpha=0.35, marker=shape)
        if baseline.as_cheap is not None:
            _mark(axes, baseline.as_cheap, color, shape, f"{baseline.as_cheap.way}, within the dial's cost or 1 %")
        if baseline.best is not None and baseline.best != baseline.as_cheap:
            _mark(axes, baseline.best, color, shape, f"{baseline.best.way}, at any cost", fillstyle="none")
    _mark(axes, result.dial, _DIAL, "o", "dial")
    axes.axvline(_cost_percent(result.dial), color=_DIAL, linewidth=0.8, linestyle=":")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+g} %" if x else "0")
    axes.margins(x=0.12)
    axes.set(xlabel="perplexity of held-out text, against the base's", ylabel=f"success at {result.name} = ±1")
    axes.set(ylim=(-0.03, 1.03), title=f"The {result.name} dial and what can be done without one")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


def _cost_percent(outcome: Outcome) -> float:
    return 100 * (outcome.cost - 1)


def _mark(axes: Any, outcome: Outcome, color: str, shape: str, label: str, fillstyle: str = "full") -> None:
    low, high = wilson(sum(outcome.successes), 2 * outcome.prompts)
    bar = [[max(outcome.success - low, 0.0)], [max(high - outcome.success, 0.0)]]
    style = {"color": color, "marker": shape, "markersize": 9, "fillstyle": fillstyle, "linestyle": "none"}
    axes.errorbar([_cost_percent(outcome)], [outcome.success], yerr=bar, capsize=3, label=label, **style)
