"""Figures without global state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
