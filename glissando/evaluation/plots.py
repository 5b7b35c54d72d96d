"""Pictures of a run: its loss curve against the entropy floor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glissando.errors import RunError
from glissando.runs import METRICS

if TYPE_CHECKING:
    from glissando.evaluation.steering import Sweep
    from glissando.model import LanguageModel


def plot_run(run: str | Path, model: LanguageModel, out: str | Path, floor: float | None = None) -> list[Path]:
    """Draw every picture that a run and its model have into the directory `out`; returns their paths."""
    from glissando.evaluation.kernels import plot_kernels, spectral_mixers

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pictures = [plot_loss(Path(run), out / "loss.png", floor)]
    if spectral_mixers(model):
        pictures.append(plot_kernels(model, out / "kernels.png"))
    return pictures


def plot_loss(run: Path, target: Path, floor: float | None = None) -> Path:
    """Bits per byte, trained and held out, against tokens read (log); the entropy floor as a line.

    Raises RunError if nothing was logged.
    """
    from glissando.training.callbacks import read_metrics

    rows = read_metrics(run / METRICS)
    if not rows:
        raise RunError(f"{run / METRICS} has no rows to draw; train for longer than training.log_every steps")
    figure, (axes,) = figure_and_axes()
    for column, label, style in (
        ("train_bits_per_byte", "training", {"color": "#9aa5b1", "linewidth": 1.2}),
        (
            "valid_bits_per_byte",
            "held out",
            {"color": "#0b6e99", "linewidth": 2, "marker": "o", "markersize": 4},
        ),
    ):
        points = [(float(r["tokens"]), float(r[column])) for r in rows if r.get(column)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if floor is not None:
        axes.axhline(floor, color="#b3261e", linewidth=1.2, linestyle="--", label=f"entropy floor {floor:.3f}")
    axes.set(xlabel="tokens read", ylabel="bits per byte", xscale="log", title=run.name)
    axes.set_ylim(bottom=0)
    _plain_decades(axes)
    axes.legend(frameon=False)
    figure.savefig(target)
    return target


def plot_dial(result: Sweep, target: Path) -> Path:
    """The mean label of the texts against u, one point a prompt behind it, and what held-out text costs at u."""
    figure, (left, right) = figure_and_axes(columns=2)
    jitter = np.random.default_rng(0).uniform(-0.05, 0.05, result.labels.shape)
    u = np.asarray(result.values)
    left.scatter((u[:, None] + jitter).ravel(), result.labels.ravel(), s=6, alpha=0.25, color="#9aa5b1", label="a text")
    left.plot(u, result.means(), color="#0b6e99", linewidth=2, marker="o", markersize=4, label="mean")
    at, low, high = result.crossing()
    if low <= high:
        left.axvspan(low, high, color="#b3261e", alpha=0.15, label=f"crosses 0 at {at:.2f} ({low:.2f} to {high:.2f})")
    left.axhline(0, color="#5f6b76", linewidth=0.8)
    left.set(xlabel=f"{result.name} dial, u", ylabel=f"{result.name} of the text, judged", ylim=(-1.1, 1.1))
    left.set_title(f"{result.labels.shape[1]} held-out prompts")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.plot(u, result.bits_per_byte, color="#0b6e99", linewidth=2, marker="o", markersize=4, label="dial at u")
    right.axhline(result.uncontrolled, color="#b3261e", linewidth=1.2, linestyle="--", label="no control")
    right.set(xlabel=f"{result.name} dial, u", ylabel="bits per byte of held-out text", title="What it costs")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


def figure_and_axes(columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure without pyplot, whose global state a library must not touch, and its axes from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 if columns == 1 else 5 * columns, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    every = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, every


def _plain_decades(axes: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, written 200 k and not 2 x 10^5."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
