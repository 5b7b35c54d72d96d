"""Series of numbers and categories at their own times, as a model reads them.

Letters: S series, N steps of all series together, K numeric channels, Q categorical channels, U known-future columns,
P numeric and R categorical static columns, O targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from glissando.config import options
from glissando.errors import ConfigError, DataError
from glissando.series.options import SeriesData, TableData
from glissando.series.tables import counted, place

#: seconds of a unit of time
SECONDS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "y": 365.25 * 86400.0,
}  # fmt: skip
#: the longest span, in any unit: beyond it, no date can be written
_LONGEST = 1e18
#: times that are forecast of a series at most
_MOST_TIMES = 100_000
#: codes of a categorical column: a cell without a value, and a category that training does not know
MISSING, UNKNOWN = 0, 1


Task = Literal["forecast", "regression", "classification"]
Form = Literal["date", "number", "row"]
Label = Literal["step", "series"]


@options
class Encoding:
    """What a table's columns mean to a model: fixed by the training table, saved with the run, and applied to every
    other table.

    columns             the K numeric channels, in order
    categorical         categorical channel -> its known categories, the most frequent first: code 2 and on
    static              numeric static columns
    static_categorical  categorical static column -> its known categories
    future              numeric known-future columns
    target              forecast: the channels that are forecast; else the target columns
    task                forecast, regression or classification
    label               classification: `step` or `series`, what has a class
    classes             classification: the classes, the most frequent first
    time_form           date: times are dates; number: numbers; row: no column of times, each step takes 1
    unit                unit of Panel.times: s of dates, data.time_unit of numbers, row
    """

    columns: list[str] = field(default_factory=list)
    categorical: dict[str, list[str]] = field(default_factory=dict)
    static: list[str] = field(default_factory=list)
    static_categorical: dict[str, list[str]] = field(default_factory=dict)
    future: list[str] = field(default_factory=list)
    target: list[str] = field(default_factory=list)
    task: Task = "forecast"
    label: Label = "step"
    classes: list[str] = field(default_factory=list)
    time_form: Form = "row"
    unit: str = "row"


class Clock(NamedTuple):
    """How the times of a panel are written in the form of the user's own table.

    form     as Encoding.time_form
    unit     unit of Panel.times
    origins  (S,) the first time of each series: integer nanoseconds since 1970 of dates, else numbers (int, Decimal or
             float), exact
    """

    form: Form
    unit: str
    origins: np.ndarray

    def written(self, series: Iterable[int], times: Iterable[float]) -> list[str]:
        """Each time since the first step of a series: a date in ISO form, in UTC, or a number.

        Args:
            series: Index of the series of each time.
            times: In `unit`, as Panel.times, or later.
        """
        write = _date if self.form == "date" else _number
        return [write(self.origins[s], Decimal(f"{t:.15g}")) for s, t in zip(series, times, strict=True)]

    def span(self, text: str | float, option: str = "horizon") -> float:
        """A duration such as 24h, 1.5d or 90min in `unit`; a bare number is in `unit` already.

        Raises ConfigError for a text that is no duration, one that is not positive, and a unit of time where steps have
        no time.
        """
        match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*({'|'.join(SECONDS)})?\s*", str(text))
        number = 0.0 if match is None else float(match[1])
        if match is not None and match[2] is not None:
            number *= SECONDS[match[2]] / SECONDS.get(self.unit, 1.0)
        if match is None or not 0 < number < _LONGEST:
            raise ConfigError(
                f"{option} is {text!r}: give a number above 0, in {self.unit}, or with a unit, such as 24h; units are "
                f"{', '.join(SECONDS)}"
            )
        if self.form == "row" and (match[2] is not None or number % 1):
            raise ConfigError(
                f"{option} is {text!r}, and the table has no column of times (data.time): give a whole number of rows"
            )
        return number

    def horizons(self, horizon: str | float | Sequence[str | float], every: str | float | None = None) -> np.ndarray:
        """(J,) ascending times in `unit`: `horizon` itself, or every `every` up to it; or several."""
        if not isinstance(horizon, str | int | float):
            if every is not None or not len(horizon):
                raise ConfigError(
                    f"horizon is {horizon!r} and every is {every!r}: give several horizons, or one and every"
                )
            return np.array(sorted({self.span(each) for each in horizon}))
        end = self.span(horizon)
        if every is None:
            return np.array([end])
        step = self.span(every, "every")
        count = int(np.floor(end / step * (1 + 1e-9)))
        if not count:
            raise ConfigError(f"every is {every!r} and the horizon {horizon!r}, which is less: give a longer horizon")
        if count > _MOST_TIMES:
            raise ConfigError(
                f"every is {every!r} and the horizon {horizon!r}, which are {count:,} times of each series, and "
                f"{_MOST_TIMES:,} are the most: give a longer step"
            )
        return np.array([step * (number + 1) for number in range(count)])


def _date(origin: Any, time: Decimal) -> str:
    """2026-01-31T12:00:00Z; a fraction of a second only where there is one."""
    second, nanosecond = divmod(int(origin) + round(time * 10**9), 10**9)
    fraction = f".{nanosecond:09}".rstrip("0") if nanosecond else ""
    return f"{np.datetime64(second, 's')}{fraction}Z"


def _number(origin: Any, time: Decimal) -> str:
    start = origin if isinstance(origin, Decimal) else Decimal(str(origin))
    value = start + time
    return f"{int(value)}" if value == int(value) else f"{value.normalize():f}"


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """S series of N steps in all, as the model of a table reads them. A value that was not observed is NaN; nothing is
    filled in.

    names         (S) the user's names of the series
    starts        (S + 1,) int64: series s has the steps starts[s]:starts[s + 1]
    times         (N,) float64: time since the series' first step, in clock.unit
    gaps          (N,) float64: time since the step before, 0 at the first; differences are taken before rounding
    values        (N, K) float64, NaN where a cell was not observed
    static        (S, P) float64, NaN where missing
    static_codes  (S, R) int64: 0 missing, 1 a category that training does not know, 2 and on the known ones
    rows          (N,) int64: the file's line of the step, the first of those merged; 0 of a step that has none
    scored        (N,) bool: steps that are scored; the others are history alone
    clock         how times are written in the user's own form
    report        lines for the user: what was read, merged, dropped and encoded, and what looks wrong
    source, unit  the file, or "frame", and what `rows` counts in it: line or row
    """

    names: list[str]
    starts: np.ndarray
    times: np.ndarray
    gaps: np.ndarray
    values: np.ndarray
    static: np.ndarray
    static_codes: np.ndarray
    rows: np.ndarray
    scored: np.ndarray
    clock: Clock
    report: list[str]
    source: str
    unit: str

    def place(self, step: int) -> str:
        """Where a step stands in the user's table, for errors: data.csv, line 3; or: frame row 3."""
        return place(self.source, self.unit, int(self.rows[step]))

    @property
    def lengths(self) -> np.ndarray:
        """(S,) the number of steps of each series."""
        return np.diff(self.starts)

    @property
    def series(self) -> np.ndarray:
        """(N,) the index of the series of each step."""
        return np.repeat(np.arange(len(self.names)), self.lengths)

    def of_series(self) -> set[str]:
        """The fields that have a row for each series, and not for each step."""
        return {"static", "static_codes"}

    def choose(self, chosen: np.ndarray, lengths: np.ndarray | None = None) -> Self:
        """The series with these indices, in this order, or the first `lengths` steps of each."""
        chosen = np.asarray(chosen, np.int64)
        lengths = self.lengths[chosen] if lengths is None else np.asarray(lengths)
        starts = np.r_[0, np.cumsum(lengths)]
        steps = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], lengths)
        per_series = self.of_series()
        parts = {n: part for n, part in vars(self).items() if isinstance(part, np.ndarray) and n != "starts"}
        taken = {n: part[chosen if n in per_series else steps] for n, part in parts.items()}
        clock = self.clock._replace(origins=self.clock.origins[chosen])
        return replace(self, **taken | {"names": [self.names[s] for s in chosen], "starts": starts, "clock": clock})


