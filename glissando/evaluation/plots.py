"""Pictures of a run: its loss curve against the entropy floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.errors import RunError
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.kernels import plot_kernels, turning_mixers
from glissando.model import LanguageModel
from glissando.runs import METRICS, Run

#: what `plot_run` may draw
PICTURES = ("loss.png", "kernels.png")


def plot_run(run: str | Path, model: LanguageModel, out: str | Path, floor: float | None = None) -> list[Path]:
    """Draw every picture that a run and its model have into the directory `out`; returns their paths.

    floor  the corpus's entropy in bits per byte, where it is known
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pictures = [plot_kernels(model, out / "kernels.png")] if turning_mixers(model) else []
    return [plot_loss(Path(run), out / "loss.png", floor), *pictures]


def require_log(run: Path) -> list[dict[str, str]]:
    """The rows that a training has logged. Raises RunError for none."""
    from glissando.metrics import read_metrics

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
    rows = require_log(run)
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


def plot_stages(runs: Sequence[Run], target: Path) -> Path:
    """Nats per target, trained and held out, against the FLOPs of all runs together (log); a line where one starts.

    Raises RunError if nothing was logged.
    """
    from glissando.loading import load

    figure, (axes,) = figure_and_axes()
    curves: dict[str, list[tuple[float, float]]] = {"train_loss": [], "valid_loss": []}
    spent = 0.0
    for number, run in enumerate(runs):
        rows = require_log(run.path)
        for column, points in curves.items():
            points += [(spent + float(row["flops"]), float(row[column])) for row in rows if row.get(column)]
        label = f"{run.path.name}: {load(run.path).num_parameters():,} parameters"
        if number:
            axes.axvline(spent, color="#b3261e", linewidth=1, linestyle="--")
            place = {"xycoords": ("data", "axes fraction"), "xytext": (4, 0), "textcoords": "offset points"}
            axes.annotate(label, (spent, 0.97), **place, rotation=90, va="top", fontsize=7)
        else:
            axes.set_title(label, fontsize=9, loc="left")
        spent += float(rows[-1]["flops"])
    axes.plot(*zip(*curves["train_loss"], strict=True), label="training", color="#9aa5b1", linewidth=1.2)
    style = {"color": "#0b6e99", "linewidth": 2, "marker": "o", "markersize": 4}
    axes.plot(*zip(*curves["valid_loss"], strict=True), label="held out", **style)
    axes.set(xlabel="training FLOPs", ylabel="nats per target", xscale="log")
    axes.legend(frameon=False)
    figure.savefig(target)
    return target


def _plain_decades(axes: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, written 200 k and not 2 x 10^5."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
