"""Pictures of forecasts: intervals against the values of a few series, and the error by gap and by horizon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from glissando.evaluation.figures import figure_and_axes, label_ends
from glissando.series.heads import Head, Point
from glissando.series.panel import SECONDS, Panel
from glissando.series.scores import ANCHOR, LAST, MEAN, SEASON, Answers

#: file names of the pictures
FORECASTS, ERRORS = "forecasts.png", "errors.png"
#: channels and bins that are drawn at most, and values that a bin has at least
_CHANNELS, _BINS, _LEAST = 4, 8, 20
#: tracks that are drawn at most, and forecasts of one
_TRACKS, _LONGEST = 4, 120
#: the share of the interval that is drawn
_SHARE = 0.9
_COLOURS = {
    "model": "#0b6e99",
    LAST: "#c26a00",
    ANCHOR: "#5a8f29",
    MEAN: "#9aa5b1",
    SEASON: "#8e5ba6",
}


class Track(NamedTuple):
    """One channel of one series: its values, and what was forecast of some of them, or of times after them, in order of
    their origins; a line ends where another origin begins."""

    series: str
    channel: str
    times: np.ndarray  # (T,)
    values: np.ndarray  # (T,) NaN where none was observed
    at: np.ndarray  # (N,) times that were forecast
    middle: np.ndarray  # (N,)
    low: np.ndarray | None  # (N,) lower end of the interval
    high: np.ndarray | None  # (N,)
    breaks: np.ndarray | None = None  # places in `at` before which an origin begins


def draw(answers: Answers, panel: Panel, values: np.ndarray, names: Sequence[str], head: Head, out: Path) -> list[Path]:
    """Both pictures in the directory `out`; without horizons, as of a regression, or where no channel has several
    distances, that of the predictions alone.

    Args:
        answers: What was forecast; at least one.
        panel: The series.
        values: (steps of the panel, O) what is predicted, NaN where it was not observed.
        names: (O) of the outputs.
        head: The model's head.
        out: Made where it is not there.
    """
    out.mkdir(parents=True, exist_ok=True)
    unit = panel.clock.unit
    drawn = [draw_forecasts(tracks(answers, panel, values, names, head), out / FORECASTS, unit)]
    errors = draw_errors(answers, head, names, out / ERRORS, unit) if answers.horizon.any() else None
    return drawn if errors is None else [*drawn, errors]


def tracks(answers: Answers, panel: Panel, values: np.ndarray, names: Sequence[str], head: Head) -> list[Track]:
    """The last forecasts of a few series, those with most of them: two channels of each, or more of fewer series."""
    import pandas

    pairs = pandas.DataFrame({"channel": answers.channel, "series": answers.series}).value_counts(sort=False)
    usual = pairs.sort_values(ascending=False, kind="stable")
    most = max(1, _TRACKS // min(2, len(np.unique(answers.channel))))
    ends = None if isinstance(head, Point) else [(1 - _SHARE) / 2, (1 + _SHARE) / 2]
    lines = []
    for channel, series in sorted(usual.groupby("channel").head(most).index[:_TRACKS]):
        place = np.flatnonzero((answers.channel == channel) & (answers.series == series))
        at, horizon = panel.times[answers.row[place]], answers.horizon[place]
        origin = np.round((at - horizon) / (np.median(horizon[horizon > 0]) if horizon.any() else 1.0), 6)
        order = np.lexsort((at, origin))[-_LONGEST:]
        place, at, begins = place[order], at[order], np.flatnonzero(np.diff(origin[order])) + 1
        breaks = None if len(begins) == len(at) - 1 else begins  # of each step's forecast of the next, none
        params = answers.params[torch.from_numpy(place)]
        spread = None if ends is None else head.quantile(params, ends).double().numpy()
        low, high = (None, None) if spread is None else (spread[:, 0], spread[:, 1])
        steps = np.arange(panel.starts[series], panel.starts[series + 1])
        start, end = at.min(), at.max()
        steps = steps[(panel.times[steps] >= start - (end - start) / 10) & (panel.times[steps] <= end)]
        lines.append(
            Track(
                panel.names[series], names[channel], panel.times[steps], values[steps, channel], at,
                head.mean(params).double().numpy(), low, high, breaks,
            )
        )  # fmt: skip
    return lines


def readable(unit: str, longest: float) -> tuple[float, str]:
    """A factor and a unit in which times up to `longest`, in `unit`, have few digits: 172,800 s are 2 d."""
    if unit not in SECONDS:
        return 1.0, unit
    seconds = longest * SECONDS[unit]
    names = ("ms", "s", "min", "h", "d", "y")
    usual = [name for name in names if seconds >= (0.1 if name == unit else 5) * SECONDS[name]]
    better = usual[-1] if usual else unit
    return SECONDS[unit] / SECONDS[better], better


def _grid(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many axes, at most two side by side."""
    figure, every = figure_and_axes(min(2, count), -(-count // 2))
    for axes in every[count:]:
        axes.set_visible(False)
    return figure, every[:count]


def draw_forecasts(tracks: Sequence[Track], out: Path, unit: str) -> Path:
    """Each track's values as points, and its forecasts as a line within the central interval, over the time
    since the first of them."""
    factor, unit = readable(unit, max(float(np.ptp(track.at)) for track in tracks))
    figure, every = _grid(len(tracks))
    for axes, track in zip(every, tracks, strict=True):
        at, middle, *ends = (
            None if part is None else part if track.breaks is None else np.insert(part, track.breaks, np.nan)
            for part in (factor * (track.at - track.at[0]), track.middle, track.low, track.high)
        )
        if track.low is not None:
            axes.fill_between(at, *ends, color="#0b6e99", alpha=0.2, linewidth=0, label=f"{_SHARE:.0%} interval")
        axes.plot(at, middle, color="#0b6e99", linewidth=1.4, label="forecast")
        axes.plot(factor * (track.times - track.at[0]), track.values, ".", color="#222222", markersize=4, label="value")
        axes.set_title(f"{track.channel}{f' of {track.series}' if track.series else ''}", fontsize=10)
        axes.set_xlabel(f"time since the first forecast ({unit})")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(out)
    return out


def draw_errors(answers: Answers, head: Head, channels: Sequence[str], out: Path, unit: str) -> Path | None:
    """The root mean square error of the model and of forecasts without a network, in bins of equally many values,
    against the horizon, or where that is the same everywhere against the gap since the channel's last value; of the
    channels with most values that have several bins. None where no channel has."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    means = head.mean(answers.params).double().numpy()
    varies = np.ptp(np.quantile(answers.horizon, [0.05, 0.95])) > 0.01 * answers.horizon.max()
    factor, unit = readable(unit, float(np.quantile(answers.horizon, 0.9)))
    distance = factor * (answers.horizon if varies else answers.gap)
    counts = np.bincount(answers.channel, minlength=len(channels))
    drawn: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for number in np.argsort(-counts, kind="stable").tolist():
        chosen, curves = answers.channel == number, dict[str, tuple[np.ndarray, np.ndarray]]()
        for who in (*answers.baselines, "model"):
            forecast = (means[chosen], 0.0) if who == "model" else answers.baseline(who, chosen)
            if forecast is not None:
                x, y = _binned(distance[chosen], (forecast[0] - answers.target[chosen]) ** 2)
                curves[who] = x, np.sqrt(y)
        if len(curves["model"][0]) > 1 and len(drawn) < _CHANNELS:
            drawn[number] = curves
    if not drawn:
        return None
    figure, every = _grid(len(drawn))
    for axes, (number, curves) in zip(every, drawn.items(), strict=True):
        top = max(float(y.max(initial=0)) for who, (_, y) in curves.items() if who != MEAN)
        ends = []
        for who, (x, y) in curves.items():
            if len(y) and (who != MEAN or y.min() < 1.1 * top):  # far off where values drift: it would not be seen
                colour = _COLOURS.get(who, "#222222")
                axes.plot(x, y, marker="o", markersize=3, linewidth=2.2 if who == "model" else 1.2, color=colour)
                ends.append((min(y[-1], 1.1 * top), who, colour))
        positive = distance[answers.channel == number]
        positive = positive[positive > 0]
        if len(positive) and np.nanmax(positive) > 100 * np.nanmin(positive):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(0, 1.1 * top or None)
        axes.set_title(channels[number], fontsize=10)
        axes.set_xlabel(f"{'horizon' if varies else 'gap since the last value'} ({unit})")
        axes.set_ylabel("root mean square error")
        label_ends(axes, ends)
    figure.savefig(out)
    return out


def _binned(distance: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median distance and the mean square of bins of equally many values; equal distances share a bin, and bins of
    few values are left out."""
    known = ~np.isnan(distance + squares)
    distance, squares = distance[known], squares[known]
    if not len(distance):
        return np.zeros(0), np.zeros(0)
    bins = max(1, min(_BINS, len(distance) // _LEAST))
    edges = np.unique(np.quantile(distance, np.linspace(0, 1, bins + 1)[1:-1]))
    number = np.searchsorted(edges, distance)
    large = [each for each in np.unique(number) if (number == each).sum() >= min(_LEAST, len(number))]
    x = [np.median(distance[number == each]) for each in large]
    return np.array(x), np.array([squares[number == each].mean() for each in large])
