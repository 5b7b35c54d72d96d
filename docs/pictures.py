"""Pictures of the documents, drawn as SVG from the records of docs/comparison; `make test` compares the two.

    python docs/pictures.py            says which picture is not what its records say, and fails if any is not
    python docs/pictures.py --write    draws them all, into docs/pictures

A picture has its own paper, light or dark as the reader's system is, and letters that a phone shows at 10 pixels.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures"
WIDTH = 420
#: light and dark: ink, its softer form, lines, paper, and the colours of what is drawn
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"), "soft": ("#59636e", "#9da7b1"), "line": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#161b22"), "blue": ("#0b6e99", "#5cb8e0"), "orange": ("#b5540a", "#f0a35e"),
    "green": ("#3f7d20", "#8ccf6a"), "violet": ("#7d3c98", "#d09ce0"), "grey": ("#6b7280", "#a8b0ba"),
    "red": ("#b3261e", "#ff8a80"),
}  # fmt: skip
#: of the models that are recommended, everywhere alike
MODEL = {
    "spectral-delta-nano": "blue", "composite-nano": "green", "hybrid-ode-nano": "red",
    "transformer-plus-nano": "orange", "liquid-ssm-nano": "grey", "delta-nano": "violet",
}  # fmt: skip


def _style() -> str:
    def scheme(place: int) -> str:
        return ";".join(f"--{name}:{pair[place]}" for name, pair in COLOURS.items())

    return (
        f"svg{{{scheme(0)}}}@media(prefers-color-scheme:dark){{svg{{{scheme(1)}}}}}"
        "text{font:13px system-ui,sans-serif;fill:var(--ink)}.title{font-weight:600;font-size:15px}"
        ".soft{fill:var(--soft)}.grid{stroke:var(--line)}.path{fill:none;stroke-linejoin:round}"
    )


class Drawing:
    """An SVG that grows: shapes in pixels."""

    def __init__(self, title: str, about: str, height: int) -> None:
        self.height, self.parts = height, list[str]()
        self.head = f"<title>{escape(title)}</title><desc>{escape(about)}</desc><style>{_style()}</style>"
        self.text(12, 24, title, "title")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", colour: str = "") -> None:
        extra = f' class="{kind}"' if kind else ""
        extra += f' text-anchor="{anchor}"' if anchor != "start" else ""
        extra += f' style="fill:var(--{colour})"' if colour else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(words)}</text>')

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float = 2, more: str = "") -> None:
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path class="path" d="{d}" style="stroke:var(--{colour})" stroke-width="{width:g}"{more}/>')

    def area(self, points: Sequence[tuple[float, float]], colour: str, opacity: float) -> None:
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "z"
        self.parts.append(f'<path d="{d}" style="fill:var(--{colour})" opacity="{opacity:g}"/>')

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="fill:var(--{colour})"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 0.14) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'style="fill:var(--{colour});stroke:var(--{colour})" fill-opacity="{opacity:g}"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "soft") -> None:
        self.path([(x, y), (to_x, to_y)], colour, 1.5)
        angle = math.atan2(to_y - y, to_x - x)
        wings = [(to_x - 7 * math.cos(angle + a), to_y - 7 * math.sin(angle + a)) for a in (0.45, -0.45)]
        self.area([(to_x, to_y), *wings], colour, 1)

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH * 4 // 3}" '
            f'height="{self.height * 4 // 3}" role="img">{self.head}'
            f'<rect width="{WIDTH}" height="{self.height}" rx="8" style="fill:var(--paper)"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


class Chart(Drawing):
    """Axes with a title, units, and ticks that are named; what is drawn in them is in the units of the data."""

    def __init__(
        self,
        title: str,
        about: str,
        x: tuple[str, dict[float, str]],
        y: tuple[str, dict[float, str]],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        log: str = "",
        height: int = 310,
    ) -> None:
        super().__init__(title, about, height)
        self.log, self.x_range, self.y_range = log, x_range, y_range
        self.left, self.right, self.top, self.bottom = 50, WIDTH - 14, 54, height - 48
        self.text(12, 44, y[0], "soft")
        self.text((self.left + self.right) / 2, height - 10, x[0], "soft", "middle")
        for value, name in y[1].items():
            _, at = self.at(x_range[0], value)
            self.parts.append(f'<path class="grid" d="M{self.left} {at:.1f}H{self.right}"/>')
            self.text(self.left - 6, at + 4.5, name, "soft", "end")
        for value, name in x[1].items():
            at, _ = self.at(value, y_range[0])
            self.parts.append(f'<path class="grid" d="M{at:.1f} {self.bottom}v5"/>')
            self.text(at, self.bottom + 19, name, "soft", "middle")
        self.path([(self.left, self.bottom), (self.right, self.bottom)], "soft", 1)
        across, up = self.right - self.left, self.bottom - self.top
        self.parts.append(
            f'<clipPath id="axes"><rect x="{self.left}" y="{self.top}" width="{across}" height="{up}"/></clipPath>'
        )

    def at(self, x: float, y: float) -> tuple[float, float]:
        def share(value: float, low: float, high: float, log: bool) -> float:
            return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

        across, up = share(x, *self.x_range, "x" in self.log), share(y, *self.y_range, "y" in self.log)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 2.2, more: str = "") -> None:
        self.path([self.at(*point) for point in points], colour, width, f'{more} clip-path="url(#axes)"')

    def mark(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        self.dot(*self.at(x, y), colour, radius)

    def label(
        self, x: float, y: float, words: str, colour: str, anchor: str = "start", by: tuple[int, int] = (0, 0)
    ) -> None:
        across, up = self.at(x, y)
        self.text(across + by[0], up + by[1], words, "", anchor, colour)


Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (DOCS / "comparison" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _ticks(*values: float) -> dict[float, str]:
    return {value: f"{value:g}" for value in values}


_CONTEXTS = {256: "256", 1024: "1,024", 4096: "4,096", 16384: "16,384"}
#: the entropy of the 128 held-out stories, in bits per byte: tests tie it to the code
FLOOR = 0.2893


def learning_curves() -> str:
    chart = Chart(
        "What a million parameters learn",
        "Held-out bits per byte after 2, 8.1 and 33.4 MB of stories, and their floor.",
        ("stories read in training (MB); a mark is a seed", _ticks(2, 8.1, 33.4)),
        ("held-out bits per byte", _ticks(0.25, 0.3, 0.35, 0.4, 0.45, 0.5)),
        (1.7, 39),
        (0.25, 0.505),
        "x",
    )
    bits = _bits()
    chart.line([(1.7, FLOOR), (39, FLOOR)], "red", 1.5, ' stroke-dasharray="5 4"')
    chart.label(1.8, FLOOR, f"exact floor {FLOOR:.3f}: no model can be lower", "red", by=(0, 17))
    places = {
        "transformer-plus-nano": (8.1, 0.413, "start", (10, 0)),
        "composite-nano": (2, 0.473, "start", (58, 5)),
        "spectral-delta-nano": (1.8, 0.322, "start", (0, 0)),
        "delta-nano": (8.1, 0.326, "start", (8, 0)),
    }
    for name, (x, y, anchor, by) in places.items():
        line = [(size / 1e6, seeds) for (size, model), seeds in sorted(bits.items()) if model == name]
        chart.line([(size, sum(seeds) / len(seeds)) for size, seeds in line], MODEL[name])
        for size, seeds in line:
            for value in seeds:
                chart.mark(size, value, MODEL[name], 3)
        chart.label(x, y, name, MODEL[name], anchor, by)
    return chart.svg()


def _bits() -> dict[tuple[int, str], list[float]]:
    """(bytes, model): held-out bits per byte of each seed, of stories."""
    found: dict[tuple[int, str], list[float]] = {}
    for row in rows("recipe"):
        if row["corpus"] == "stories":
            found.setdefault((int(row["bytes"]), row["model"]), []).append(float(row["bits_per_byte"]))
    return found


def state_size() -> str:
    chart = Chart(
        "What a model keeps of what it read",
        "Bits per byte against bytes of state.",
        (
            "state of one text (bytes), after 256 to 16,384 tokens",
            {1e5: "100 k", 1e6: "1 M", 1e7: "10 M", 1e8: "100 M"},
        ),
        ("held-out bits per byte after 8.1 MB", _ticks(0.28, 0.32, 0.36, 0.40, 0.44)),
        (3e4, 1.5e8),
        (0.27, 0.45),
        "x",
    )
    bits = _bits()
    sizes: dict[str, list[float]] = {}
    for row in rows("decoding"):
        sizes.setdefault(row["model"], []).append(float(row["state_bytes"]))
    chart.line([(3e4, FLOOR), (1.5e8, FLOOR)], "red", 1.5, ' stroke-dasharray="5 4"')
    chart.label(1.4e8, FLOOR, f"floor {FLOOR:.3f}", "red", "end", (0, 16))
    for name in ("spectral-delta-nano", "composite-nano", "transformer-plus-nano"):
        seeds = bits[8_100_000, name]
        mean = sum(seeds) / len(seeds)
        low, high = min(sizes[name]), max(sizes[name])
        if high > low:
            chart.line([(low, mean), (high, mean)], MODEL[name], 4)
        chart.mark(low, mean, MODEL[name], 5)
        chart.mark(high, mean, MODEL[name], 5)
        side = "start" if name == "spectral-delta-nano" else "end"
        chart.label(
            low if side == "start" else high, mean, name, MODEL[name], side, (-4 if side == "start" else 4, -12)
        )
        if high == low:
            chart.label(low, mean, "never grows:", MODEL[name], by=(-4, -28))
    return chart.svg()


def milliseconds() -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows("decoding"):
        points.setdefault(row["model"], []).append((float(row["context"]), float(row["milliseconds"])))
    chart = Chart(
        "What a token costs",
        "Milliseconds of one core for a token against tokens read before it.",
        ("tokens read before", dict(_CONTEXTS)),
        ("CPU time of a token (ms), compiled step", _ticks(0, 2, 4, 6, 8, 10)),
        (220, 19000),
        (0, 10),
        "x",
    )
    for name, line in points.items():
        chart.line(line, MODEL[name])
        for point in line:
            chart.mark(*point, MODEL[name])
    chart.label(256, 9, "from the top:", "soft")
    for place, name in enumerate(sorted(points, key=lambda name: -points[name][-1][1]), 1):
        chart.label(256, 9, name, MODEL[name], by=(0, 18 * place))
    return chart.svg()


def flow() -> str:
    chart = Chart(
        "One flow, five settings of its dial",
        "Paths of the representation over depth for five settings of the mood dial.",
        ("distance from the start, sad left, happy right", _ticks(-1, -0.5, 0, 0.5, 1)),
        ("distance that all settings share", _ticks(0, 0.5, 1, 1.5)),
        (-1.2, 1.2),
        (-0.2, 1.5),
        height=330,
    )
    colours = {"-1": "orange", "-0.5": "orange", "0": "grey", "0.5": "blue", "1": "blue"}
    paths: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows("flow"):
        paths.setdefault((row["u"], row["prompt"]), []).append((float(row["apart"]), float(row["along"])))
    for (u, prompt), points in paths.items():
        if prompt != "mean" and u in ("-1", "1"):
            chart.line(points, colours[u], 1, ' opacity="0.4"')
    for (u, prompt), points in paths.items():
        if prompt == "mean":
            chart.line(points, colours[u], 3 if u in ("-1", "0", "1") else 2)
            chart.mark(*points[-1], colours[u], 4)
            words = {"-1": "u = -1, sad", "0": "u = 0", "1": "u = 1, happy"}.get(u)
            if words:
                chart.label(*points[-1], words, colours[u], {"-1": "end", "0": "middle"}.get(u, "start"), (0, -12))
    return chart.svg()


def forecast() -> str:
    record = [{name: float(value) for name, value in row.items() if value} for row in rows("forecast")]
    values = [(row["time"], row["value"]) for row in record if "value" in row]
    ahead = [row for row in record if "low" in row]
    chart = Chart(
        "A forecast at uneven times",
        "Values before and after the time of a forecast, its median and 90 % interval.",
        ("time since the last value that was read (s)", _ticks(-15, -10, -5, 0, 5, 10)),
        ("value a, which the packaged model forecasts", _ticks(-1.5, -1, -0.5, 0, 0.5, 1, 1.5)),
        (-18.5, 12.5),
        (-1.7, 1.7),
    )
    chart.area(
        [chart.at(row["time"], row["low"]) for row in ahead]
        + [chart.at(row["time"], row["high"]) for row in ahead[::-1]],
        "blue",
        0.22,
    )
    chart.line([(row["time"], row["median"]) for row in ahead], "blue")
    chart.line([(0, -1.7), (0, 1.1)], "soft", 1, ' stroke-dasharray="3 3"')
    for time, value in values:
        chart.mark(time, value, "ink" if time <= 0 else "orange", 3)
    chart.label(-18, 1.55, "values read", "ink")
    chart.label(12.3, 1.25, "median, 90 % interval", "blue", "end")
    chart.label(0.5, -1.45, "what came", "orange")
    return chart.svg()


#: of the picture of hazards
_SECONDS = 20


def hazard() -> str:
    record = rows("hazard")
    curve = [(float(row["time"]), float(row["hazard"]), float(row["truth"])) for row in record if row["hazard"]]
    events = [float(row["time"]) for row in record if not row["hazard"]]
    start = events[len(events) // 2] - 2
    end = start + _SECONDS
    curve = [row for row in curve if start <= row[0] <= end]
    chart = Chart(
        "Each event makes others likelier",
        "The hazard of a model of events beside the true one.",
        ("seconds; a stroke is an event", {start + t: f"{t}" for t in range(0, _SECONDS + 1, 4)}),
        ("hazard (events a second)", _ticks(0, 1, 2, 3, 4)),
        (start, end),
        (-0.3, 4.2),
    )
    chart.line([(t, model) for t, model, _ in curve], "blue", 2.6)
    chart.line([(t, truth) for t, _, truth in curve], "orange", 1.6, ' stroke-dasharray="5 3"')
    for t in events:
        if start <= t <= end:
            x, y = chart.at(t, -0.04)
            chart.path([(x, y), (x, y + 12)], "ink", 1.4)
    chart.label(end, 3.9, "the model", "blue", "end")
    chart.label(end, 3.9, "the true process", "orange", "end", (0, 18))
    return chart.svg()


def parts() -> str:
    drawing = Drawing(
        "Blocks, mixers and depth",
        "Tokens are embedded and pass through blocks. The depth decides how blocks follow each other. In a block a "
        "mixer moves information along time, from state to state, and an MLP works on each token.",
        392,
    )

    def box(x: float, y: float, width: float, words: str, colour: str) -> None:
        drawing.box(x, y, width, 28, colour, 0.18)
        if words:
            drawing.text(x + width / 2, y + 18.5, words, "", "middle")

    drawing.text(79, 58, "tokens", "soft", "middle")
    drawing.arrow(79, 62, 79, 74)
    box(20, 76, 118, "embedding", "grey")
    drawing.arrow(79, 104, 79, 118)
    drawing.box(12, 120, 134, 158, "violet", 0.06)
    drawing.text(20, 137, "depth", "", "start", "violet")
    for y, words in ((146, "block 1"), (190, "block 2"), (242, "block N")):
        box(24, y, 110, words, "blue")
    drawing.arrow(79, 174, 79, 188)
    drawing.text(79, 232, "\u22ee", "soft", "middle")
    drawing.arrow(79, 278, 79, 292)
    box(20, 294, 118, "norm, head", "grey")
    drawing.text(79, 340, "the next token", "soft", "middle")
    drawing.path([(134, 190), (176, 66)], "blue", 1, ' stroke-dasharray="3 3"')
    drawing.path([(134, 218), (176, 200)], "blue", 1, ' stroke-dasharray="3 3"')
    drawing.box(176, 56, 232, 148, "blue", 0.06)
    drawing.text(184, 73, "a block", "", "start", "blue")
    for y, words, colour in ((84, "mixer", "orange"), (144, "MLP", "grey")):
        box(200, y, 62, "norm", "grey")
        drawing.arrow(262, y + 14, 282, y + 14)
        box(284, y, 70, words, colour)
        drawing.arrow(354, y + 14, 376, y + 14)
        drawing.text(386, y + 19, "+", "title", "middle")
        drawing.path([(190, y + 14), (190, y + 42), (386, y + 42), (386, y + 24)], "soft", 1.5)
        drawing.arrow(190, y + 14, 200, y + 14)
    drawing.box(176, 222, 232, 118, "orange", 0.06)
    drawing.text(184, 239, "a mixer, along time", "", "start", "orange")
    for x, time in ((196, "t-1"), (259, "t"), (322, "t+1")):
        box(x, 266, 46, "", "orange")
        drawing.arrow(x + 23, 312, x + 23, 296)
        drawing.text(x + 23, 328, f"x({time})", "soft", "middle")
        drawing.arrow(x + 23, 266, x + 23, 250)
        drawing.arrow(x - 18, 280, x - 2, 280)
    drawing.arrow(368, 280, 404, 280)
    drawing.text(404, 272, "state", "soft", "end")
    drawing.text(12, 364, "depth: discrete, flow (an ODE with dials), tied", "", "start", "violet")
    drawing.text(12, 382, "mixer: attention, spectral, liquid, delta, tau", "", "start", "orange")
    return drawing.svg()


def laws() -> str:
    drawing = Drawing(
        "The contract's three laws",
        "Split: one call, or two with a state in between. Batch: a row alone, or beside others. All parameters learn.",
        400,
    )

    def box(x: float, y: float, width: float, words: str, colour: str = "grey") -> None:
        drawing.box(x, y, width, 26, colour, 0.18)
        drawing.text(x + width / 2, y + 17.5, words, "", "middle")

    drawing.text(12, 56, "Split law", "", "start", "blue")
    drawing.text(82, 56, "one call, or two with the state in between", "soft")
    for x, words in ((12, "a"), (62, "b")):
        box(x, 70, 50, words)
        box(x, 166, 50, f"y({words})")
    box(12, 118, 100, "forward", "blue")
    drawing.arrow(62, 98, 62, 116)
    drawing.arrow(62, 146, 62, 164)
    drawing.text(132, 136, "=", "title", "middle")
    for x, words in ((152, "a"), (272, "b")):
        box(x, 70, 72, words)
        drawing.arrow(x + 36, 98, x + 36, 116)
        box(x, 118, 72, "forward", "blue")
        drawing.arrow(x + 36, 146, x + 36, 164)
        box(x, 166, 72, f"y({words})")
        drawing.arrow(x + 72, 131, x + 118, 131)
        drawing.text(x + 94, 124, "state", "soft", "middle")
    drawing.text(12, 232, "Batch law", "", "start", "green")
    drawing.text(90, 232, "a row does not depend on others, nor on padding", "soft")
    box(12, 246, 80, "row 1", "green")
    box(92, 246, 60, "padding")
    box(12, 274, 140, "row 2")
    drawing.text(178, 276, "=", "title", "middle")
    box(204, 258, 80, "row 1", "green")
    drawing.text(296, 276, "for row 1", "soft")
    drawing.text(12, 340, "No dead parameters", "", "start", "orange")
    drawing.text(162, 340, "each has a gradient", "soft")
    box(12, 354, 60, "loss", "orange")
    drawing.arrow(74, 367, 202, 367)
    drawing.text(136, 361, "gradient", "soft", "middle")
    box(204, 354, 150, "every parameter", "orange")
    return drawing.svg()


#: of the picture of a leaking state: times of the observations; the input is 1 until the second and 0 after it
_TIMES = (0.0, 1.0, 1.3, 2.1, 4.0, 4.4, 7.5, 10.0)


def leaking_state() -> str:
    """x' = -x / tau + u for three time constants, and its exact steps at uneven times."""

    def after(x: float, u: float, dt: float, tau: float) -> float:
        return math.exp(-dt / tau) * x + tau * (1 - math.exp(-dt / tau)) * u

    chart = Chart(
        "A state that leaks, x' = -x/\u03c4 + u",
        "Three time constants: lines are the equation, points the exact steps at uneven times.",
        ("time; the input u is 1 in the grey part, then 0", _ticks(0, 2, 4, 6, 8, 10)),
        ("state x", _ticks(0, 0.25, 0.5, 0.75, 1)),
        (0, 10.2),
        (0, 1.05),
    )
    chart.area([chart.at(*corner) for corner in ((0, 0), (1, 0), (1, 1.05), (0, 1.05))], "grey", 0.18)
    for tau, colour, place in ((1, "orange", 0.13), (2, "blue", 0.36), (8, "green", 0.86)):
        top = after(0, 1, 1, tau)
        fine = ((t, after(0, 1, t, tau) if t < 1 else after(top, 0, t - 1, tau)) for t in (i / 20 for i in range(201)))
        chart.line([*fine], colour)
        x = 0.0
        for before, now in zip(_TIMES, (*_TIMES[1:], math.inf), strict=True):
            chart.mark(before, x, colour)
            x = after(x, float(before < 1), now - before, tau)
        chart.label(2.9, place, f"\u03c4 = {tau}", colour)
    return chart.svg()


PICTURES: dict[str, Callable[[], str]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (learning_curves, state_size, milliseconds, parts, laws, leaking_state, flow, forecast, hazard)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="draw them all")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    other = [
        name
        for name, draw in PICTURES.items()
        if not (FOLDER / f"{name}.svg").is_file() or draw() != (FOLDER / f"{name}.svg").read_text()
    ]
    for name in other:
        if options.write:
            (FOLDER / f"{name}.svg").write_text(PICTURES[name]())
        else:
            print(f"docs/pictures/{name}.svg is not what its records say; python docs/pictures.py --write draws it")
    return int(bool(other) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
