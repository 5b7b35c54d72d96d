"""A table -> a panel: the columns by their roles, one value for each step and channel, and the lines of the report."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from glissando.errors import ConfigError, DataError
from glissando.series import tables
from glissando.series.columns import ColumnReader, side_by_side
from glissando.series.inspection import described, warnings
from glissando.series.options import SeriesData
from glissando.series.panel import Clock, Encoding, Label, Panel
from glissando.series.roles import Roles, roles
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
    table = tables.read_table(source, data, option)
    return _Reader(data, table, roles(data, table, encoding), encoding is not None).panel()


class _Reader(ColumnReader):
    """A table on its way to a panel.

    kept  (R,) bool, rows of a long table that are measurements of its channels; None: all
    """

    data: SeriesData

    def __init__(self, data: SeriesData, table: Table, roles: Roles, is_new: bool) -> None:
        super().__init__(data, table, roles.facts, is_new)
        self.roles, self.fixed, self.report = roles, roles.encoding, list(roles.report)
        self.kept = None if roles.channels is None else self._measurements(roles.channels)
        self.steps = steps(data, table, roles.encoding.time_form, self.kept)
        self.names, self.count = self.steps.names, len(self.steps.first)
        self.merged: dict[str, tuple[int, int, int]] = {}

    def panel(self) -> tuple[Panel, Encoding]:
        data, steps_, fixed = self.data, self.steps, self.fixed
        if self.roles.channels is None:
            values = self._numbers(fixed.columns, self.count, self._step, self.table)
            codes, categories = self._categories(fixed.categorical, self.count, self._step, self.table)
        else:
            values, codes, categories = self._long_channels(self.roles.channels)
        static = self._numbers(fixed.static, len(steps_.names), self._fact)
        static_codes, static_categories = self._categories(fixed.static_categorical, len(steps_.names), self._fact)
        future = self._numbers(fixed.future, self.count, self._known, self.table)
        target, labels, label, classes = self._target()
        if not self.is_new:
            fixed = replace(
                fixed, categorical=categories, static_categorical=static_categories, classes=classes, label=label
            )
        first = steps_.places[steps_.starts[:-1]]
        origins = first * 0 if data.time is None else steps_.times.origins(first, fixed.time_form)
        panel = Panel(
            names=steps_.names, starts=steps_.starts, times=steps_.since_first(), gaps=steps_.gaps(), values=values,
            codes=codes, future=future, static=static, static_codes=static_codes, target=target, labels=labels,
            rows=self.table.places[steps_.places], scored=np.ones(self.count, bool),
            clock=Clock(fixed.time_form, fixed.unit, origins),
            report=[], source=self.table.source, unit=self.table.unit,
        )  # fmt: skip
        lines = [*described(data, fixed, panel, self.is_new), *self._changed(), *self.report]
        return replace(panel, report=[*lines, *warnings(data, fixed, panel, self.is_new)]), fixed

    # ---------------------------------------------------------------------- columns

    def _own_rows(self) -> tuple[np.ndarray, np.ndarray]:
        return self.steps.rows, self.steps.series[self.steps.step]

    def _about_fact(self, name: str) -> tuple[str, str]:
        if name in self.roles.target:
            return f"{name!r}, the label of a series,", "give --data.label step"
        return super()._about_fact(name)

    def _step(self, name: str, cells: np.ndarray, missing: Any, channel: str | None = None) -> np.ndarray:
        """(N,) a column of the table by steps; of a long one, the measurements of a channel."""
        steps_, how = self.steps, self.data.duplicates
        if how == "mean" and cells.dtype.kind == "i":
            how = "error"
        at = slice(None) if channel is None else self._measured.get(channel, np.empty(0, np.int64))
        rows = steps_.rows[at]
        try:
            values = merge(cells[rows], steps_.step[at], self.count, missing, how)
        except Clash as error:
            fix = "correct one, or choose with --data.duplicates mean, first or last"
            if self.data.group is None and not self.is_new:
                fix += "; if the table has several series, name the column that tells them apart with --data.group"
            if self.data.channel is None and self.fixed.categorical and not self.is_new:
                fix += "; if each row is one measurement, name the column that says of what with --data.channel"
            what = repr(name) if channel is None else f"the channel {channel!r}"
            raise self._clash(error, self.table, rows, name, what, fix) from None
        if values.repeated:
            what = "cell" if channel is None else "measurement"
            repeated, most, unequal = self.merged.get(what, (0, 0, 0))
            self.merged[what] = (repeated + values.repeated, max(most, values.most), unequal + values.unequal)
        return values.values

    def _known(self, name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
        """(N,) a column that is known at every step."""
        values = self._step(name, cells, missing)
        if (blank := np.flatnonzero(np.isnan(values))).size:
            raise DataError(
                f"{self.table.at(self.steps.places[blank[0]], name)}: the value is missing ({blank.size} of "
                f"{self.count} steps), and a column of data.future is known at each: fill it in"
            )
        return values

    # ---------------------------------------------------------------------- long tables

    def _measurements(self, channels: Names) -> np.ndarray:
        read = [*self.fixed.columns, *self.fixed.categorical]
        wanted = np.array([name in read for name in [*channels.names, ""]])[channels.codes]
        missing = wanted & self.table.columns[str(self.data.value)].missing
        if left := [name for name in channels.names if name not in read]:
            what = "of channels that the model does not read" if self.is_new else "of other channels"
            self.report.append(f"left out: {counted(int((~wanted).sum()), 'row')} {what}, {listed(left)}")
        if missing.any():
            self.report.append(f"left out: {counted(int(missing.sum()), 'row')} without a value")
        kept: np.ndarray = wanted & ~missing
        if not kept.any():
            raise DataError(f"{self.table.source} has no value of {listed(read)}: give a table with measurements")
        return kept

    @cached_property
    def _measured(self) -> dict[str, np.ndarray]:
        """Channel -> which of the sorted rows are its measurements."""
        channels = cast(Names, self.roles.channels)
        code = channels.codes[self.steps.rows]
        order = np.argsort(code, kind="stable")
        ends = np.searchsorted(code[order], np.arange(len(channels.names) + 1))
        return {name: order[ends[c] : ends[c + 1]] for c, name in enumerate(channels.names)}

    def _long_channels(self, channels: Names) -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
        value, fixed = str(self.data.value), self.fixed
        is_number = np.array([name in fixed.columns for name in channels.names])[channels.codes]
        cells = tables.numbers(self.table, value, is_number & cast(np.ndarray, self.kept))
        values = [self._step(value, cells, np.nan, name) for name in fixed.columns]
        texts = tables.names(self.table, value) if fixed.categorical else Names(np.empty(0, np.int64), [])
        coded = self._categories(
            fixed.categorical,
            self.count,
            lambda name, cells, missing: self._step(value, cells, missing, name),
            cells=texts,
        )
        return side_by_side(values, self.count, np.float64), *coded

    # ---------------------------------------------------------------------- facts and targets

    def _target(self) -> tuple[np.ndarray | None, np.ndarray | None, Label, list[str]]:
        """Targets of a regression or labels of a classification, what has a label, and the classes."""
        names, fixed = self.roles.target, self.fixed
        if not names:
            return None, None, fixed.label, fixed.classes
        if fixed.task == "regression":
            return self._numbers(names, self.count, self._number_target), None, fixed.label, []
        name, home = names[0], self.homes[names[0]]
        values = tables.names(home, name)
        label = fixed.label if self.is_new else self._label_of(name, values)
        raw = (self._fact if label == "series" else self._step)(name, values.codes, -1)
        present = values.by_frequency(raw)
        classes = fixed.classes if self.is_new else present
        if len(classes) < 2:
            raise DataError(
                f"{home.source}, column {name!r} holds {'a single class' if classes else 'no class'}: a classification "
                "needs two"
            )
        known = {each: number for number, each in enumerate(classes)}
        for strange in (each for each in present if each not in known):
            row = int(np.flatnonzero(values.codes == values.names.index(strange))[0])
            raise DataError(
                f"{home.at(row, name)}: the class {strange!r} is not among those that training knows, "
                f"{listed(classes, 10)}. Leave these rows out, or, where the column holds numbers to predict, set "
                "data.task to regression"
            )
        labels = np.array([*(known.get(each, -1) for each in values.names), -1], np.int64)[raw]
        if missing := int((labels < 0).sum()):
            self.report.append(f"not scored: {counted(missing, label)} without {name!r}")
        return None, labels, label, classes

    def _label_of(self, name: str, values: Names) -> Label:
        """Whether each series or each step has a class."""
        if self.data.label == "series" or self.homes[name] is not self.table:
            return "series"
        steps_ = self.steps
        if self.data.label == "step" or len(steps_.names) == 1:
            return "step"
        try:
            merge(values.codes[steps_.rows], steps_.series[steps_.step], len(steps_.names), -1)
        except Clash:
            return "step"
        return "series"

    def _number_target(self, name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
        """(N,) a number to predict at each step, or, of a whole series, at its last."""
        if self.data.label != "series" and self.homes[name] is self.table:
            return self._step(name, cells, missing)
        made = np.full(self.count, np.nan)
        made[self.steps.starts[1:] - 1] = self._fact(name, cells, missing)
        return made

    # ---------------------------------------------------------------------- report

    def _changed(self) -> list[str]:
        """What was sorted and merged, and what the second table lacks."""
        lines, data = [], self.data
        if count := self.steps.unsorted:
            hint = "; if the table holds several series, name the column that tells them apart with --data.group"
            hint = "" if data.group is not None or self.is_new else hint
            lines.append(f"sorted: {counted(count, 'row')} after a later time of the same series{hint}")
        by = ", ".join(n for n in (data.group, data.time, data.channel) if n is not None)
        for what, (repeated, most, unequal) in self.merged.items():
            how = f"{unequal:,} with unequal values, by --data.duplicates {data.duplicates}"
            how = how if unequal else "with equal values"
            lines.append(f"merged: {counted(repeated, what)} of one ({by}), up to {most:,} rows each, {how}")
        if self.facts is not None:
            there = set(self._fact_rows[1].tolist())
            if absent := [name for number, name in enumerate(self.names) if number not in there]:
                source = self.facts.source
                lines.append(f"without a row in {source}: {counted(len(absent), 'series')}, {listed(absent)}")
        return lines
