"""Draws docs/recurrence.png: x' = -x / tau + u for three time constants, and its exact steps at uneven times.

python -m research.recurrence_picture
"""

from __future__ import annotations

from itertools import pairwise
from math import exp
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

#: times of the observations; the input is 1 until the first and 0 after it
TIMES = (0.0, 1.0, 1.3, 2.1, 4.0, 4.4, 7.5, 10.0)


def after(x: float, u: float, dt: float, tau: float) -> float:
    """The state after `dt` of x' = -x / tau + u, with u held."""
    return exp(-dt / tau) * x + tau * (1 - exp(-dt / tau)) * u


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for tau, colour in ((1, "#b5540a"), (2, "#0b6e99"), (8, "#3f7d20")):
        fine = [10 * i / 400 for i in range(401)]
        top = after(0, 1, 1, tau)
        axes.plot(fine, [after(0, 1, t, tau) if t < 1 else after(top, 0, t - 1, tau) for t in fine], color=colour)
        x, steps = 0.0, [0.0]
        for before, now in pairwise(TIMES):
            x = after(x, float(before < 1), now - before, tau)
            steps.append(x)
        axes.plot(TIMES, steps, "o", color=colour)
        axes.annotate(f"tau = {tau}", (2.2, steps[3] + 0.03), color=colour, fontsize=12)
    axes.axvspan(0, 1, color="#888888", alpha=0.15)
    axes.set(xlim=(0, 10.2), ylim=(-0.05, 1.05), xlabel="time; the input is 1 in the grey part", ylabel="state x")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).parent.parent / "docs" / "recurrence.png")