@dataclass(frozen=True, kw_only=True)
class Panel(StepTable):
    """Series of numbers and categories.

    codes   (N, Q) int64: 0 missing, 1 a category that training does not know, 2 and on the known ones
    future  (N, U) float64, without NaN
    target  (N, O) float64 of a regression, NaN where it is not scored; else None
    labels  classification: (N,) int64, or (S,) where a series has one; -1 where it is not scored; else None
    """

    codes: np.ndarray
    future: np.ndarray
    target: np.ndarray | None = None
    labels: np.ndarray | None = None

    def of_series(self) -> set[str]:
        has_label = self.labels is not None and len(self.labels) == len(self.names)
        return super().of_series() | ({"labels"} if has_label else set())


def parts(panel: Panel, data: SeriesData) -> tuple[Panel, Panel]:
    """What is trained on and what is held out: whole series, or with data.split `future` the end of each.

    The held-out panel of `future` has the whole series, whose earlier steps are history (`scored` is False). A category
    that only the held-out part has is unknown there, as it would be in any other table. Both reports end with a line
    that states the split.

    Raises ConfigError for a split that leaves nothing on a side, DataError for a held-out class without an example.
    """
    if (data.split or ("series" if len(panel.names) > 1 else "future")) == "series":
        chosen, line = held_series(len(panel.names), data)
        train, valid = panel.choose(np.flatnonzero(~chosen)), panel.choose(np.flatnonzero(chosen))
    else:
        train, valid, line = _by_time(panel, data)
    if train.labels is not None and valid.labels is not None:
        known = np.unique(train.labels[train.labels >= 0])
        for strange in np.flatnonzero((valid.labels >= 0) & ~np.isin(valid.labels, known))[:1]:
            row = strange if len(valid.labels) == len(valid.times) else valid.starts[strange]
            raise DataError(
                f"{valid.place(row)}: the class of {data.target[0]} there is among the held-out ones alone: hold "
                "other series out with data.seed or data.valid_path, or leave it out"
            )
    codes, static_codes = known_codes(valid.codes, train.codes), known_codes(valid.static_codes, train.static_codes)
    lines = [*panel.report, line]
    if unseen := int((codes != valid.codes).sum() + (static_codes != valid.static_codes).sum()):
        lines.append(f"unknown where held out: {counted(unseen, 'value')} of categories that are not trained on")
    valid = replace(valid, codes=codes, static_codes=static_codes, report=lines)
    return replace(train, report=lines), valid


