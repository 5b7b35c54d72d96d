"""Pictures of a run: its loss curve against the entropy floor."""

from __future__ import annotations

from pathlib import Path

from glissando.errors import RunError
from glissando.evaluation.figures import figure_and_axes
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
    from matplotlib.ticker import EngFormatter

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
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.legend(frameon=False)
    figure.savefig(target)
    return target
