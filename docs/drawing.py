"""What the pictures of the documents are drawn with: an SVG with its own paper, and a chart with axes.

A picture is light or dark as the reader's system is, and has letters that a phone shows at 10 pixels.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH = 420
#: light and dark: ink, its softer form, lines, paper, and the colours of what is drawn
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"), "soft": ("#59636e", "#9da7b1"), "line": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#161b22"), "blue": ("#0b6e99", "#5cb8e0"), "orange": ("#b5540a", "#f0a35e"),
    "green": ("#3f7d20", "#8ccf6a"), "violet": ("#7d3c98", "#d09ce0"), "grey": ("#6b7280", "#a8b0ba"),
    "red": ("#b3261e", "#ff8a80"),
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

    def below(self, upper: Drawing) -> Drawing:
        """Both as one drawing with the upper one's title."""
        both = Drawing("", "", upper.height + self.height)
        lower = "\n".join(self.parts).replace('="axes"', '="lower"').replace("#axes", "#lower")
        both.head = upper.head
        both.parts = [*upper.parts, f'<g transform="translate(0 {upper.height})">\n{lower}\n</g>']
        return both

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

    def dust(self, points: Sequence[tuple[float, float]], colour: str, size: float) -> None:
        """Many small dots as one path."""
        d = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in (self.at(*point) for point in points))
        style = f"fill:none;stroke:var(--{colour});stroke-linecap:round"
        self.parts.append(f'<path d="{d}" style="{style}" stroke-width="{size:g}"/>')

    def ring(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        across, up = self.at(x, y)
        self.parts.append(
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{radius:g}" '
            f'style="fill:var(--paper);stroke:var(--{colour})" stroke-width="2"/>'
        )

    def label(
        self, x: float, y: float, words: str, colour: str, anchor: str = "start", by: tuple[int, int] = (0, 0)
    ) -> None:
        across, up = self.at(x, y)
        self.text(across + by[0], up + by[1], words, "", anchor, colour)


Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (DOCS / "comparison" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ticks(*values: float) -> dict[float, str]:
    return {value: f"{value:g}" for value in values}
