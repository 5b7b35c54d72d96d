"""The report's pictures: SVG in the colours of the page, light or dark as the reader has it; files bring them along."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glissando.compare.results import ModelResult, bits_on

# Colours that stand for the page's own until `_themed` puts those in.
_INK, _LINE, _FLOOR = "#010203", "#010204", "#010205"
_SERIES = tuple(f"#0102{16 + number:02x}" for number in range(8))
_MARKERS = "osD^vPX*"
#: the page's colours, for light and dark
COLOURS = """\
:root {
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2127; --soft: #59626e; --line: #8d97a3; --rule: #e2e0db;
  --floor: #b3261e; --wash: #cfe3ec; --note: #fdf3d8;
  --series-0: #4b5563; --series-1: #9a6700; --series-2: #0b6e99; --series-3: #8b3fa8; --series-4: #1a7f4b;
  --series-5: #c2410c; --series-6: #3f51b5; --series-7: #ad1457;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1c2026; --ink: #e6e8eb; --soft: #a3acb8; --line: #717c89; --rule: #30363e;
    --floor: #ff8a80; --wash: #1f4558; --note: #3a311a;
    --series-0: #b8c0ca; --series-1: #e3b341; --series-2: #58b7df; --series-3: #cf94e8; --series-4: #5fce93;
    --series-5: #ff9a62; --series-6: #9fa8ff; --series-7: #ff86b3;
  }
}
"""


def colour_name(index: int) -> str:
    """The page's colour of a model."""
    return f"var(--series-{index % len(_SERIES)})"


def figures(results: Sequence[ModelResult], floor: float | None) -> dict[str, str]:
    """name -> SVG, of those for which there is data."""
    drawn = {
        "bits": _draw("bits", lambda axes: _bits(axes, results, floor), 0.9 + 0.32 * len(results)),
        "tokens": _draw("tokens", lambda axes: _curves(axes, results, "tokens", "tokens read", floor)),
        "flops": _draw("flops", lambda axes: _curves(axes, results, "flops", "training FLOPs", floor)),
        "seconds": _draw("seconds", lambda axes: _curves(axes, results, "seconds", "seconds", floor)),
        "decode": _draw("decode", lambda axes: _decode(axes, results)),
        "state": _draw("state", lambda axes: _state(axes, results)),
        "sweep": _draw("sweep", lambda axes: _sweep(axes, results)),
    }
    return {name: picture for name, picture in drawn.items() if picture}


def as_files(pictures: Mapping[str, str]) -> dict[str, str]:
    """name -> SVG that stands by itself, with both sets of colours."""
    style = f"<style>{COLOURS}text {{ font-family: system-ui, sans-serif }}</style>"
    return {
        name: svg.replace(">", f">{style}<rect width='100%' height='100%' fill='var(--paper)'/>", 1)
        for name, svg in pictures.items()
    }


