"""The report's pictures: SVG in the colours of the page, light or dark as the reader has it; files bring them along."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
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


def figures(results: Sequence[ModelResult], floor: float | None, key: bool = False) -> dict[str, str]:
    """name -> SVG, of those for which there is data; `key`: with a legend of the models' colours."""
    models = [result.model for result in results] if key else None
    drawn = {
        "bits": _draw("bits", lambda axes: _bits(axes, results, floor), [] if key else None, len(results)),
        "tokens": _draw("tokens", lambda axes: _curves(axes, results, "tokens", "tokens read", floor), models),
        "flops": _draw("flops", lambda axes: _curves(axes, results, "flops", "training FLOPs", floor), models),
        "seconds": _draw("seconds", lambda axes: _curves(axes, results, "seconds", "seconds", floor), models),
        "decode": _draw("decode", lambda axes: _decode(axes, results), models),
        "state": _draw("state", lambda axes: _state(axes, results), models),
        "sweep": _draw("sweep", lambda axes: _sweep(axes, results), models),
    }
    return {name: picture for name, picture in drawn.items() if picture}


def files(results: Sequence[ModelResult], floor: float | None) -> dict[str, str]:
    """name -> SVG that stands by itself, with its key and both sets of colours."""
    style = f"<style>{COLOURS}text {{ font-family: system-ui, sans-serif }}</style>"
    return {
        name: svg.replace(">", f">{style}<rect width='100%' height='100%' fill='var(--paper)'/>", 1)
        for name, svg in figures(results, floor, key=True).items()
    }


def _draw(name: str, fill: Callable[[Any], bool], models: Sequence[str] | None = None, rows: int = 0) -> str:
    """The SVG of what `fill` draws, with a key of the `models` and the floor unless None; "" if there is nothing."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": _INK, "axes.labelcolor": _INK,
        "axes.edgecolor": _LINE, "xtick.color": _LINE, "ytick.color": _LINE, "grid.color": _LINE,
        "xtick.labelcolor": _INK, "ytick.labelcolor": _INK,
    }  # fmt: skip
    with rc_context(style):
        height = 0.9 + 0.32 * rows if rows else 3.1
        if models is not None:
            height += 0.2 * (len(models) // 2 + 1)
        figure = Figure(figsize=(4.4, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.35, linewidth=0.6)
        if not fill(axes):
            return ""
        if models is not None:
            _key(figure, axes, models)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _themed(text.getvalue(), name)


def _key(figure: Any, axes: Any, models: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], marker=_MARKERS[i % 8], markersize=4, **_style(i)) for i in range(len(models))]
    names = list(models)
    if any(line.get_color() == _FLOOR for line in axes.lines):
        lines.append(Line2D([], [], color=_FLOOR, linewidth=1.2, linestyle="--"))
        names.append("entropy floor")
    if names:
        figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False, fontsize=7.5)


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


def _floor_line(axes: Any, floor: float | None, upright: bool = False) -> None:
    if floor is not None:
        (axes.axvline if upright else axes.axhline)(floor, color=_FLOOR, linewidth=1.2, linestyle="--", zorder=1)


def _bits(axes: Any, results: Sequence[ModelResult], floor: float | None) -> bool:
    """A line a model: each seed a ring, the mean a dot, the interval a bar."""
    shown = [(i, result) for i, result in enumerate(results) if result.bits is not None]
    for i, result in shown:
        assert result.bits is not None
        axes.plot([result.bits.low, result.bits.high], [i, i], **_style(i))
        axes.plot(result.bits.seeds, [i] * len(result.bits.seeds), "o", markersize=7, markerfacecolor="none",
                  color=_SERIES[i % len(_SERIES)], linewidth=1)  # fmt: skip
        axes.plot([result.bits.value], [i], "o", markersize=4, **_style(i))
    _floor_line(axes, floor, upright=True)
    axes.set_yticks(range(len(results)), [result.model for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel("bits per byte, held out")
    return bool(shown)


def _curves(axes: Any, results: Sequence[ModelResult], column: str, label: str, floor: float | None) -> bool:
    """Held-out bits per byte where they were measured, and faintly the training's; a line a seed."""
    lowest, highest, some = 1e9, 0.0, False
    for i, result in enumerate(results):
        for rows in result.curves:
            if column not in rows[-1]:  # FLOPs of a mixer that has no function for them
                continue
            held = [(row[column], row["valid_bits_per_byte"]) for row in rows if "valid_bits_per_byte" in row]
            seen = [(row[column], row["train_bits_per_byte"]) for row in rows]
            axes.plot(*zip(*seen, strict=True), color=_SERIES[i % len(_SERIES)], linewidth=0.7, alpha=0.35)
            if held:
                some = True
                axes.plot(*zip(*held, strict=True), marker=_MARKERS[i % 8], markersize=3.2, **_style(i))
                lowest = min(lowest, min(value for _, value in held))
                highest = max(highest, max(value for _, value in held))
    _floor_line(axes, floor)
    axes.set(xlabel=label, ylabel="bits per byte")
    if some:
        _loss_axis(axes, lowest if floor is None else min(floor, lowest), highest)
    _engineering(axes.xaxis)
    return some


def _loss_axis(axes: Any, bottom: float, top: float) -> None:
    """From a little below `bottom`; logarithmic where the end would else be a strip, and nothing forbids it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if bottom > 0 and top / bottom > 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(bottom * (bottom / top) ** 0.05, top * (top / bottom) ** 0.05)
    else:
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.05 * (top - bottom))


def _decode(axes: Any, results: Sequence[ModelResult]) -> bool:
    return _against_context(axes, results, "decode", "ms a token", lambda figure: figure["median"])


def _state(axes: Any, results: Sequence[ModelResult]) -> bool:
    return _against_context(axes, results, "state", "bytes of state", float)


def _against_context(
    axes: Any, results: Sequence[ModelResult], name: str, label: str, value: Callable[[Any], float]
) -> bool:
    some = False
    for i, result in enumerate(results):
        points = [(int(context), value(figure)) for context, figure in result.speed.get(name, {}).items()]
        points = [point for point in points if point[1] > 0]
        if points:
            some = True
            axes.plot(*zip(*sorted(points), strict=True), marker=_MARKERS[i % 8], markersize=4, **_style(i))
    axes.set(xlabel="tokens of context", ylabel=label)
    if some:
        axes.set(xscale="log", yscale="log")
        ticks = sorted({int(c) for result in results for c in result.speed.get(name, {})})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        _decades(axes.yaxis)
    return some


def _sweep(axes: Any, results: Sequence[ModelResult]) -> bool:
    """Bits per byte on the rows that choose, by learning rate."""
    some = False
    for i, result in enumerate(results):
        points = [
            (run.job.learning_rate, bits_on(run.figures, slice(0, None, 2)))
            for run in result.sweep
            if run.failed is None
        ]
        if points:
            some = True
            axes.plot(*zip(*sorted(points), strict=True), marker=_MARKERS[i % 8], markersize=4, **_style(i))
    axes.set(xlabel="learning rate", ylabel="bits per byte")
    if some:
        axes.set_xscale("log")
        ticks = sorted({run.job.learning_rate for result in results for run in result.sweep})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    return some


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
