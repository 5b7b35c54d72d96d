"""Figures without global state."""

from __future__ import annotations

from typing import Any


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