def _draw(name: str, fill: Callable[[Any], bool], height: float = 3.2) -> str:
    """The SVG of what `fill` draws; "" if it draws nothing."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK,
        "axes.edgecolor": _LINE, "xtick.color": _LINE, "ytick.color": _LINE, "grid.color": _LINE,
        "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.35, linewidth=0.6)
        if not fill(axes):
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _themed(text.getvalue(), name)


def _label_ends(axes: Any, ends: Sequence[tuple[float, int, str]]) -> None:
    """Each curve's model, in its colour, right of the axes at the height (data coordinates) where the curve ends;
    labels that would overlap are moved apart."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = {i: float(to_axes.transform((axes.get_xlim()[0], y))[1]) for y, i, _ in ends}
    names, gap = {i: name for _, i, name in ends}, 0.062
    order = sorted(heights, key=lambda i: heights[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(heights[i], placed[-1] + gap if placed else heights[i]))
    overflow = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for at in range(len(placed) - 1, -1, -1):  # back into the axes, from the top down
        above = placed[at + 1] - gap if at + 1 < len(placed) else placed[at] - overflow
        placed[at] = min(placed[at], above)
    for i, height in zip(order, placed, strict=True):
        axes.annotate(
            names[i], (1.015, height), xycoords="axes fraction", va="center", fontsize=8,
            color=_SERIES[i % len(_SERIES)], annotation_clip=False,
        )  # fmt: skip


def _themed(svg: str, name: str) -> str:
    """Without its prologue, ids of its own, as wide as its place, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    svg = opening.replace("<svg", '<svg class="chart"', 1) + ">" + rest
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    colours = {_INK: "var(--ink)", _LINE: "var(--line)", _FLOOR: "var(--floor)"}
    colours |= {colour: colour_name(number) for number, colour in enumerate(_SERIES)}
    for colour, variable in colours.items():
        svg = svg.replace(colour, variable)
    return svg


def _style(index: int) -> dict[str, Any]:
    return {"color": _SERIES[index % len(_SERIES)], "linewidth": 1.5}


def _bits(axes: Any, results: Sequence[ModelResult], floor: float | None) -> bool:
    """A line a model: each seed a ring, the mean a dot, the interval a bar."""
    shown = [(i, result) for i, result in enumerate(results) if result.bits is not None]
    for i, result in shown:
        assert result.bits is not None
        axes.plot([result.bits.low, result.bits.high], [i, i], **_style(i))
        axes.plot(result.bits.seeds, [i] * len(result.bits.seeds), "o", markersize=7, markerfacecolor="none",
                  color=_SERIES[i % len(_SERIES)], linewidth=1)  # fmt: skip
        axes.plot([result.bits.value], [i], "o", markersize=4, **_style(i))
    if floor is not None:
        axes.axvline(floor, color=_FLOOR, linewidth=1.2, linestyle="--", zorder=1)
        axes.text(floor, -0.5, f" entropy floor {floor:.3f}", color=_FLOOR, fontsize=7.5, va="bottom")
    axes.set_yticks(range(len(results)), [result.model for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel("bits per byte, held out")
    return bool(shown)


def _curves(axes: Any, results: Sequence[ModelResult], column: str, label: str, floor: float | None) -> bool:
    """Held-out bits per byte where they were measured, and faintly the training's; a line a seed."""
    curves: list[list[tuple[float, float]]] = []
    ends: dict[int, float] = {}
    for i, result in enumerate(results):
        for rows in result.curves:
            if column not in rows[-1]:  # FLOPs of a mixer that has no function for them
                continue
            seen = [(row[column], row["train_bits_per_byte"]) for row in rows]
            axes.plot(*zip(*seen, strict=True), color=_SERIES[i % len(_SERIES)], linewidth=0.6, alpha=0.25)
            if held := [(row[column], row["valid_bits_per_byte"]) for row in rows if "valid_bits_per_byte" in row]:
                axes.plot(*zip(*held, strict=True), marker=_MARKERS[i % 8], markersize=3.2, **_style(i))
                curves.append(held)
                ends.setdefault(i, held[-1][1])
    axes.set(xlabel=label, ylabel="bits per byte")
    _engineering(axes.xaxis)
    if not curves:
        return False
    _loss_axis(axes, curves, floor)
    _label_ends(axes, [(y, i, results[i].model) for i, y in ends.items()])
    return True


def _loss_axis(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], floor: float | None) -> None:
    """The range of the curves after their first fifth, in which all fall alike; with the floor, where that leaves the
    curves at least half of the height."""
    bottom = min(y for curve in curves for _, y in curve)
    top = max(y for curve in curves for x, y in curve if x >= 0.2 * curve[-1][0])
    top = max(top, bottom + 0.02)
    if floor is not None and bottom - floor <= top - bottom:
        bottom = min(bottom, floor)
        axes.axhline(floor, color=_FLOOR, linewidth=1.2, linestyle="--", zorder=1)
        axes.text(axes.get_xlim()[0], floor, f" entropy floor {floor:.3f}", color=_FLOOR, fontsize=7.5, va="bottom")
    elif floor is not None:
        axes.text(0.01, 0.01, f"entropy floor {floor:.3f}, below this scale", color=_FLOOR, fontsize=7.5,
                  transform=axes.transAxes)  # fmt: skip
    axes.set_ylim(bottom - 0.07 * (top - bottom), top + 0.05 * (top - bottom))


def _decode(axes: Any, results: Sequence[ModelResult]) -> bool:
    return _against_context(axes, results, "decode", "ms a token", lambda figure: figure["median"])


def _state(axes: Any, results: Sequence[ModelResult]) -> bool:
    return _against_context(axes, results, "state", "bytes of state", float)


def _against_context(
    axes: Any, results: Sequence[ModelResult], name: str, label: str, value: Callable[[Any], float]
) -> bool:
    ends = []
    for i, result in enumerate(results):
        points = [(int(context), value(figure)) for context, figure in result.speed.get(name, {}).items()]
        points = sorted(point for point in points if point[1] > 0)
        if points:
            ends.append((points[-1][1], i, result.model))
            axes.plot(*zip(*points, strict=True), marker=_MARKERS[i % 8], markersize=4, **_style(i))
    axes.set(xlabel="tokens of context", ylabel=label)
    if ends:
        axes.set(xscale="log", yscale="log")
        ticks = sorted({int(c) for result in results for c in result.speed.get(name, {})})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        _decades(axes.yaxis)
        _label_ends(axes, ends)
    return bool(ends)


def _sweep(axes: Any, results: Sequence[ModelResult]) -> bool:
    """Bits per byte on the rows that choose, by learning rate."""
    ends = []
    for i, result in enumerate(results):
        good = [run for run in result.sweep if run.failed is None]
        points = sorted((run.job.learning_rate, bits_on(run.figures, slice(0, None, 2))) for run in good)
        if points:
            ends.append((points[-1][1], i, result.model))
            axes.plot(*zip(*points, strict=True), marker=_MARKERS[i % 8], markersize=4, **_style(i))
    axes.set(xlabel="learning rate", ylabel="bits per byte")
    if ends:
        axes.set_xscale("log")
        ticks = sorted({run.job.learning_rate for result in results for run in result.sweep})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        _label_ends(axes, ends)
    return bool(ends)


def _amount(value: float, _: object = None) -> str:
    """200 k, 3 M, but 0.25 and not 250 m."""
    from matplotlib.ticker import EngFormatter

    return f"{value:g}" if abs(value) < 1000 else EngFormatter(sep="\u2009")(value)


def _engineering(axis: Any) -> None:
    """200 k and not 2 x 10^5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_formatter(_amount)
    axis.set_major_locator(MaxNLocator(5))


def _decades(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, at the 1 alone where the span has many decades."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(_amount)
