"""Pictures of forecasts: intervals against the values of a few series, and the error by gap and by horizon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glissando.evaluation.figures import figure_and_axes
from glissando.series.heads import Head
from glissando.series.scores import MEAN, Answers

#: file names of the pictures
FORECASTS, ERRORS = "forecasts.png", "errors.png"
#: channels and bins that are drawn at most, and values that a bin has at least
_CHANNELS, _BINS, _LEAST = 4, 8, 20
_COLOURS = {"model": "#0b6e99", "last value": "#c26a00", "anchor": "#5a8f29", MEAN: "#9aa5b1"}


class Track(NamedTuple):
    """One channel of one series: its values, and what was forecast of some of them, or of times after them."""

    series: str
    channel: str
    times: np.ndarray  # (T,)
    values: np.ndarray  # (T,) NaN where none was observed
    at: np.ndarray  # (N,) times that were forecast
    middle: np.ndarray  # (N,)
    low: np.ndarray | None  # (N,) lower end of the interval
    high: np.ndarray | None  # (N,)


def draw_forecasts(tracks: Sequence[Track], out: Path, unit: str, share: float = 0.9) -> Path:
    """Each track's values as points, and its forecasts as a line within the central interval of `share`."""
    columns = min(2, len(tracks))
    figure, every = figure_and_axes(columns, -(-len(tracks) // columns))
    for axes, track in zip(every, tracks, strict=False):
        order = np.argsort(track.at, kind="stable")
        at = track.at[order]
        if track.low is not None and track.high is not None:
            axes.fill_between(
                at, track.low[order], track.high[order], color="#0b6e99", alpha=0.2, linewidth=0, label=f"{share:.0%}"
            )
        axes.plot(at, track.middle[order], color="#0b6e99", linewidth=1.4, label="forecast")
        axes.plot(track.times, track.values, ".", color="#222222", markersize=4, label="value")
        axes.set_title(f"{track.channel}{f', {track.series}' if track.series else ''}", fontsize=10)
        axes.set_xlabel(unit)
    for axes in every[len(tracks) :]:
        axes.set_visible(False)
    every[0].legend(frameon=False, fontsize=8)
    figure.savefig(out)
    return out


def draw_errors(answers: Answers, head: Head, channels: Sequence[str], out: Path, unit: str) -> Path:
    """The root mean square error against the horizon and the gap, in bins of equally many values, for the channels with
    most values: of the model and the baselines."""
    predicted = {"model": head.mean(answers.params).double().numpy(), **answers.baselines}
    counts = np.bincount(answers.channel, minlength=len(channels))
    drawn = [each for each in np.argsort(-counts, kind="stable")[:_CHANNELS].tolist() if counts[each]]
    figure, every = figure_and_axes(2, len(drawn))
    for row, number in enumerate(drawn):
        chosen = answers.channel == number
        for axes, (name, distance) in zip(
            every[2 * row : 2 * row + 2],
            (("horizon", answers.horizon), ("gap since the channel's last value", answers.gap)),
            strict=True,
        ):
            for who, values in predicted.items():
                x, y = _binned(distance[chosen], (values - answers.target)[chosen] ** 2)
                axes.plot(x, np.sqrt(y), marker="o", markersize=3, linewidth=1.4, color=_COLOURS.get(who), label=who)
            positive = distance[chosen][distance[chosen] > 0]
            if len(positive) and np.nanmax(positive) > 20 * np.nanmin(positive):
                axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.set_xlabel(f"{name} ({unit})")
            axes.set_ylabel(f"error of {channels[number]}")
    every[0].legend(frameon=False, fontsize=8)
    figure.savefig(out)
    return out


def _binned(distance: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median distance and the mean square of bins of equally many values; equal distances share a bin."""
    known = ~np.isnan(distance) & ~np.isnan(squares)
    distance, squares = distance[known], squares[known]
    if not len(distance):
        return np.zeros(0), np.zeros(0)
    bins = max(1, min(_BINS, len(distance) // _LEAST))
    edges = np.unique(np.quantile(distance, np.linspace(0, 1, bins + 1)[1:-1]))
    number = np.searchsorted(edges, distance)
    found = [(np.median(distance[number == each]), squares[number == each].mean()) for each in np.unique(number)]
    x, y = zip(*found, strict=True)
    return np.array(x), np.array(y)
