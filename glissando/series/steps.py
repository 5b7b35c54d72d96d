"""Rows of a table -> steps of series: sorted by time, rows of one time in one step, equal values merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from glissando.series.options import SeriesData
from glissando.series.tables import Table, names
from glissando.series.times import Times, times


class Steps(NamedTuple):
    """The R rows that are read, sorted by series and time, and the N steps that they make.

    names     (S) of the series, in the order in which they appear
    rows      (R,) of the table, sorted
    step      (R,) the step of each sorted row
    first     (N,) where the rows of each step begin, in `rows`
    series    (N,) the series of each step
    starts    (S + 1,) where the steps of each series begin
    times     of the table's rows; without a column of times, their numbers
    unsorted  rows that come after a later time of their series
    """

    names: list[str]
    rows: np.ndarray
    step: np.ndarray
    first: np.ndarray
    series: np.ndarray
    starts: np.ndarray
    times: Times
    unsorted: int

    @property
    def first_rows(self) -> np.ndarray:
        """(N,) the first row of the table of each step."""
        return self.rows[self.first]

    def gaps(self) -> np.ndarray:
        """(N,) time since the step before, 0 at the first step of a series."""
        ticks = self.times.ticks[self.first_rows]
        gaps = self.times.between(np.diff(ticks, prepend=ticks[:1]))
        gaps[self.starts[:-1]] = 0.0
        return gaps

    def since_first(self) -> np.ndarray:
        """(N,) time since the first step of the series."""
        ticks = self.times.ticks[self.first_rows]
        return self.times.between(ticks - ticks[self.starts[self.series]])


def steps(data: SeriesData, table: Table, form: str, among: np.ndarray | None = None) -> Steps:
    """The steps of a table's rows, or of those `among` (R,) bool. Raises DataError for a group or time that is blank,
    or is no time."""
    codes, groups = np.zeros(table.height, np.int64), [""]
    if data.group is not None:
        codes, groups = names(table, data.group, "group")
    rows = np.arange(table.height) if among is None else np.flatnonzero(among)
    rows = rows[np.argsort(codes[rows], kind="stable")]
    if data.time is None:
        read = Times(np.argsort(rows), 1)  # a long table, of which some rows are left out, has times
    else:
        read = times(table, data.time, "date" if form == "date" else "number")
    order = read.order()
    unsorted = after_later(codes[rows], order[rows])
    if unsorted:
        rows = rows[np.lexsort((order[rows], codes[rows]))]
    begins = np.ones(len(rows), bool)
    begins[1:] = (np.diff(codes[rows]) != 0) | (order[rows[1:]] != order[rows[:-1]])
    first = np.flatnonzero(begins)
    present, series = np.unique(codes[rows[first]], return_inverse=True)
    starts = np.searchsorted(series, np.arange(len(present) + 1)).astype(np.int64)
    kept = [groups[code] for code in present]
    return Steps(kept, rows, np.cumsum(begins) - 1, first, series.astype(np.int64), starts, read, unsorted)


def after_later(series: np.ndarray, order: np.ndarray) -> int:
    """How many rows come after a later one of their series; `order` sorts as their times do."""
    by_series = np.argsort(series, kind="stable")
    ranks = np.unique(order, return_inverse=True)[1][by_series]
    keys = series[by_series].astype(np.int64) * (len(ranks) + 1) + ranks
    return int((keys < np.maximum.accumulate(keys)).sum())


class Merged(NamedTuple):
    """Cells of one key merged to one.

    values    of each key, `missing` where none was observed
    repeated  keys with several observed cells
    most      the most cells of a key
    unequal   keys whose cells differ
    """

    values: np.ndarray
    repeated: int
    most: int
    unequal: int


class Clash(Exception):
    """Two cells of one key differ: their positions."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)
        self.first, self.second = first, second


def merge(values: np.ndarray, keys: np.ndarray, count: int, missing: Any, how: str = "error") -> Merged:
    """One value for each of `count` keys, of those that are observed.

    Args:
        values: (R,) cells, sorted by key; cells that equal `missing`, or are NaN, are not observed.
        keys: (R,) which key each is of, not falling.
        how: What is taken of unequal cells: mean, first or last; error: Clash is raised.
    """
    observed = np.flatnonzero(values == values if missing != missing else values != missing)
    cells, of = values[observed], keys[observed]
    made = np.full(count, missing, values.dtype)
    if not len(of):
        return Merged(made, 0, 0, 0)
    first = np.flatnonzero(np.diff(of, prepend=of[0] - 1))
    size = np.diff(first, append=len(of))
    differs = cells != np.repeat(cells[first], size)
    unequal = len(np.unique(of[differs]))
    if unequal and how == "error":
        second = int(np.flatnonzero(differs)[0])
        begin = first[np.searchsorted(first, second, side="right") - 1]
        raise Clash(int(observed[begin]), int(observed[second]))
    if how == "mean" and unequal:
        taken = np.where(np.maximum.reduceat(differs, first), np.add.reduceat(cells, first) / size, cells[first])
    else:
        taken = cells[first + size - 1] if how == "last" else cells[first]
    made[of[first]] = taken
    return Merged(made, int((size > 1).sum()), int(size.max()), unequal)
