"""Pictures of steering: two dials turned at once, and a dial beside what can be done without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.scoring import wilson
from research.steering.baselines import Comparison, Outcome
from research.steering.pairs import PairGrid

_DIAL, _QUIET = "#0b6e99", "#9aa5b1"
_WAYS = (("#8a5a00", "s"), ("#5b3f8c", "^"))  # one for each baseline


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
