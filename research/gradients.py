"""The picture of gradients in training: the norm of each part before clipping, and the parts that vanish or explode.

A part vanishes (explodes) where the median of its norm over a window of logged steps is more than FACTOR times below
(above) the median over the first window. A single step, the size of the part and the clipping play no role in it.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glissando.errors import RunError
from glissando.evaluation.figures import figure_and_axes
from glissando.runs import METRICS

FACTOR = 100.0
#: more parts than this are drawn block by block
MOST = 12
#: in metrics.csv, before a part's name
PREFIX = "grad_norm/"

_ORDER = (
    "embedding", "position_embedding", "lift", "shortcuts", "step_bias", "before", "blocks", "gates", "field", "time",
    "control", "alpha", "after",
)  # fmt: skip
_LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Departure:
    """The first window in which a part's median norm is FACTOR away from its first one: its middle row, the ratio."""

    row: int
    ratio: float

    @property
    def verb(self) -> str:
        return "explodes" if self.ratio > 1 else "vanishes"


def window_of(n_rows: int) -> int:
    """Rows of a window: a tenth of all, at least 5; 1 if the run is too short for two of them to be apart."""
    return max(5, n_rows // 10) if n_rows >= 10 else 1


def departure(norms: NDArray[np.float64], window: int) -> Departure | None:
    """Whether and where a part vanishes or explodes, by the definition above; None if it never does.

    A part whose first median is 0 has nothing to be compared with, and windows of a single row are left out.
    """
    if window < 2 or len(norms) < 2 * window:
        return None
    first = float(np.median(norms[:window]))
    if not first > 0:
        return None
    for start in range(window, len(norms) - window + 1):
        ratio = float(np.median(norms[start : start + window])) / first
        if ratio > FACTOR or ratio < 1 / FACTOR:
            return Departure(start + window // 2, ratio)
    return None


def read_norms(run: Path) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Logged steps, the norm of the whole gradient, and that of each part, in the order of the model.

    Raises RunError if nothing was logged.
    """
    from glissando.metrics import read_metrics

    rows = [row for row in read_metrics(run / METRICS) if row.get("grad_norm")]
    if not rows:
        raise RunError(f"{run / METRICS} has no rows to draw; train for longer than training.log_every steps")
    parts = sorted((name for name in rows[0] if name.startswith(PREFIX)), key=lambda n: _place(n[len(PREFIX) :]))
    norms = {part.removeprefix(PREFIX): _column(rows, part) for part in parts}
    return np.array([int(row["step"]) for row in rows]), _column(rows, "grad_norm"), norms


def _column(rows: list[dict[str, str]], name: str) -> NDArray[np.float64]:
    return np.array([float(row.get(name) or "nan") for row in rows])


def _place(part: str) -> tuple[int, int, str]:
    pieces = part.split(".")
    inside = pieces[1] if pieces[0] == "depth" and len(pieces) > 1 else pieces[0]
    number = next((int(piece) for piece in pieces if piece.isdigit()), 0)
    return (_ORDER.index(inside) if inside in _ORDER else len(_ORDER), number, part)


def merged(norms: dict[str, NDArray[np.float64]], most: int = MOST) -> dict[str, NDArray[np.float64]]:
    """The parts, or where there are more than `most` the blocks that they belong to: root sums of squares."""
    if len(norms) <= most:
        return norms
    blocks: dict[str, list[NDArray[np.float64]]] = {}
    for part, values in norms.items():
        blocks.setdefault(_block(part), []).append(values)
    return {block: np.sqrt(np.square(inside).sum(0)) for block, inside in blocks.items()}


def _block(part: str) -> str:
    """depth.before.0.mixer -> depth.before.0; depth.time.2.weight -> depth.time."""
    pieces = part.split(".")
    numbered = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    if not numbered:
        return part
    leaf = pieces[-1] in ("weight", "bias")
    return ".".join(pieces[: numbered[-1] + (0 if leaf else 1)])


def plot_gradients(run: Path, target: Path) -> Path:
    """|gradient| of each part before clipping against steps (log), running medians; the whole one thick.

    Raises RunError if nothing was logged.
    """
    steps, total, parts = read_norms(run)
    window = window_of(len(steps))
    figure, (axes,) = figure_and_axes()
    figure.set_size_inches(8.4, 4.6)
    labels: list[tuple[float, str, Any]] = []
    axes.plot(steps, _positive(running_median(total, window)), color="black", linewidth=3, alpha=0.85)
    labels.append((_last(running_median(total, window)), "all", "black"))
    still, departed = [], False
    for (part, norms), (color, line) in zip((shown := merged(parts)).items(), _styles(len(shown)), strict=True):
        name, smooth = part.removeprefix("depth."), running_median(norms, window)
        if not np.nan_to_num(norms).max() > 0:
            still.append(name)
            continue
        axes.plot(steps, _positive(smooth), color=color, linestyle=line, linewidth=1.4)
        if found := departure(norms, window):
            departed = True
            name = f"{name}: {found.verb}"
            marker = {"marker": "^" if found.ratio > 1 else "v", "color": "#b3261e", "markersize": 9}
            axes.plot([steps[found.row]], [smooth[found.row]], **marker)
        labels.append((_last(smooth), name, color))
    over = f", medians of {window} logged steps" if window > 1 else ""
    axes.set(yscale="log", xlabel="steps", ylabel="|gradient| before clipping", title=f"{run.name}: gradients{over}")
    _label_ends(axes, labels)
    notes = [f"vanishes, explodes: a factor of {FACTOR:g} below, above the first median"] if departed else []
    notes += [f"0 throughout: {', '.join(still)}"] if still else []
    if notes:
        axes.text(0, -0.2, "\n".join(notes), transform=axes.transAxes, fontsize=8, va="top")
    figure.savefig(target)
    return target


def running_median(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The median of `window` values around each one, of fewer at the ends."""
    half = window // 2
    return np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A gap where a logarithmic axis has no place for a value."""
    return np.where(values > 0, values, np.nan)


def _last(values: NDArray[np.float64]) -> float:
    known = _positive(values)
    known = known[~np.isnan(known)]
    return float(known[-1]) if known.size else math.nan


def _styles(n: int) -> list[tuple[Any, str]]:
    """Dark near the input, light near the output, neighbours with different lines."""
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    return [(shades(0.82 * i / max(n - 1, 1)), _LINES[i % len(_LINES)]) for i in range(n)]


def _label_ends(axes: Any, labels: list[tuple[float, str, Any]]) -> None:
    """Names at the right, each as near to the end of its line as the others allow."""
    labels = sorted((label for label in labels if not math.isnan(label[0])), key=lambda label: label[0])
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = [(math.log(value) - low) / (high - low) for value, _, _ in labels]
    for at, (_, name, color), end in zip(spread(ends), labels, ends, strict=True):
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        where = {"xy": (1, end), "xytext": (1.04, at), "xycoords": "axes fraction", "annotation_clip": False}
        axes.annotate(name, **where, fontsize=8, color=color, va="center", arrowprops=leader)


def spread(places: list[float], gap: float = 0.05) -> list[float]:
    """Rising places in [0, 1] at least `gap` apart, less where there are too many, with the least squared moves."""
    gap = min(gap, 1 / max(len(places) - 1, 1))
    # Without their gaps the places need only not fall: neighbours that do are pooled at their mean.
    pools: list[list[float]] = []
    for i, place in enumerate(places):
        pools.append([place - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    top = 1 - (len(places) - 1) * gap
    return [min(max(value, 0.0), top) + i * gap for i, value in enumerate(level)]


def main() -> None:
    """Draw the gradients of a run."""
    parser = argparse.ArgumentParser(prog="python -m research.gradients", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("picture", type=Path, help="picture to write, such as gradients.png")
    options = parser.parse_args()
    try:
        print(plot_gradients(options.run, options.picture))
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
