"""A table -> a panel: the columns by their roles, one value for each step and channel, and the lines of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from glissando.errors import ConfigError, DataError
from glissando.series import tables
from glissando.series.inspection import described, warnings
from glissando.series.options import SeriesData
from glissando.series.panel import MISSING, UNKNOWN, Encoding, Label, Panel
from glissando.series.roles import Roles, home, roles
from glissando.series.steps import Clash, merge, steps
from glissando.series.tables import Names, Table, counted, listed


def read_panel(data: SeriesData, source: Any = None, encoding: Encoding | None = None) -> tuple[Panel, Encoding]:
    """The series of a table, and what its columns mean to a model.

    Args:
        data: Which column is what. Those that it does not name are found in the table.
        source: A file, or a frame of pandas or polars, in the place of data.path.
        encoding: That of a run, for new tables: its channels are read, a category that it does not know is counted, and
            a column that is missing is an error. Without it, the table says what its columns mean.

    Raises:
        DataError: A value cannot be used; the message has the file, the line and the column.
        UnknownNameError: There is no such column.
        ConfigError: Options contradict each other.
    """
    if source is None and data.path is None:
        raise ConfigError("data.path is missing: name a CSV or Parquet file, or give a frame")
    source, option = (data.path, "data.path") if source is None else (source, "")
    table = tables.read_table(source, data.delimiter, option)
    found = roles(data, table, encoding)
    reader = _Reader(data, table, found, encoding is not None)
    panel, fixed = reader.panel()
    return panel, fixed


class _Reader:
    """A table on its way to a panel.

    kept  (R,) bool, rows of a long table that are measurements of its channels; None: all
    """

    def __init__(self, data: SeriesData, table: Table, found: Roles, is_new: bool) -> None:
        self.data, self.table, self.roles, self.is_new = data, table, found, is_new
        self.fixed = found.encoding
        self.report = list(found.report)
        self.kept = None if found.channels is None else self._measurements(found.channels)
        self.steps = steps(data, table, found.encoding.time_form, self.kept)
        self.count = len(self.steps.first)
        self.merged: dict[str, tuple[int, int, int]] = {}

    def panel(self) -> tuple[Panel, Encoding]:
        data, steps_, fixed = self.data, self.steps, self.fixed
        values, codes, categories = self._channels()
        static, static_codes, static_categories = self._static()
        target, labels, label, classes = self._target()
        future = self._columns(fixed.future, self._future)
        if not self.is_new:
            fixed = replace(
                fixed, categorical=categories, static_categorical=static_categories, classes=classes, label=label
            )
        times = steps_.times
        first = steps_.places[steps_.starts[:-1]]
        origins = first * 0 if times is None else times.origins(first, fixed.time_form)
        panel = Panel(
            steps_.names, steps_.starts, steps_.since_first(), steps_.gaps(), values, codes, future, static,
            static_codes, target, labels, self.table.places[steps_.places], np.ones(self.count, bool),
            fixed.clock(origins), [], self.table.source, self.table.unit,
        )  # fmt: skip
        lines = [*described(data, fixed, panel, self.is_new), *self._changed(), *self.report]
        return panel._replace(report=[*lines, *warnings(data, fixed, panel, self.is_new)]), fixed

    def _measurements(self, channels: Names) -> np.ndarray:
        read = [*self.fixed.columns, *self.fixed.categorical]
        wanted = np.array([name in read for name in [*channels.names, ""]])[channels.codes]
        missing = wanted & self.table.columns[str(self.data.value)].missing
        if not self.is_new and (left := [name for name in channels.names if name not in read]):
            self.report.append(f"left out: {counted(int((~wanted).sum()), 'row')} of other channels, {listed(left)}")
        if missing.any():
            self.report.append(f"left out: {counted(int(missing.sum()), 'row')} without a value")
        kept: np.ndarray = wanted & ~missing
        if not kept.any():
            raise DataError(f"{self.table.source} has no value of {listed(read)}: give a table with measurements")
        return kept

    # ---------------------------------------------------------------------- channels

    @cached_property
    def _measured(self) -> dict[str, np.ndarray]:
        """Of a long table: channel -> which of the sorted rows are its measurements."""
        channels = cast(Names, self.roles.channels)
        code = channels.codes[self.steps.rows]
        order = np.argsort(code, kind="stable")
        ends = np.searchsorted(code[order], np.arange(len(channels.names) + 1))
        return {name: order[ends[c] : ends[c + 1]] for c, name in enumerate(channels.names)}

    def _channels(self) -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
        table, fixed, channels = self.table, self.fixed, self.roles.channels
        if channels is None:
            values = self._columns(fixed.columns, lambda name: self._step(tables.numbers(table, name), name, np.nan))
            return values, *self._categories(fixed.categorical, self.count, self._category)
        value = str(self.data.value)
        is_number = np.array([name in fixed.columns for name in channels.names])[channels.codes]
        cells = tables.numbers(table, value, is_number & cast(np.ndarray, self.kept))
        coded = tables.names(table, value) if fixed.categorical else Names(np.empty(0, np.int64), [])
        values = self._columns(fixed.columns, lambda name: self._step(cells, value, np.nan, name))
        return values, *self._categories(
            fixed.categorical, self.count, lambda name: (coded.names, self._step(coded.codes, value, -1, name))
        )

    def _columns(self, names: list[str], read: Callable[[str], np.ndarray]) -> np.ndarray:
        made = np.empty((self.count, len(names)), order="F")
        for number, name in enumerate(names):
            made[:, number] = read(name)
        return np.ascontiguousarray(made)

    def _categories(
        self, known: dict[str, list[str]], size: int, read: Callable[[str], tuple[list[str], np.ndarray]]
    ) -> tuple[np.ndarray, dict[str, list[str]]]:
        """(size, Q) codes of columns, and the categories of each; `read` gives a column's names and codes of these."""
        codes, categories = np.zeros((size, len(known)), np.int64), {}
        for number, name in enumerate(known):
            codes[:, number], categories[name] = self._encoded(name, *read(name), known[name])
        return codes, categories

    def _category(self, name: str) -> tuple[list[str], np.ndarray]:
        found = tables.names(self.table, name)
        return found.names, self._step(found.codes, name, -1)

    def _step(self, cells: np.ndarray, column: str, missing: Any, channel: str | None = None) -> np.ndarray:
        """(N,) a column of a table by steps; of a long one, the measurements of a channel."""
        steps_, how = self.steps, self.data.duplicates
        if how == "mean" and cells.dtype.kind == "i":
            how = "error"
        at = slice(None) if channel is None else self._measured.get(channel, np.empty(0, np.int64))
        rows = steps_.rows[at]
        try:
            found = merge(cells[rows], steps_.step[at], self.count, missing, how)
        except Clash as error:
            what = repr(column) if channel is None else f"the channel {channel!r}"
            raise self._clash(error, rows, column, what) from None
        if found.repeated:
            what = "cell" if channel is None else "measurement"
            repeated, most, unequal = self.merged.get(what, (0, 0, 0))
            self.merged[what] = (repeated + found.repeated, max(most, found.most), unequal + found.unequal)
        return found.values

    def _clash(self, error: Clash, rows: np.ndarray, column: str, what: str) -> DataError:
        """The error for two rows of one time that differ."""
        data, table = self.data, self.table
        one, other = rows[error.first], rows[error.second]
        values = table.columns[column].values
        of = "" if data.group is None else f" of {data.group} {str(table.columns[data.group].values[other]).strip()!r}"
        time = "" if data.time is None else f" at {data.time} {table.columns[data.time].values[other]}"
        fix = "correct one, or choose with --data.duplicates mean, first or last"
        if data.group is None and not self.is_new:
            fix += "; if the table has several series, name the column that tells them apart with --data.group"
        if data.channel is None and self.fixed.categorical and not self.is_new:
            fix += "; if each row is one measurement, name the column that says of what with --data.channel"
        return DataError(
            f"{table.at(other, column)}: {what}{of}{time} is {values[other]}, and in {table.unit} {table.places[one]} "
            f"it is {values[one]}: {fix}"
        )

    def _encoded(self, name: str, names: list[str], raw: np.ndarray, known: list[str]) -> tuple[np.ndarray, list[str]]:
        """Codes of a categorical column, and its known categories: a run's, or its own, the most frequent first."""
        if not self.is_new:
            counts = np.bincount(raw[raw >= 0], minlength=len(names))
            known = [names[index] for index in np.argsort(-counts, kind="stable") if counts[index]]
        index = {each: number + UNKNOWN + 1 for number, each in enumerate(known)}
        codes = np.array([*(index.get(each, UNKNOWN) for each in names), MISSING], np.int64)[raw]
        if not self.is_new:
            self.report.append(f"categories of {name!r}, {len(known):,} in all: {listed(known)}")
        elif unknown := int((codes == UNKNOWN).sum()):
            strange = [each for number, each in enumerate(names) if each not in index and (raw == number).any()]
            self.report.append(
                f"unknown to the model: {counted(unknown, 'value')} of {name!r}, such as {listed(strange)}"
            )
        return codes, known

    def _future(self, name: str) -> np.ndarray:
        found = self._step(tables.numbers(self.table, name), name, np.nan)
        if (blank := np.flatnonzero(np.isnan(found))).size:
            raise DataError(
                f"{self.table.at(self.steps.places[blank[0]], name)}: the value is missing ({blank.size} of "
                f"{self.count} steps), and a column of data.future is known at each: fill it in"
            )
        return found

    # ---------------------------------------------------------------------- facts and targets

    def _static(self) -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
        size, fixed = len(self.steps.names), self.fixed
        static = np.empty((size, len(fixed.static)))
        for number, name in enumerate(fixed.static):
            static[:, number] = self._fact(name, tables.numbers(self._home(name), name), np.nan)
        return static, *self._categories(fixed.static_categorical, size, self._static_category)

    def _static_category(self, name: str) -> tuple[list[str], np.ndarray]:
        found = tables.names(self._home(name), name)
        return found.names, self._fact(name, found.codes, -1)

    def _home(self, name: str) -> Table:
        return home(self.table, self.roles.facts, name)

    def _fact(self, name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
        """(S,) a column that does not vary within a series."""
        table, size = self._home(name), len(self.steps.names)
        if table is self.table:
            rows = self.steps.rows
            keys = self.steps.series[self.steps.step]
        else:
            rows, keys = self._fact_rows
        try:
            return merge(cells[rows], keys, size, missing).values
        except Clash as error:
            one, other = rows[error.first], rows[error.second]
            values = table.columns[name].values
            what, fix = "is static", "leave it out of data.static"
            if name in self.roles.target:
                what, fix = "is the label of a series", "give --data.label step"
            raise DataError(
                f"{table.at(other, name)}: {name!r} {what}, and {values[other]} of {self.data.group or 'the series'} "
                f"{self.steps.names[keys[error.second]]!r} was {values[one]} in {table.unit} {table.places[one]}: "
                f"correct one, or {fix}"
            ) from None

    @cached_property
    def _fact_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the second table that are of a series of the first, sorted by series, and the series of each."""
        groups = tables.names(cast(Table, self.roles.facts), str(self.data.group), "group")
        index = {name: number for number, name in enumerate(self.steps.names)}
        series = np.array([index.get(name, -1) for name in groups.names])[groups.codes]
        rows = np.argsort(series, kind="stable")
        rows = rows[series[rows] >= 0]
        return rows, series[rows]

    def _target(self) -> tuple[np.ndarray | None, np.ndarray | None, Label, list[str]]:
        """Targets of a regression or labels of a classification, what has a label, and the classes."""
        names, fixed = self.roles.target, self.fixed
        if not names:
            return None, None, fixed.label, fixed.classes
        if fixed.task == "regression":
            return self._columns(names, self._number_target), None, fixed.label, []
        name = names[0]
        found = tables.names(self._home(name), name)
        label = fixed.label if self.is_new else self._label_of(name, found)
        raw = self._fact(name, found.codes, -1) if label == "series" else self._step(found.codes, name, -1)
        counts = np.bincount(raw[raw >= 0], minlength=len(found.names))
        classes = fixed.classes
        if not self.is_new:
            classes = [found.names[index] for index in np.argsort(-counts, kind="stable") if counts[index]]
            if len(classes) < 2:
                raise DataError(
                    f"{self._home(name).source}, column {name!r} holds {'a single class' if classes else 'no class'}: "
                    "a classification needs two"
                )
        known = {each: number for number, each in enumerate(classes)}
        if strange := [each for number, each in enumerate(found.names) if each not in known and counts[number]]:
            home = self._home(name)
            row = int(np.flatnonzero(found.codes == found.names.index(strange[0]))[0])
            raise DataError(
                f"{home.at(row, name)}: the class {strange[0]!r} is not among those that training knows, "
                f"{listed(classes, 10)}. Leave these rows out, or, where the column holds numbers to predict, set "
                "data.task to regression"
            )
        labels = np.array([*(known.get(each, -1) for each in found.names), -1], np.int64)[raw]
        if missing := int((labels < 0).sum()):
            self.report.append(f"not scored: {counted(missing, label)} without {name!r}")
        return None, labels, label, classes

    def _label_of(self, name: str, found: Names) -> Label:
        """Whether each series or each step has a class."""
        if self.data.label == "series" or self._home(name) is not self.table:
            return "series"
        steps_ = self.steps
        if self.data.label == "step" or len(steps_.names) == 1:
            return "step"
        try:
            merge(found.codes[steps_.rows], steps_.series[steps_.step], len(steps_.names), -1)
        except Clash:
            return "step"
        return "series"

    def _number_target(self, name: str) -> np.ndarray:
        """(N,) a number to predict at each step, or, of a whole series, at its last."""
        if self.data.label != "series" and self._home(name) is self.table:
            return self._step(tables.numbers(self.table, name), name, np.nan)
        made = np.full(self.count, np.nan)
        made[self.steps.starts[1:] - 1] = self._fact(name, tables.numbers(self._home(name), name), np.nan)
        return made

    # ---------------------------------------------------------------------- report

    def _changed(self) -> list[str]:
        """What was sorted and merged, and what the second table lacks."""
        lines, data = [], self.data
        if count := self.steps.unsorted:
            hint = "" if data.group is not None or self.is_new else (
                "; if the table holds several series, name the column that tells them apart with --data.group"
            )  # fmt: skip
            lines.append(f"sorted: {counted(count, 'row')} after a later time of the same series{hint}")
        for what, (repeated, most, unequal) in self.merged.items():
            by = ", ".join(n for n in (data.group, data.time, data.channel) if n is not None)
            equal = "with equal values" if not unequal else (
                f"{unequal:,} with unequal values, by --data.duplicates {data.duplicates}"
            )  # fmt: skip
            lines.append(f"merged: {counted(repeated, what)} of one ({by}), up to {most:,} rows each, {equal}")
        facts = self.roles.facts
        if facts is not None and data.group is not None:
            there = set(self._fact_rows[1].tolist())
            if absent := [name for number, name in enumerate(self.steps.names) if number not in there]:
                lines.append(f"without a row in {facts.source}: {counted(len(absent), 'series')}, {listed(absent)}")
        return lines