def known_codes(codes: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Codes (N, Q), in which those that training has not are unknown."""
    made = codes.copy()
    for q, column in enumerate(codes.T):
        made[~np.isin(column, trained[:, q]) & (column > UNKNOWN), q] = UNKNOWN
    return made


def held_series(count: int, data: TableData) -> tuple[np.ndarray, str]:
    """(S,) bool, which of so many series are held out, and a line that states it. Raises ConfigError where all are."""
    n_valid = max(1, round(data.valid_fraction * count))
    if n_valid >= count:
        raise ConfigError(
            f"data.valid_fraction {data.valid_fraction} holds {n_valid} of {count} series out: lower it, give "
            "data.valid_path, or hold out the end of each series with --data.split future"
        )
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(data.seed).permutation(count)[:n_valid]] = True
    return chosen, f"held out: {n_valid:,} of {count:,} series, chosen by --data.seed {data.seed} (--data.split series)"


def _by_time(panel: Panel, data: SeriesData) -> tuple[Panel, Panel, str]:
    if panel.labels is not None and len(panel.labels) == len(panel.names):
        raise ConfigError(
            "data.split future holds out the end of each series, and these have one label each: use series"
        )
    lengths = panel.lengths
    ends = np.round(lengths * (1 - data.valid_fraction)).astype(np.int64)
    if not (ends < lengths).any() or not ends.any():
        raise ConfigError(
            f"data.valid_fraction {data.valid_fraction} of {lengths.max()} steps cannot be held out: give longer "
            "series, or data.valid_path"
        )
    ends = np.where(ends == 0, lengths, ends)  # too short to be cut: all of it is trained on
    scored = np.arange(len(panel.times)) - panel.starts[panel.series] >= ends[panel.series]
    line = (
        f"held out: the last {100 * data.valid_fraction:g} % of the steps of each series, {int(scored.sum()):,} in all "
        "(--data.split future)"
    )
    return panel.choose(np.arange(len(ends)), ends), replace(panel, scored=scored), line
