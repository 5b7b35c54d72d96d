"""Pictures without global state: of a run its loss curve against the entropy floor, and of a dial what it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glissando.errors import RunError
from glissando.metrics import read_metrics
from glissando.runs import METRICS

if TYPE_CHECKING:
    from glissando.evaluation.steering import Sweep

_DIAL, _QUIET, _BASE = "#0b6e99", "#9aa5b1", "#b3261e"


def figure_and_axes(columns: int = 1, rows: int = 1, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """A figure without pyplot, whose global state a library must not touch, and its axes, row by row (size: inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size or (5 * columns, 3.6 if rows == 1 else 2.6 * rows), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    every = [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, every


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names at the right of the axes, whose limits are set: (y, name, colour) of each line's end, apart from each other
    by a line of text."""
    axes.get_ylim()  # brings the limits up to date, which the transform reads
    share_of = axes.transScale + axes.transLimits
    least = 11 / (72 * axes.get_position().height * axes.figure.get_figheight())
    place = -1.0
    for share, name, colour in sorted((share_of.transform((1, y))[1], name, colour) for y, name, colour in ends):
        place = max(share, place + least)
        axes.annotate(name, (1.01, place), xycoords="axes fraction", color=colour, fontsize=9, va="center")


def require_log(run: Path) -> list[dict[str, str]]:
    """The rows that a training has logged. Raises RunError for none."""
    if not (run / METRICS).is_file():
        raise RunError(
            f"{run} has no log of a training ({METRICS}) to draw, as a packaged or saved model has none: leave the "
            "plots out"
        )
    if not (rows := read_metrics(run / METRICS)):
        raise RunError(f"{run / METRICS} has no rows to draw; train for longer than training.log_every steps")
    return rows


def plot_loss(run: Path, target: Path, floor: float | None = None) -> Path:
    """Bits per byte, trained and held out, against tokens read (log); the entropy floor as a line.

    Raises RunError if nothing was logged.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    rows = require_log(run)
    figure, (axes,) = figure_and_axes()
    ends = []
    for column, label, colour, marker in (
        ("train_bits_per_byte", "training", "#5f6b76", ""),
        ("valid_bits_per_byte", "held out", "#0b6e99", "o"),
    ):
        points = [(float(r["tokens"]), float(r[column])) for r in rows if r.get(column)]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, marker=marker, markersize=4)
            ends.append((points[-1][1], label, colour))
    if floor is not None:
        axes.axhline(floor, color="#b3261e", linewidth=1.2, linestyle="--")
        ends.append((floor, f"floor {floor:.3f}", "#b3261e"))
    axes.set(
        xlabel="tokens read", ylabel="bits per byte", xscale="log", title=f"{run.name}: bits per byte while it learned"
    )
    axes.margins(y=0.06)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    label_ends(axes, ends)
    figure.savefig(target)
    return target


def plot_dial(result: Sweep, target: Path) -> Path:
    """The mean label against u, one point a prompt behind it, what held-out text costs at u, and of word sets their
    probabilities."""
    figure, (left, right, *more) = figure_and_axes(columns=3 if result.sets else 2)
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
    if result.sets:
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
