"""A table -> a panel: what each column is for, by --data.* or by the encoding of a run, one value for each step and
channel, and the lines of the report."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from glissando.errors import ConfigError, DataError, unknown_name
from glissando.series import tables
from glissando.series.columns import (
    ColumnReader,
    clock_of,
    require_columns,
    require_options,
    require_read,
    side_by_side,
)
from glissando.series.inspection import described, warnings
from glissando.series.options import SeriesData
from glissando.series.panel import Clock, Encoding, Label, Panel, Task
from glissando.series.steps import Clash, merge, steps
from glissando.series.tables import Column, Names, Table, counted, listed

#: an option -> one that it needs
_NEEDS = (
    ("channel", "value"), ("value", "channel"), ("channel", "time"), ("time_format", "time"), ("time_unit", "time"),
    ("static_path", "group"), ("label", "target"),
)  # fmt: skip
#: a column of texts that is read without being named has at most this many categories, unless they repeat
_CATEGORIES = 20


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
    return _Reader(data, tables.read_table(source, data, option), encoding).panel()


class _Reader(ColumnReader):
    """A table on its way to a panel.

    channels  of a long table: the channel of each row
    target    columns to predict; none of a forecast, or of a table without them
    kept      (R,) bool, rows of a long table that are measurements of its channels; None: all
    """

    data: SeriesData

    def __init__(self, data: SeriesData, table: Table, encoding: Encoding | None) -> None:
        """Raises UnknownNameError for a column that is not there, ConfigError for options that contradict each other,
        DataError for a column of the run that the table lacks."""
        _require_consistent(data)
        facts = None if data.static_path is None else tables.read_table(data.static_path, data, "data.static_path")
        for option in ("group", "time", "channel", "value"):
            require_columns(table.source, table.columns, [getattr(data, option)], option)
        if facts is not None:
            require_columns(facts.source, facts.columns, [data.group], "group")
        super().__init__(data, table, facts, encoding is not None)
        self.where = table.source if facts is None else f"{table.source} or {facts.source}"
        self.report: list[str] = []
        form, unit = clock_of(data, table, encoding, self.report)
        self.channels = None if data.channel is None else tables.names(table, data.channel, "channel")
        self.fixed = Encoding(time_form=form, unit=unit) if encoding is None else encoding
        if encoding is None:
            self._set_roles()
        else:
            self._require_roles()
        self.kept = None if self.channels is None else self._measurements(self.channels)
        self.steps = steps(data, table, self.fixed.time_form, self.kept)
        self.names, self.count = self.steps.names, len(self.steps.first)
        self.merged: dict[str, tuple[int, int, int]] = {}

    def panel(self) -> tuple[Panel, Encoding]:
        data, steps_, fixed = self.data, self.steps, self.fixed
        if self.channels is None:
            values = self._numbers(fixed.columns, self.count, self._step, self.table)
            codes, categories = self._categories(fixed.categorical, self.count, self._step, self.table)
        else:
            values, codes, categories = self._long_channels(self.channels)
        static = self._numbers(fixed.static, len(steps_.names), self._fact)
        static_codes, static_categories = self._categories(fixed.static_categorical, len(steps_.names), self._fact)
        future = self._numbers(fixed.future, self.count, self._known, self.table)
        target, labels, label, classes = self._target()
        if not self.is_new:
            fixed = replace(
                fixed, categorical=categories, static_categorical=static_categories, classes=classes, label=label
            )
        first = steps_.first_rows[steps_.starts[:-1]]
        origins = first * 0 if data.time is None else steps_.times.origins(first, fixed.time_form)
        panel = Panel(
            names=steps_.names, starts=steps_.starts, times=steps_.since_first(), gaps=steps_.gaps(), values=values,
            codes=codes, future=future, static=static, static_codes=static_codes, target=target, labels=labels,
            rows=self.table.places[steps_.first_rows], scored=np.ones(self.count, bool),
            clock=Clock(fixed.time_form, fixed.unit, origins),
            report=[], source=self.table.source, unit=self.table.unit,
        )  # fmt: skip
        lines = [*described(data, fixed, panel, self.is_new), *self._changed(), *self.report]
        return replace(panel, report=[*lines, *warnings(data, fixed, panel, self.is_new)]), fixed

    # ---------------------------------------------------------------------- what columns are for

    def _require_roles(self) -> None:
        """Raise DataError for a column of the run that the table lacks."""
        fixed, target = self.fixed, self.fixed.target if self.fixed.task != "forecast" else []
        wide = (*fixed.columns, *fixed.categorical) if self.channels is None else ()
        require_read(self.where, self.table.columns, [*fixed.future, *wide])
        require_read(self.where, self.homes, [*fixed.static, *fixed.static_categorical])
        if absent := [name for name in target if name not in self.homes]:
            self.report.append(f"there is no column {absent[0]!r}: nothing is scored")
        self.target = [] if absent else target

    def _set_roles(self) -> None:
        """Set what columns are for, by the options and the values; categories and classes are counted later."""
        data, table, channels = self.data, self.table, self.channels
        require_columns(self.where, self.homes, data.static, "static")
        require_columns(table.source, table.columns, data.future, "future")
        if channels is None or not data.target or data.target[0] not in channels.names:
            require_columns(self.where, self.homes, data.target, "target")
        task = self._task()
        self.target = data.target if task != "forecast" else []
        forecast = data.target if task == "forecast" and data.columns else []
        chosen = list(dict.fromkeys([*data.columns, *forecast]))
        if channels is None:
            numeric, categorical = self._wide_channels(chosen)
        else:
            chosen = chosen or channels.names
            texts = self._texts(chosen, channels)
            numeric, categorical = [n for n in chosen if n not in texts], [n for n in chosen if n in texts]
        categories = [n for n in data.static if n in data.categorical or not self._column(n).is_numeric]
        known = {*numeric, *categorical, *data.static}
        if strange := [name for name in data.categorical if name not in known]:
            raise unknown_name("column of data.categorical", strange[0], known)
        target = self.target or data.target or numeric
        if task == "forecast" and (strange := [name for name in target if name not in numeric]):
            raise ConfigError(
                f"{strange[0]} is no numeric channel, and a forecast is of numbers: leave it out of data.target"
            )
        self.fixed = replace(
            self.fixed, columns=numeric, categorical={name: [] for name in categorical},
            static=[name for name in data.static if name not in categories],
            static_categorical={name: [] for name in categories}, future=data.future, target=target, task=task,
        )  # fmt: skip

    def _column(self, name: str) -> Column:
        return self.homes[name].columns[name]

    def _task(self) -> Task:
        data = self.data
        if data.task is not None:
            task: Task = data.task
        elif not data.target or (self.channels is not None and data.target[0] in self.channels.names):
            task = "forecast"
        else:
            numeric = all(self._column(name).is_numeric for name in data.target)
            task = "regression" if numeric else "classification"
        if task == "classification" and len(data.target) > 1:
            raise ConfigError(f"data.task classification is of one target, got {', '.join(data.target)}: name one")
        return task

    def _wide_channels(self, wanted: list[str]) -> tuple[list[str], list[str]]:
        """The numeric and the categorical channels, of those that options name, or of all."""
        data, table = self.data, self.table
        require_columns(table.source, table.columns, wanted, "columns")
        used = {data.group, data.time, *data.static, *data.future, *self.target}
        chosen = [*wanted] or [name for name in table.columns if name not in used]
        chosen += [name for name in data.categorical if name in table.columns and name not in {*chosen, *used}]
        numeric: list[str] = []
        categorical: list[str] = []
        left: list[str] = []
        for name in chosen:
            column, is_category = table.columns[name], name in data.categorical
            if not is_category and name not in wanted and (why := _left_out(name, column)) is not None:
                left.append(f"the column {name!r} is left out: {why}")
            elif not is_category and (separated := column.separated):
                sign, example = separated
                raise DataError(
                    f"{table.source}, column {name!r} holds numbers such as {example}: give --data.decimal {sign} to "
                    f"read that as {float(tables.as_number(example, sign)):.10g}, or, if they are categories, "
                    f"--data.categorical {shlex.quote(name)}"
                )
            elif column.values.dtype.kind in "mM":
                raise DataError(f"{table.source}, column {name!r} holds times: leave it out of data.columns")
            else:
                (categorical if is_category or not column.is_numeric else numeric).append(name)
        self.report += left
        if not numeric and not categorical:
            why = "; ".join(left) or f"it has {', '.join(table.columns)} alone"
            raise ConfigError(f"{table.source} has no column to read: {why}. Name some in data.columns")
        return numeric, categorical

    def _texts(self, chosen: list[str], channels: Names) -> set[str]:
        """The channels of a long table that hold categories."""
        data, value, count = self.data, self.table.columns[str(self.data.value)], len(channels.names)
        for name in chosen:
            if name not in channels.names:
                raise unknown_name(f"channel of {self.table.source}, column {data.channel!r}", name, channels.names)
        numbers = np.bincount(channels.codes[~value.missing & ~np.isnan(value.numbers)], minlength=count)
        cells = np.bincount(channels.codes[~value.missing], minlength=count)
        texts = {name for name, some, every in zip(channels.names, numbers, cells, strict=True) if some < 0.5 * every}
        return texts | {name for name in data.categorical if name in channels.names}

    # ---------------------------------------------------------------------- columns

    def _own_rows(self) -> tuple[np.ndarray, np.ndarray]:
        return self.steps.rows, self.steps.series[self.steps.step]

    def _about_fact(self, name: str) -> tuple[str, str]:
        if name in self.target:
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
                f"{self.table.at(self.steps.first_rows[blank[0]], name)}: the value is missing ({blank.size} of "
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
        channels = cast(Names, self.channels)
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
        names, fixed = self.target, self.fixed
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


def _require_consistent(data: SeriesData) -> None:
    require_options(vars(data), _NEEDS)
    if data.static_path is not None and not data.static and not data.target:
        raise ConfigError("data.static_path is given and data.static names none of its columns: name those to read")
    if data.task in ("regression", "classification") and not data.target:
        raise ConfigError(
            f"data.task {data.task} needs data.target, the column to predict; without one values are forecast"
        )
    named = [n for n in (data.group, data.time, data.channel, data.value) if n is not None] + data.static + data.future
    if data.task != "forecast" and data.channel is None:
        named += data.target
    if twice := [name for name in named if named.count(name) > 1]:
        raise ConfigError(f"the column {twice[0]} is named by two options of data: leave it out of one")
    if mixed := [name for name in data.columns if name in named]:
        raise ConfigError(f"{mixed[0]} is in data.columns and has another role too: leave it out of one")


def _left_out(name: str, column: Column) -> str | None:
    """Why a column that no option names is not read."""
    if not name or name.startswith("Unnamed: "):
        use = f"name it: --data.columns {name},..." if name else "give it a name"
        return f"it is an index that pandas wrote; to use it, {use}"
    if column.missing.all():
        return "it has no value"
    if column.values.dtype.kind in "mM":
        return "it holds times, and data.time names others"
    present = int((~column.missing).sum())
    if not column.is_numeric and column.separated is None and len(column.uniques) > max(_CATEGORIES, present // 2):
        return (
            f"it holds {len(column.uniques):,} different texts in {present:,} rows; to read them as categories, give "
            f"--data.categorical {shlex.quote(name)}"
        )
    return None
