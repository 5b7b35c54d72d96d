"""The lines at the start: what a panel holds, and what in it looks wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glissando.series.options import SeriesData
from glissando.series.panel import MISSING, SECONDS, Encoding, Panel
from glissando.series.tables import counted

#: a value is far if it lies more than this many robust deviations from its channel's median
FAR = 20.0
#: a channel alternates if at least this part of its values differ from the one before, of two or three different ones
_ALTERNATES = 0.9
#: steps in which channels are compared at first
_SAMPLE = 1000
#: pairs of values on which that is judged, at least
_PAIRS = 20


def described(data: SeriesData, encoding: Encoding, panel: Panel) -> list[str]:
    """Series, channels, values, shares missing, and the median step with its unit."""
    lengths, channels = panel.lengths, [*encoding.columns, *encoding.categorical]
    observed = np.concatenate([~np.isnan(panel.values), panel.codes != MISSING], 1)
    size = f"{len(panel.names):,} series of {lengths.min():,} to {lengths.max():,} steps, {lengths.sum():,} in all"
    if len(panel.names) == 1:
        size = f"one series of {counted(int(lengths[0]), 'step')}" + (
            "" if data.group else " (no column names series: --data.group)"
        )
    shares = [
        f"{name} {100 * (1 - share):.0f} %" for name, share in zip(channels, observed.mean(0), strict=True) if share < 1
    ]
    missing = f", {100 * (1 - observed.mean()):.1f} % of the cells missing" if shares else ", no cell missing"
    lines = [
        f"{panel.source}: {size}; {counted(len(channels), 'channel')}: {', '.join(channels[:20])}"
        + (", ..." if len(channels) > 20 else ""),
        f"{counted(int(observed.sum()), 'value')}{missing}"
        + (f": {', '.join(shares[:20])}" if len(channels) > 1 and shares else ""),
        _median_step(data, encoding, panel),
    ]
    facts = {**dict.fromkeys(encoding.static, 0), **dict.fromkeys(encoding.static_categorical, 0)}
    blanks = [*np.isnan(panel.static).mean(0), *(panel.static_codes == MISSING).mean(0)]
    if facts:
        named = [f"{n} ({100 * s:.0f} % missing)" if s else n for n, s in zip(facts, blanks, strict=True)]
        lines.append(f"static: {', '.join(named)}")
    if encoding.future:
        lines.append(f"known in advance: {', '.join(encoding.future)}")
    if encoding.classes:
        most = ", ".join(encoding.classes[:10]) + (", ..." if len(encoding.classes) > 10 else "")
        lines.append(f"{encoding.target[0]}: {len(encoding.classes)} classes, one for each {encoding.label}: {most}")
    return lines


def _median_step(data: SeriesData, encoding: Encoding, panel: Panel) -> str:
    later = np.ones(len(panel.times), bool)
    later[panel.starts[:-1]] = False
    if encoding.time_form == "row":
        return "median step 1 row: no column of times is named (--data.time)"
    if not later.any():
        return "no series has a second step"
    step = float(np.median(panel.gaps[later]))
    if encoding.time_form == "date":
        return f"median step {duration(step)}"
    assumed = "" if data.time_unit is not None else "; if they are not, give --data.time_unit"
    return f"median step {step:.6g} {encoding.unit}: the numbers {data.time} are read in {encoding.unit}{assumed}"


def duration(seconds: float) -> str:
    """86400.0 -> 86,400 s (1 d)."""
    units = [(unit, SECONDS[unit]) for unit in ("d", "h", "min", "s", "ms", "us", "ns")]
    unit, size = next(((unit, size) for unit, size in units if seconds >= size), units[-1])
    return f"{seconds:,.9g} s" + ("" if unit == "s" else f" ({seconds / size:.4g} {unit})")


def warnings(data: SeriesData, encoding: Encoding, panel: Panel) -> list[str]:
    """What a user should look at before a model is trained."""
    return [*_identical(encoding, panel), *_uninformative(encoding, panel), *_far(data, encoding, panel)]


def _identical(encoding: Encoding, panel: Panel) -> Iterator[str]:
    """Channels that are equal wherever both are observed."""
    count = len(panel.values)
    # Nearly all pairs differ in some of a few steps; only the others are compared in all.
    some = panel.values[np.random.default_rng(0).permutation(count)[:_SAMPLE]]
    for k, one in enumerate(encoding.columns):
        differs = (some[:, k : k + 1] != some) & ~np.isnan(some[:, k : k + 1]) & ~np.isnan(some)
        for other in k + 1 + np.flatnonzero(~differs[:, k + 1 :].any(0)):
            both = ~np.isnan(panel.values[:, k]) & ~np.isnan(panel.values[:, other])
            left, right = panel.values[both, k], panel.values[both, other]
            if len(left) > 1 and bool((left == right).all()) and left.min() < left.max():
                yield (
                    f"warning: {one!r} equals {encoding.columns[other]!r} in all {len(left):,} steps that have both: "
                    "leave one out of data.columns"
                )


def _uninformative(encoding: Encoding, panel: Panel) -> Iterator[str]:
    """Channels with one value a series, and those that alternate."""
    series = panel.series
    constant: dict[str, list[str]] = {}
    for k, name in enumerate(encoding.columns):
        rows = np.flatnonzero(~np.isnan(panel.values[:, k]))
        if not len(rows):
            yield f"warning: {name!r} has no value"
            continue
        cells, of = panel.values[rows, k], series[rows]
        same = of[1:] == of[:-1]
        pairs, changes = int(same.sum()), int((same & (cells[1:] != cells[:-1])).sum())
        if cells.min() == cells.max():
            yield f"warning: {name!r} is {cells[0]:g} wherever it is observed"
        elif not changes and len(panel.names) > 1:
            what = "at most one value a series" if not pairs else "the same value throughout each series"
            constant.setdefault(what, []).append(name)
        elif pairs >= _PAIRS and changes >= _ALTERNATES * pairs and len(np.unique(cells)) <= 3:
            yield (
                f"warning: {name!r} alternates: {changes:,} of {pairs:,} values differ from the one before, as of a "
                "value that is recorded when it changes"
            )
    for what, names in constant.items():
        yield f"warning: {', '.join(names)}: {what}; name such a column in data.static, or leave it out"


def robust(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K,) medians and robust deviations of columns (N, K), NaN where a value is missing; a deviation is infinite where
    too few values are there to judge, or most of them are equal."""
    made = np.array([np.zeros(values.shape[1]), np.full(values.shape[1], np.inf)])
    for k, column in enumerate(values.T):
        cells = column[~np.isnan(column)]
        if len(cells) >= _PAIRS:
            middle = np.median(cells)
            made[:, k] = middle, 1.4826 * np.median(np.abs(cells - middle)) or np.inf
    return made[0], made[1]


def _far(data: SeriesData, encoding: Encoding, panel: Panel) -> Iterator[str]:
    """Values beyond twenty robust deviations."""
    step = "" if data.channel is None else "the step of "
    middle, deviation = robust(panel.values)
    distance = np.abs(panel.values - middle) / deviation
    for k, name in enumerate(encoding.columns):
        if count := int((distance[:, k] > FAR).sum()):
            worst = int(np.nanargmax(distance[:, k]))
            fitted = "" if encoding.task != "forecast" else "; the anchor is fitted without them"
            yield (
                f"warning: {name!r} has {counted(count, 'value')} beyond {FAR:.0f} robust deviations "
                f"({deviation[k]:.4g}) of its median {middle[k]:.6g}, the farthest {panel.values[worst, k]:g} in "
                f"{step}{panel.unit} {panel.rows[worst]}: correct them, or leave them blank{fitted}"
            )
