"""Columns of a table, and of a second one with facts of series: numbers, codes of categories, and where they clash.

What is not as the options say raises ConfigError, a column that is not there UnknownNameError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np

from glissando.errors import ConfigError, DataError, unknown_name
from glissando.series import tables
from glissando.series.options import TableData
from glissando.series.panel import MISSING, UNKNOWN, Form
from glissando.series.steps import Clash, merge
from glissando.series.tables import Names, Table, counted, listed
from glissando.series.times import is_compact, time_form, zones

#: a column's name, its cells or codes (R,) by rows, and what a missing one is -> one for each step, or each series
Place = Callable[[str, np.ndarray, Any], np.ndarray]


def require_options(values: Mapping[str, Any], needs: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for an option without one that it needs."""
    for option, needed in needs:
        if values[option] and not values[needed]:
            raise ConfigError(
                f"data.{option} needs data.{needed}, which is not named: name that too, or leave data.{option} out"
            )


def require_columns(where: str, known: Collection[str], columns: Iterable[str | None], option: str) -> None:
    """Raise UnknownNameError for a column that an option names and `where` has not."""
    for name in columns:
        if name is not None and name not in known:
            raise unknown_name(f"column of {where} (data.{option})", name, known)


def require_read(where: str, known: Collection[str], columns: Iterable[str]) -> None:
    """Raise DataError for a column that a model reads and `where` has not."""
    for name in columns:
        if name not in known:
            raise DataError(
                f"there is no column {name!r} in {where}, and the model reads it: add it, blank where nothing is known"
            )


def clock_of(data: TableData, table: Table, encoding: Any, report: list[str]) -> tuple[Form, str]:
    """The form of the times and their unit: of an encoding, or of a new table."""
    if data.time is None:
        return "row", "row"
    form = encoding.time_form if encoding is not None else data.time_format or time_form(table, data.time)
    if form == "date":
        if data.time_unit not in (None, "s"):
            raise ConfigError(f"data.time_unit is {data.time_unit}, and the times {data.time} are dates: leave it out")
        first = table.columns[data.time].values[0]
        if is_compact(first):
            report.append(
                f"the times {data.time}, such as {first}, are read as dates; if they are numbers, give "
                "--data.time_format number"
            )
        if named := zones(table, data.time):
            unnamed = table.height - named
            others = f"; {unnamed:,} without a time zone, read as UTC" if unnamed else ""
            report.append(f"converted to UTC: {counted(named, 'time')} {data.time} with a time zone{others}")
        return form, "s"
    return form, (encoding.unit if encoding is not None else data.time_unit or "s")


class ColumnReader(ABC):
    """Tables whose columns are read.

    homes   column -> the table that has it: the second one before the first
    names   of the series
    is_new  other tables than those of the training
    """

    names: list[str]
    report: list[str]

    def __init__(self, data: TableData, table: Table, facts: Table | None, is_new: bool) -> None:
        self.data, self.table, self.facts, self.is_new = data, table, facts, is_new
        self.homes = {name: each for each in (table, facts) if each is not None for name in each.columns}

    @abstractmethod
    def _own_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the table that are read, sorted by series, and the series of each."""

    @cached_property
    def _fact_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the second table that are of a series, sorted by series, and the series of each."""
        groups = tables.names(cast(Table, self.facts), str(self.data.group), "group")
        index = {name: number for number, name in enumerate(self.names)}
        series = np.array([index.get(name, -1) for name in groups.names])[groups.codes]
        rows = np.argsort(series, kind="stable")
        rows = rows[series[rows] >= 0]
        return rows, series[rows]

    def _rows_of(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self._fact_rows if self.homes[name] is self.facts else self._own_rows()

    def _numbers(self, names: Iterable[str], size: int, place: Place, home: Table | None = None) -> np.ndarray:
        """(size, number of columns) float64, of the table `home`; None: of the one that has each."""
        columns = [place(n, tables.numbers(home or self.homes[n], n), np.nan) for n in names]
        return side_by_side(columns, size, np.float64)

    def _categories(
        self, known: Mapping[str, list[str]], size: int, place: Place, home: Table | None = None,
        cells: Names | None = None,
    ) -> tuple[np.ndarray, dict[str, list[str]]]:  # fmt: skip
        """(size, Q) codes of columns as `_numbers`, or of `cells` that all of them share, and the categories of each: a
        run's, or its own, the most frequent first."""
        codes, categories = [], {}
        for name, before in known.items():
            values = tables.names(home or self.homes[name], name) if cells is None else cells
            raw = place(name, values.codes, -1)
            present = values.by_frequency(raw)
            categories[name] = before if self.is_new else present
            index = {each: number + UNKNOWN + 1 for number, each in enumerate(categories[name])}
            codes.append(np.array([*(index.get(each, UNKNOWN) for each in values.names), MISSING], np.int64)[raw])
            if not self.is_new:
                self.report.append(f"categories of {name!r}, {len(present):,} in all: {listed(present)}")
            elif unknown := int((codes[-1] == UNKNOWN).sum()):
                strange = listed([each for each in present if each not in index])
                self.report.append(f"unknown to the model: {counted(unknown, 'value')} of {name!r}, such as {strange}")
        return side_by_side(codes, size, np.int64), categories

    def _fact(self, name: str, cells: np.ndarray, missing: Any) -> np.ndarray:
        """(S,) a column that does not vary within a series."""
        rows, series = self._rows_of(name)
        try:
            return merge(cells[rows], series, len(self.names), missing).values
        except Clash as error:
            what, fix = self._about_fact(name)
            raise self._clash(
                error, self.homes[name], rows, name, what, f"correct one, or {fix}", timed=False
            ) from None

    def _about_fact(self, name: str) -> tuple[str, str]:
        """What a column is, and what else may be done where it varies."""
        return f"the static {name!r}", "leave it out of data.static"

    def _clash(
        self, error: Clash, table: Table, rows: np.ndarray, name: str, what: str, fix: str, timed: bool = True
    ) -> DataError:
        """The error for two rows of one series, or of one time of it, that differ."""
        data, one, other = self.data, rows[error.first], rows[error.second]
        values = table.columns[name].values
        of = "" if data.group is None else f" of {data.group} {str(table.columns[data.group].values[other]).strip()!r}"
        time = "" if data.time is None or not timed else f" at {data.time} {table.columns[data.time].values[other]}"
        return DataError(
            f"{table.at(other, name)}: {what}{of}{time} is {values[other]}, and in {table.unit} {table.places[one]} it "
            f"is {values[one]}: {fix}"
        )


def side_by_side(columns: list[np.ndarray], size: int, dtype: type) -> np.ndarray:
    """Columns (size,) as one array, also where there are none."""
    return np.stack(columns, 1) if columns else np.empty((size, 0), dtype)
