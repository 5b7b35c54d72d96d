"""The lines at the start: what a panel holds, and what in it looks wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glissando.series.options import SeriesData
from glissando.series.panel import MISSING, SECONDS, Encoding, Panel
from glissando.series.tables import counted, listed

#: a value is far if it lies more than this many robust deviations from its channel's median
FAR = 20.0
#: a channel alternates if at least this part of its values differ from the one before, of two or three different ones
_ALTERNATES = 0.9
#: steps in which channels are compared at first
_SAMPLE = 1000
#: pairs of values on which that is judged, at least
_PAIRS = 20


def described(data: SeriesData, encoding: Encoding, panel: Panel, is_new: bool) -> list[str]:
    """Series, channels, values, shares missing, and the median step with its unit.

    is_new  another table than that of the training, for which options of training are not named
    """
    lengths, channels = panel.lengths, [*encoding.columns, *encoding.categorical]
    observed = np.concatenate([~np.isnan(panel.values), panel.codes != MISSING], 1)
    most = "" if lengths.min() == lengths.max() else f" to {lengths.max():,}"
    size = f"{len(panel.names):,} series of {lengths.min():,}{most} steps, {lengths.sum():,} in all"
    if len(panel.names) == 1:
        size = f"one series of {counted(int(lengths[0]), 'step')}"
        size += "" if data.group or is_new else " (no column names series: --data.group)"
    shares = [f"{n} {_percent(1 - s)}" for n, s in zip(channels, observed.mean(0), strict=True) if s < 1]
    missing = f"{_percent(1 - observed.mean())} of the cells missing" if shares else "no cell missing"
    lines = [
        f"{panel.source}: {size}; {counted(len(channels), 'channel')}: {listed(channels, 20)}",
        f"{counted(int(observed.sum()), 'value')}, {missing}"
        + (f": {listed(shares, 20)}" if len(channels) > 1 and shares else ""),
        _median_step(data, encoding, panel, is_new),
    ]
    facts = [*encoding.static, *encoding.static_categorical]
    blank = np.concatenate([np.isnan(panel.static), panel.static_codes == MISSING], 1).mean(0)
    if facts:
        named = [f"{n} ({_percent(s)} missing)" if s else n for n, s in zip(facts, blank, strict=True)]
        lines.append(f"static: {', '.join(named)}")
    if encoding.future:
        lines.append(f"known in advance: {', '.join(encoding.future)}")
    if encoding.classes:
        lines.append(
            f"{encoding.target[0]}: {len(encoding.classes)} classes, one for each {encoding.label}: "
            f"{listed(encoding.classes, 10)}"
        )
    return lines


def _percent(share: float) -> str:
    """A share between 0 and 1 in percent; one that rounds to 0 or 100 is written as `< 1 %` or `> 99 %`."""
    return "< 1 %" if share < 0.01 else "> 99 %" if share > 0.99 else f"{100 * share:.0f} %"


def _median_step(data: SeriesData, encoding: Encoding, panel: Panel, is_new: bool) -> str:
    later = np.delete(panel.gaps, panel.starts[:-1])
    if encoding.time_form == "row":
        return "median step 1 row: no column of times is named (--data.time)"
    if not len(later):
        return "no series has a second step"
    step = float(np.median(later))
    if encoding.time_form == "date":
        return f"median step {duration(step)}"
    assumed = "" if data.time_unit is not None or is_new else "; if they are not, give --data.time_unit"
    return f"median step {step:.6g} {encoding.unit}: the numbers {data.time} are read in {encoding.unit}{assumed}"


def duration(seconds: float) -> str:
    """86400.0 -> 86,400 s (1 d)."""
    units = ("d", "h", "min", "s", "ms", "us", "ns")
    unit = next((unit for unit in units if seconds >= SECONDS[unit]), "ns")
    return f"{seconds:,.9g} s" + ("" if unit == "s" else f" ({seconds / SECONDS[unit]:.4g} {unit})")


def warnings(data: SeriesData, encoding: Encoding, panel: Panel, is_new: bool) -> list[str]:
    """What a user should look at before a model is trained; of another table, before it is predicted."""
    columns = [] if is_new else [*_identical(encoding, panel), *_uninformative(encoding, panel)]
    return [f"warning: {line}" for line in (*columns, *_far(data, encoding, panel, is_new))]


def _identical(encoding: Encoding, panel: Panel) -> Iterator[str]:
    """Channels that are equal wherever both are observed."""
    # Nearly all pairs differ in some of a few steps; only the others are compared in all.
    some = panel.values[np.random.default_rng(0).permutation(len(panel.values))[:_SAMPLE]]
    for k, one in enumerate(encoding.columns):
        differs = (some[:, k : k + 1] != some) & ~np.isnan(some[:, k : k + 1]) & ~np.isnan(some)
        for other in k + 1 + np.flatnonzero(~differs[:, k + 1 :].any(0)):
            both = panel.values[:, [k, int(other)]]
            left, right = both[~np.isnan(both).any(1)].T
            if len(left) > 1 and bool((left == right).all()) and left.min() < left.max():
                yield (
                    f"{one!r} equals {encoding.columns[other]!r} in all {len(left):,} steps that have both: leave one "
                    "out of --data.columns"
                )


def _uninformative(encoding: Encoding, panel: Panel) -> Iterator[str]:
    """Channels without a value, with one value, with one a series, and those that alternate."""
    series, constant = panel.series, dict[str, list[str]]()
    codes = np.where(panel.codes == MISSING, np.nan, panel.codes)
    names, columns = [*encoding.columns, *encoding.categorical], [*panel.values.T, *codes.T]
    for name, column in zip(names, columns, strict=True):
        rows = np.flatnonzero(~np.isnan(column))
        if not len(rows):
            yield f"{name!r} has no value"
            continue
        cells, same = column[rows], np.diff(series[rows]) == 0
        pairs, changes = int(same.sum()), int((same & (np.diff(cells) != 0)).sum())
        if cells.min() == cells.max():
            yield f"{name!r} has one value wherever it is observed"
        elif not changes and len(panel.names) > 1:
            what = "at most one value a series" if not pairs else "the same value throughout each series"
            constant.setdefault(what, []).append(name)
        elif pairs >= _PAIRS and changes >= _ALTERNATES * pairs and len(np.unique(cells)) <= 3:
            yield (
                f"{name!r} alternates: {changes:,} of {pairs:,} values differ from the one before, as of a value that "
                "is recorded when it changes"
            )
    for what, alike in constant.items():
        yield f"{', '.join(alike)}: {what}; name such a column in --data.static, or leave it out"


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


def _far(data: SeriesData, encoding: Encoding, panel: Panel, is_new: bool) -> Iterator[str]:
    """Values beyond twenty robust deviations, of the table or of their series."""
    step = "" if data.channel is None else "the step of "
    starts = panel.starts if data.scale == "series" else panel.starts[[0, -1]]
    each = [robust(part) for part in np.split(panel.values, starts[1:-1])]
    middle, deviation = (np.repeat(np.stack(part), np.diff(starts), 0) for part in zip(*each, strict=True))
    distance = np.abs(panel.values - middle) / deviation
    for k, name in enumerate(encoding.columns):
        if count := int((distance[:, k] > FAR).sum()):
            worst = int(np.nanargmax(distance[:, k]))
            fitted = "" if is_new or encoding.task != "forecast" else "; the anchor is fitted without them"
            yield (
                f"{name!r} has {counted(count, 'value')} beyond {FAR:.0f} robust deviations "
                f"({deviation[worst, k]:.4g}) of its median {middle[worst, k]:.6g}, the farthest "
                f"{panel.values[worst, k]:g} in {step}{panel.unit} {panel.rows[worst]}: correct them, or leave them "
                f"blank{fitted}"
            )
