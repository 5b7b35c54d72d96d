"""Figures without global state."""

from __future__ import annotations

from typing import Any


def figure_and_axes(columns: int = 1, rows: int = 1, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """A figure without pyplot, whose global state a library must not touch, and its axes, row by row (size: inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    usual = 7 if columns == 1 else 5 * columns, 4.2 if rows == 1 else 2.6 * rows
    figure = Figure(figsize=size or usual, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    every = [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, every
