"""Tables -> a log of events: the columns by their roles, steps in the order of time, and the lines of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from glissando.errors import ConfigError, DataError, unknown_name
from glissando.events.log import FIRST, NONE, UNKNOWN, EventEncoding, EventLog
from glissando.events.options import EventsData
from glissando.series import tables
from glissando.series.columns import ColumnReader, Place, clock_of, require_columns, require_options, require_read
from glissando.series.inspection import duration
from glissando.series.options import SeriesData
from glissando.series.panel import Clock, Panel
from glissando.series.reading import read_panel
from glissando.series.steps import Clash, after_later
from glissando.series.tables import Column, Table, counted, listed
from glissando.series.times import Times, times

#: without a column of kinds, every event has this one
EVENT = "event"
#: a resolution below this part of the median gap changes a likelihood by less than a millionth: times are then exact
_FINE = 1e-3
#: days that dates span before the time of the day and the week is read
_CLOCK_DAYS = 2.0
#: an option -> one that it needs
_NEEDS = (
    ("static_path", "group"), ("values_path", "group"), ("channel", "values_path"), ("columns", "values_path"),
    ("channel", "value"), ("value", "channel"), ("inputs", "kind"),
)  # fmt: skip
#: order of what happens at one time
_EVENT, _INPUT, _VALUES, _START = range(4)


def read_events(
    data: EventsData, source: Any = None, encoding: EventEncoding | None = None, facts: Any = None, values: Any = None
) -> tuple[EventLog, EventEncoding]:
    """The events of a table, and what its columns mean to a model.

    Args:
        data: Which column is what.
        source: A file, or a frame of pandas or polars, in the place of data.path.
        encoding: That of a run, for new tables; an event of a kind that it does not know is counted, read as unknown
            and not predicted. Without it, the table says what its columns mean.
        facts: A file or a frame in the place of data.static_path.
        values: Likewise, of data.values_path.

    Raises:
        DataError: A value cannot be used; the message has the file, the line and the column.
        UnknownNameError: There is no such column or kind.
        ConfigError: Options contradict each other.
    """
    if source is None and data.path is None:
        raise ConfigError("data.path is missing: name a CSV or Parquet file, or give a frame")
    if data.time is None:
        raise ConfigError("data.time is missing: name the column with the time of each event")
    facts, values = data.static_path if facts is None else facts, data.values_path if values is None else values
    named = {**vars(data), "static_path": facts is not None, "values_path": values is not None}
    require_options(named, _NEEDS)
    table = tables.read_table(data.path if source is None else source, data)
    facts = None if facts is None else tables.read_table(facts, data, "data.static_path")
    for option in ("group", "time", "kind"):
        require_columns(table.source, table.columns, [getattr(data, option)], option)
    if facts is not None:
        require_columns(facts.source, facts.columns, [data.group], "group")
    return _Reader(data, table, facts, values, encoding).log()


#: steps to be sorted, see `_steps`: a record array, whose attributes numpy does not type
_Steps = Any


def _steps(
    series: Any, ticks: Any, rank: Any, code: Any = NONE, raw: Any = -1, row: Any = -1, value: Any = -1
) -> _Steps:
    """A table of steps, by default no events.

    raw    the index of the kind in the table
    row    of the table
    value  the row of Panel.values
    """
    columns: Any = np.broadcast_arrays(series, ticks, rank, code, raw, row, value)
    return np.rec.fromarrays(columns, names="series, ticks, rank, code, raw, row, value")  # type: ignore[call-overload]


class _Moments(NamedTuple):
    """A time (S,) of each series, where it has one."""

    ticks: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, ticks: np.ndarray, series: np.ndarray, count: int) -> _Moments:
        made, known = np.zeros(count, ticks.dtype), np.zeros(count, bool)
        made[series], known[series] = ticks, True
        return cls(made, known)


class _Reader(ColumnReader):
    """A log, and tables of facts and values, on their way to an EventLog."""

    data: EventsData

    def __init__(
        self, data: EventsData, table: Table, facts: Table | None, values: Any, encoding: EventEncoding | None
    ) -> None:
        super().__init__(data, table, facts, encoding is not None)
        self.values, self.known, self.report = values, encoding, list[str]()
        form, unit = clock_of(data, table, encoding, self.report)
        self.fixed = replace(encoding or EventEncoding(), time_form=form, unit=unit)
        codes, self.names = np.zeros(table.height, np.int64), [""]
        if data.group is not None:
            codes, self.names = tables.names(table, data.group, "group")
        self.series, self.index = codes, {name: number for number, name in enumerate(self.names)}
        # A series without an event is one, too, where the second table says when its observation starts or ends.
        if facts is not None and data.start is not None and {data.start, data.end} & facts.columns.keys():
            for name in tables.names(facts, str(data.group), "group").names:
                self.index.setdefault(name, len(self.index))
            self.names = list(self.index)

    def log(self) -> tuple[EventLog, EventEncoding]:
        data = self.data
        start, end = self._moments("start"), self._moments("end")
        values, measured = self._values()
        read = [times(self.table, str(data.time), self._form), measured, start[0], end[0]]
        (ticks, of_values, of_start, of_end), origin, per = _common(read)
        since, until = (
            _Moments.of(each, series, len(self.names)) for each, (_, series) in ((of_start, start), (of_end, end))
        )
        codes, raw = self._kinds(ticks, since, until)
        rank = np.where((codes >= FIRST) & (codes < FIRST + len(self.fixed.kinds)), _EVENT, _INPUT)
        events = self._merged(_steps(self.series, ticks, rank, codes, raw, np.arange(len(ticks))))
        starts = _steps(np.flatnonzero(since.known), since.ticks[since.known], _START)
        steps = np.concatenate([events, self._value_steps(values, of_values), starts]).view(np.recarray)
        return self._made(self._within(steps, since, until), since, until, origin, per, values)

    @property
    def _form(self) -> Any:
        return "date" if self.fixed.time_form == "date" else "number"

    # ---------------------------------------------------------------------- times

    def _moments(self, option: str) -> tuple[Times, np.ndarray]:
        """The times of data.start or data.end, and the series of each."""
        text: str | None = getattr(self.data, option)
        none = Times(np.empty(0, np.int64), 1), np.empty(0, np.int64)
        if text is None:
            return none
        if text not in self.homes:
            single = Table(f"--data.{option}", {text: Column(np.array([text], object))}, np.ones(1, np.int64), "row")
            try:
                moments = times(single, text, self._form)
            except DataError as error:
                raise ConfigError(
                    f"data.{option} is {text!r}, which is neither a column of {self._where} nor a {self._form}: name a "
                    f"column, or give a time as those in {self.data.time!r}"
                ) from error
            every = np.arange(len(self.names))
            return Times(np.repeat(moments.ticks, len(every)), moments.per), every
        home, (rows, series) = self.homes[text], self._rows_of(text)
        there = ~home.columns[text].missing[rows]
        rows, series = rows[there], series[there]
        if not len(rows):
            return none
        cells = {text: Column(home.columns[text].values[rows])}
        moments = times(Table(home.source, cells, home.places[rows], home.unit), text, self._form)
        begins = np.diff(series, prepend=-1) > 0
        before = np.flatnonzero(begins)[np.cumsum(begins) - 1]
        for row in np.flatnonzero(moments.ticks != moments.ticks[before])[:1].tolist():
            clash, fix = Clash(int(before[row]), row), "a series has one, correct the table"
            raise self._clash(clash, home, rows, text, f"data.{option}", fix, timed=False)
        return Times(moments.ticks[begins], moments.per), series[begins]

    def _own_rows(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.argsort(self.series, kind="stable")
        return rows, self.series[rows]

    # ---------------------------------------------------------------------- events

    def _kinds(self, ticks: np.ndarray, since: _Moments, until: _Moments) -> tuple[np.ndarray, np.ndarray]:
        """(R,) the code of each row's kind, and the index of its name."""
        data, table = self.data, self.table
        raw, names = np.zeros(table.height, np.int64), [EVENT]
        if data.kind is not None:
            raw, names = tables.names(table, data.kind, "kind")
        if self.known is None:
            if strange := [name for name in data.inputs if name not in names]:
                raise unknown_name(f"kind of {table.source}, column {data.kind!r}", strange[0], names)
            after = ~since.known[self.series] | (ticks > since.ticks[self.series])
            before = ~until.known[self.series] | (ticks <= until.ticks[self.series])
            counts = np.bincount(raw[after & before], minlength=len(names))
            predicted = [n for n in np.argsort(-counts, kind="stable") if counts[n] and names[n] not in data.inputs]
            kinds = [names[n] for n in predicted]
            inputs = [*data.inputs, *(name for name in names if name not in {*kinds, *data.inputs})]
            if not kinds:
                raise DataError(
                    f"{table.source} has no event to predict: all are of data.inputs, before data.start or after "
                    "data.end"
                )
            if others := inputs[len(data.inputs) :]:
                self.report.append(f"read and not predicted, as none is between start and end: {listed(others)}")
            self.fixed = replace(self.fixed, kinds=kinds, inputs=inputs)
        place = {name: FIRST + n for n, name in enumerate([*self.fixed.kinds, *self.fixed.inputs])}
        codes = np.array([place.get(name, UNKNOWN) for name in names], np.int64)[raw]
        if unknown := int((codes == UNKNOWN).sum()):
            strange = [name for name in names if name not in place]
            self.report.append(
                f"{counted(unknown, 'event')} of kinds that training does not know, read as unknown and not scored: "
                f"{listed(strange)}"
            )
        return codes, raw

    def _merged(self, steps: _Steps) -> _Steps:
        """Events of one series, time and kind as one."""
        sorted_ = steps[np.lexsort((steps.raw, steps.ticks, steps.series))]
        keys = sorted_.series, sorted_.ticks, sorted_.raw
        repeats = np.logical_and.reduce([np.r_[False, part[1:] == part[:-1]] for part in keys])
        if count := int(repeats.sum()):
            marks = ", with the marks of the first" if self.data.marks else ""
            by = ", ".join(name for name in (self.data.group, self.data.time, self.data.kind) if name is not None)
            self.report.append(f"{counted(count, 'event')} merged: the same {by} as of another{marks}")
        if count := after_later(steps.series, steps.ticks):
            self.report.append(f"{counted(count, 'row')} sorted: a later time of the series stood before")
        return sorted_[~repeats]

    def _within(self, steps: _Steps, since: _Moments, until: _Moments) -> _Steps:
        """Sorted steps of the series that are observed, up to the end of each."""
        series, count = steps.series, len(self.names)
        kept = ~until.known[series] | (steps.ticks <= until.ticks[series])
        if late := int((~kept & (steps.row >= 0)).sum()):
            self.report.append(f"{counted(late, 'event')} after the end of observation (--data.end) left out")
        ends_first = since.known & until.known & (until.ticks <= since.ticks)
        unbegun = ~since.known & (self.data.start is not None)
        for which, why in (
            (ends_first, "whose observation ends at or before its start"), (unbegun, "without --data.start"),
        ):  # fmt: skip
            if names := [self.names[s] for s in np.flatnonzero(which)]:
                self.report.append(f"{len(names):,} series {why} are left out: {listed(names)}")
        kept &= ~(ends_first | unbegun)[series]
        kept &= (np.bincount(series[kept & (steps.rank != _VALUES)], minlength=count) > 0)[series]
        steps = steps[kept]
        return steps[np.lexsort((steps.raw, steps.code, steps.rank, steps.ticks, steps.series))]

    # ---------------------------------------------------------------------- values and facts

    def _values(self) -> tuple[Panel | None, Times]:
        """The table of values, and the times of its steps."""
        data = self.data
        if self.values is None:
            return None, Times(np.empty(0, np.int64), 1)
        table = tables.read_table(self.values, data, "data.values_path")
        options = SeriesData(
            group=data.group, time=data.time, time_format=self._form, time_unit=data.time_unit, channel=data.channel,
            value=data.value, columns=data.columns, task="forecast", duplicates="mean", delimiter=data.delimiter,
            decimal=data.decimal,
        )  # fmt: skip
        panel, encoding = read_panel(options, table, None if self.known is None else self.known.values)
        if encoding.categorical:
            raise ConfigError(
                f"{table.source}: {', '.join(encoding.categorical)} holds texts, and values are numbers: name the "
                "others in data.columns"
            )
        self.fixed = replace(self.fixed, values=encoding)
        self.report += [line for line in panel.report if "read in" not in line]
        read = times(table, str(data.time), self._form)
        return panel, Times(read.ticks[np.searchsorted(table.places, panel.rows)], read.per)

    def _value_steps(self, panel: Panel | None, ticks: np.ndarray) -> _Steps:
        if panel is None:
            return _steps(np.empty(0, np.int64), ticks, _VALUES)
        series = np.array([self.index.get(name, -1) for name in panel.names])[panel.series]
        if left := sum(name not in self.index for name in panel.names):
            self.report.append(f"{left:,} series of {panel.source} are not among the events: left out")
        kept = np.flatnonzero(series >= 0)
        return _steps(series[kept], ticks[kept], _VALUES, value=kept)

    def _facts(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Static columns of the chosen series: numbers and codes."""

        def place(name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
            return self._fact(name, cells, missing)[chosen]

        return self._placed("static", "static_categories", len(chosen), place, None)

    def _marks(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Marks of the steps, -1 in `rows` where a step is no event: numbers and codes."""

        def place(name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
            return np.where(rows >= 0, cells[rows], missing)

        return self._placed("marks", "mark_categories", len(rows), place, self.table)

    def _placed(
        self, option: str, categories: str, size: int, place: Place, home: Table | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and codes of the columns that an option names, which are two fields of the encoding."""
        named, homes, where = getattr(self.data, option), self.homes, self._where
        if home is not None:
            homes, where = dict.fromkeys(home.columns, home), home.source
        require_columns(where, homes, named, option)
        if not self.is_new:
            texts = [n for n in named if n in self.data.categorical or not homes[n].columns[n].is_numeric]
            numeric = [n for n in named if n not in texts]
            made: dict[str, Any] = {option: numeric, categories: {n: [] for n in texts}}
            self.fixed = replace(self.fixed, **made)
        numeric, known = getattr(self.fixed, option), getattr(self.fixed, categories)
        require_read(where, homes, [*numeric, *known])
        numbers = self._numbers(numeric, size, place, home)
        codes, names = self._categories(known, size, place, home)
        known.update(names)
        return numbers, codes

    @property
    def _where(self) -> str:
        """The tables in which a fact may stand."""
        return " or ".join(each.source for each in (self.table, self.facts) if each is not None)

    # ---------------------------------------------------------------------- the log

    def _made(
        self, steps: _Steps, since: _Moments, until: _Moments, origin: int, per: int, panel: Panel | None
    ) -> tuple[EventLog, EventEncoding]:
        present, series = np.unique(steps.series, return_inverse=True)
        if not len(present):
            raise DataError(f"{self.table.source} has no series to read: see data.start and data.end")
        starts = np.searchsorted(series, np.arange(len(present) + 1)).astype(np.int64)
        first, last = steps.ticks[starts[:-1]], steps.ticks[starts[1:] - 1]
        begin = np.where(since.known[present], since.ticks[present], first)
        end = np.where(until.known[present], until.ticks[present], last)
        scored = (steps.rank == _EVENT) & (steps.ticks > begin[series])
        gaps = np.diff(steps.ticks, prepend=steps.ticks[:1]).astype(np.float64) / per
        gaps[starts[:-1]] = 0.0
        (marks, mark_codes), (static, static_codes) = self._marks(steps.row), self._facts(present)
        values = np.full((len(series), 0 if panel is None else panel.values.shape[1]), np.nan)
        if panel is not None:
            values[steps.value >= 0] = panel.values[steps.value[steps.value >= 0]]
        origins = Times(first.astype(object) + origin, per).origins(np.arange(len(first)), self._form)
        clock = Clock(self.fixed.time_form, self.fixed.unit, origins)
        if self.known is None:
            tied = scored[1:] & scored[:-1] & (gaps[1:] == 0) & (series[1:] == series[:-1])
            days = 0.0 if self._form != "date" else float(steps.ticks.max() - steps.ticks.min()) / 86400e9
            self.fixed = replace(
                self.fixed, ties=bool(tied.any()), clock=days > _CLOCK_DAYS,
                resolution=self._resolution(steps, end, until, per, clock, gaps[scored & (gaps > 0)]),
            )  # fmt: skip
        rows = np.where(steps.row >= 0, self.table.places[steps.row], 0)
        log = EventLog(
            names=[self.names[s] for s in present], starts=starts, times=(steps.ticks - first[series]) / per, gaps=gaps,
            codes=steps.code.copy(), scored=scored, marks=marks, mark_codes=mark_codes, values=values, static=static,
            static_codes=static_codes, since=(begin - first) / per, until=(end - first) / per,
            ended=until.known[present], phases=self._phases(steps.ticks, origin), rows=rows, clock=clock, report=[],
            source=self.table.source, unit=self.table.unit,
        )  # fmt: skip
        return replace(log, report=[*described(log, self.fixed, self.data), *self.report]), self.fixed

    def _phases(self, ticks: np.ndarray, origin: int) -> np.ndarray:
        """Fractions of the day and of the week, which begins on Monday, in UTC."""
        made = np.zeros((len(ticks), 2))
        if self._form == "date":
            for column, (days, shift) in enumerate(((1, 0), (7, 3))):
                period = days * 86400 * 10**9
                made[:, column] = (ticks + (origin + shift * 86400 * 10**9) % period) % period / period
        return made

    def _resolution(
        self, steps: _Steps, end: np.ndarray, until: _Moments, per: int, clock: Clock, waits: np.ndarray
    ) -> float:
        """data.resolution in the unit of the times, or what all are multiples of."""
        text = self.data.resolution
        if text is not None:
            return 0.0 if text.strip() in ("0", "0.0") else clock.span(text, "data.resolution")
        if steps.ticks.dtype.kind == "f" or not len(waits):
            return 0.0
        known = end[until.known[np.unique(steps.series)]]
        apart = np.r_[steps.ticks[steps.row >= 0], known]
        resolution = float(math.gcd(*np.unique(apart - apart[0]).tolist())) / per
        return resolution if resolution >= _FINE * float(np.median(waits)) else 0.0


def _common(parts: Sequence[Times]) -> tuple[list[np.ndarray], int, int]:
    """Ticks of several columns on one line of time; origin + ticks / per is a time: int64 since the earliest tick,
    float64 where these do not fit, or where a column is of floats, whose origin is 0."""
    if any(part.ticks.dtype.kind == "f" for part in parts if len(part.ticks)):
        return [part.between(part.ticks) for part in parts], 0, 1
    per = max(part.per for part in parts)
    ticks = [part.ticks.astype(object) * (per // part.per) for part in parts]
    origin, last = (end(np.concatenate(ticks)) for end in (min, max))
    if last - origin > 10**300:
        raise DataError("the times of the tables lie too far apart for their digits: correct the outlier")
    kind = np.int64 if last - origin < 2**63 else np.float64
    return [(part - origin).astype(kind) for part in ticks], origin, per


# ---------------------------------------------------------------------- the report


def described(log: EventLog, encoding: EventEncoding, data: EventsData) -> list[str]:
    """What was read: series, events by kind, ties, resolution, the median gap, and how much is censored."""
    scored, names, counts = log.scored, encoding.kinds, np.bincount(log.codes, minlength=encoding.codes)
    events = np.bincount(log.codes[scored] - FIRST, minlength=len(names))
    kinds = ", ".join(f"{name} {count:,}" for name, count in list(zip(names, events, strict=True))[:12])
    lines = [
        f"{log.source}: {counted(len(log.names), 'series')}, {counted(int(scored.sum()), 'event')} of "
        f"{counted(len(names), 'kind')} to predict: {kinds}{', ...' if len(names) > 12 else ''}"
    ]
    if before := int(counts[FIRST : FIRST + len(names)].sum() - events.sum()):
        why = "at the start of their series" if data.start is None else f"at or before --data.start ({data.start})"
        lines.append(f"{counted(before, 'event')} {why}: read, and not predicted")
    if encoding.inputs:
        each = zip(encoding.inputs, counts[FIRST + len(names) :], strict=True)
        lines.append("read, and not predicted: " + ", ".join(f"{name} {count:,}" for name, count in each))
    later = np.ones(len(log.times), bool)
    later[log.starts[:-1]] = False
    tied = later & scored & (log.gaps == 0) & np.r_[False, scored[:-1]]
    if tied.any():
        what = "predicted as sets" if encoding.ties else "training has none such: read, and not scored"
        lines.append(f"{counted(int(tied.sum()), 'event')} at the time of another of the same series: {what}")

    def written(time: float) -> str:
        return duration(time) if encoding.time_form == "date" else f"{time:.6g} {encoding.unit}"

    if len(gaps := log.gaps[later & (log.gaps > 0)]):
        assumed = f": the numbers {data.time} are read in {encoding.unit}; if they are not, give --data.time_unit"
        is_known = encoding.time_form == "date" or data.time_unit is not None
        lines.append(f"median gap {written(float(np.median(gaps)))}{'' if is_known else assumed}")
    interval = "a likelihood is the probability of that interval (--data.resolution 0 for exact times)"
    exact = "times are exact: a likelihood is a density (--data.resolution for rounded ones)"
    lines.append(f"resolution {written(encoding.resolution)}: {interval}" if encoding.resolution else exact)
    if not log.ended.any():
        return [
            *lines, "each series ends with its last event: if it was observed for longer, say until when: --data.end"
        ]  # fmt: skip
    ends = int((log.ended & (log.until > log.times[log.starts[1:] - 1])).sum())
    without = len(log.names) - len(np.unique(log.series[scored]))
    share = 100 * ends / max(1, ends + int(scored.sum()))
    return [
        *lines,
        f"{counted(ends, 'wait')} censored by the end of observation, {share:.0f} % of all waits; {without:,} series "
        "without an event to predict",
    ]
