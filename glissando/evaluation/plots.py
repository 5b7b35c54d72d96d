"""Pictures of a run: its loss curve against the entropy floor."""

from __future__ import annotations

from pathlib import Path

from glissando.errors import RunError
from glissando.evaluation.figures import figure_and_axes, label_ends
from glissando.runs import METRICS


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
