"""What halting saves and what it costs: evaluations of a flow's field per token against perplexity, by tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glissando.data.base import Batch
from glissando.depth.flow import FlowDepth
from glissando.depth.solvers import evaluations
from glissando.errors import ConfigError
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.scoring import counted, score
from glissando.model import LanguageModel
from glissando.progress import track
from research.flow_steps import Setting, solved_with

TOLERANCES = (0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064)


@dataclass(frozen=True)
class Point:
    """One setting: its tolerance (None: a grid of n_steps without halting), and what was measured on the same text."""

    tolerance: float | None
    n_steps: int
    per_token: float
    perplexity: float


def measure_halting(
    model: LanguageModel, batches: Sequence[Batch], tolerances: Sequence[float] = TOLERANCES
) -> list[Point]:
    """The whole grid, then each tolerance on it, then coarser grids without halting to compare with.

    Raises ConfigError for a model without a flow, or one whose scheme is the coupled one, which cannot halt.
    """
    depth = model.depth
    if not isinstance(depth, FlowDepth) or depth.config.backward == "reversible":
        raise ConfigError("halting needs depth.kind flow, without depth.backward reversible")
    method, backward = depth.config.method, depth.config.backward
    chosen = [*((depth.n_steps, t) for t in (None, *tolerances)), *((n, None) for n in range(1, depth.n_steps))]
    points = []
    for n_steps, tolerance in track(chosen, "halting", unit="settings"):
        variant = solved_with(model, Setting(method, n_steps), tolerance)
        with counted(variant) as count:
            perplexity = score(variant, batches).perplexity
        per_token = evaluations(method, n_steps, backward) if tolerance is None else count.per_token
        points.append(Point(tolerance, n_steps, float(per_token), perplexity))
    return points


def halting_table(points: Sequence[Point]) -> str:
    """A line for each point; perplexity and evaluations beside those of the whole grid, the first of the points."""
    full = points[0]
    lines = ["tolerance   steps   evaluations a token   of the whole grid   perplexity"]
    for p in points:
        name = "none" if p.tolerance is None else f"{p.tolerance:g}"
        change = p.perplexity / full.perplexity - 1
        share = p.per_token / full.per_token
        lines.append(f"{name:>9}   {p.n_steps:5}   {p.per_token:19.2f}   {share:17.0%}   {change:+10.2%}")
    return "\n".join(lines)


def plot_halting(points: Sequence[Point], target: Path) -> Path:
    """Perplexity over that of the whole grid against evaluations per token: halting, and coarser grids."""
    figure, (axes,) = figure_and_axes()
    full = points[0]
    halting = [p for p in points if p.tolerance is not None]
    coarser = [full, *(p for p in points[1:] if p.tolerance is None)]
    for kind, label, color in ((halting, "tokens halt", "#0b6e99"), (coarser, "fewer steps for all", "#9aa5b1")):
        kind = sorted(kind, key=lambda p: p.per_token)
        xs, ys = [p.per_token for p in kind], [100 * (p.perplexity / full.perplexity - 1) for p in kind]
        axes.plot(xs, ys, color=color, linewidth=2, marker="o", markersize=4, label=label)
    axes.axhline(1, color="#b3261e", linewidth=1.2, linestyle="--", label="1 %")
    axes.set(xlabel="evaluations of the field per token", ylabel="perplexity over that of the whole grid, %")
    axes.set_title(f"Halting on a grid of {full.n_steps} steps")
    axes.legend(frameon=False)
    figure.savefig(target)
    return target
