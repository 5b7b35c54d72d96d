"""The report's pictures: SVG in the colours of the page, light or dark as the reader has it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from glissando.compare.results import ModelResult

# Colours that stand for the page's own until `_draw` puts those in.
_INK, _LINE, _FLOOR = "#010203", "#010204", "#010205"
_SERIES = tuple(f"#0102{16 + number:02x}" for number in range(8))
_MARKERS = "osD^vPX*"


def colour_name(index: int) -> str:
    """The page's colour of a model."""
    return f"var(--series-{index % len(_SERIES)})"


def figures(results: Sequence[ModelResult], floor: float | None) -> dict[str, str]:
    """name -> SVG, of those for which there is data."""
    curves = {"tokens": "tokens read", "flops": "training FLOPs", "seconds": "seconds"}
    contexts = {"decode": "ms a token", "state": "bytes of state"}
    drawn = {name: _draw(name, partial(_curves, results, name, label, floor)) for name, label in curves.items()}
    drawn |= {name: _draw(name, partial(_against_context, results, name, label)) for name, label in contexts.items()}
    return {name: picture for name, picture in drawn.items() if picture}


def _draw(name: str, fill: Callable[[Any], bool]) -> str:
    """The SVG of what `fill` draws, as wide as its place, in the page's colours; "" if it draws nothing."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK,
        "axes.edgecolor": _LINE, "xtick.color": _LINE, "ytick.color": _LINE, "grid.color": _LINE,
        "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(4.2, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.35, linewidth=0.6)
        if not fill(axes):
            return ""
        figure.legend(loc="outside upper center", ncols=2, fontsize=7, frameon=False)  # over no curve
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{name}-", svg)  # several pictures stand on one page
    svg = re.sub(r'<svg (.*?)\swidth="[^"]*"', r'<svg class="chart" \1', re.sub(r'\sheight="[^"]*"', "", svg, count=1))
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    colours = {_INK: "var(--ink)", _LINE: "var(--line)", _FLOOR: "var(--floor)"}
    for colour, variable in (colours | {c: colour_name(n) for n, c in enumerate(_SERIES)}).items():
        svg = svg.replace(colour, variable)
    return svg


def _curves(results: Sequence[ModelResult], column: str, label: str, floor: float | None, axes: Any) -> bool:
    """Held-out bits per byte where they were measured, and faintly the training's; a line a seed."""
    curves: list[list[tuple[float, float]]] = []
    for i, result in enumerate(results):
        name: str | None = result.model
        for rows in result.curves:
            if column not in rows[-1]:  # FLOPs of a mixer that has no function for them
                continue
            seen = [(row[column], row["train_bits_per_byte"]) for row in rows]
            axes.plot(*zip(*seen, strict=True), color=_SERIES[i % len(_SERIES)], linewidth=0.6, alpha=0.25)
            if points := [(row[column], row["valid_bits_per_byte"]) for row in rows if "valid_bits_per_byte" in row]:
                style = {"color": _SERIES[i % len(_SERIES)], "linewidth": 1.5, "markersize": 3.5, "label": name}
                axes.plot(*zip(*points, strict=True), marker=_MARKERS[i % 8], **style)
                curves.append(points)
                name = None  # one entry in the legend
    axes.set(xlabel=label, ylabel="bits per byte")
    axes.xaxis.set_major_formatter(_amount)
    if curves:
        _loss_axis(axes, curves, floor)
    return bool(curves)


def _loss_axis(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], floor: float | None) -> None:
    """From the floor, or 0 where it is not known, to the highest that a curve is after its first fifth, in which all
    fall alike: a small difference looks small."""
    bottom = min(floor or 0.0, *(y for curve in curves for _, y in curve))
    top = max(y for curve in curves for x, y in curve if x >= 0.2 * curve[-1][0])
    if floor is not None:
        axes.axhline(floor, color=_FLOOR, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(
            f"entropy floor {floor:.3f}", (1, floor), (0, 3), ("axes fraction", "data"), "offset points",
            color=_FLOOR, fontsize=7, ha="right",
        )  # fmt: skip
    axes.set_ylim(bottom - 0.07 * (top - bottom), top + 0.05 * (top - bottom))


def _against_context(results: Sequence[ModelResult], name: str, label: str, axes: Any) -> bool:
    """Points, and of a time the line from the lowest to the highest: nothing was measured between two contexts."""
    drawn = False
    for i, result in enumerate(results):
        figures = sorted(
            (int(c), f if isinstance(f, dict) else _exact(f)) for c, f in result.speed.get(name, {}).items()
        )
        if not figures or figures[0][1]["median"] <= 0:
            continue
        aside = 1 + 0.03 * (i - (len(results) - 1) / 2)  # of one context, so that none lies on another
        middle = [f["median"] for _, f in figures]
        around = [[f["median"] - f["low"] for _, f in figures], [f["high"] - f["median"] for _, f in figures]]
        style = {"color": _SERIES[i % len(_SERIES)], "fmt": _MARKERS[i % 8], "markersize": 4, "label": result.model}
        axes.errorbar([aside * context for context, _ in figures], middle, around, linewidth=1, **style)
        drawn = True
    axes.set(xlabel="tokens of context", ylabel=label)
    if drawn:
        axes.set(xscale="log", yscale="log" if name == "state" else "linear")
        if name == "decode":
            axes.set_ylim(bottom=0)
        ticks = sorted({int(c) for result in results for c in result.speed.get(name, {})})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    return drawn


def _exact(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value}


def _amount(value: float, _: object = None) -> str:
    """200 k, 3 M, but 0.25 and not 250 m."""
    from matplotlib.ticker import EngFormatter

    return f"{value:g}" if abs(value) < 1000 else EngFormatter(sep="\u2009")(value)
