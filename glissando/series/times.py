"""Times of a table: dates and numbers as exact integers, so that differences are taken before anything is rounded."""

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import Any, Literal, NamedTuple

import numpy as np

from glissando.errors import DataError
from glissando.series.tables import MOSTLY, Table, as_number, numbers, plain, require_present

#: a date without separators, 20260131, also as a float
_COMPACT = re.compile(r"((?:1[7-9]|2[01])[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01]))(?:\.0*)?")
#: a date as it is written from Germany to Russia, 31.01.2026
_DOTTED = re.compile(r"([0-9]{1,2})\.([0-9]{1,2})\.([0-9]{4})(?![0-9])")
#: a time zone at the end of a date
_ZONE = re.compile(r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)$", re.IGNORECASE)
#: the most decimals of a time that are kept
_DECIMALS = 300


class Times(NamedTuple):
    """A column of times, before anything is rounded.

    ticks   (T,) int64, integers as objects where these are too small, or float64
    per     ticks of a unit of time
    """

    ticks: np.ndarray
    per: int

    def between(self, ticks: np.ndarray) -> np.ndarray:
        """Differences of ticks in units of time, float64."""
        return ticks.astype(np.float64) / float(self.per)

    def order(self) -> np.ndarray:
        """(T,) numbers that sort as the ticks do."""
        return np.unique(self.ticks, return_inverse=True)[1] if self.ticks.dtype == object else self.ticks

    def origins(self, rows: np.ndarray, form: str) -> np.ndarray:
        """The times of these rows as Clock has them."""
        ticks = self.ticks[rows]
        if form == "date" or self.per == 1:
            return ticks
        made = np.empty(len(ticks), object)
        made[:] = [Decimal(int(tick)) / self.per for tick in ticks]
        return made


def time_form(table: Table, name: str) -> Literal["date", "number"]:
    """Whether a column of times holds dates, also ones without separators (20260131), or numbers."""
    column = table.columns[name]
    if column.values.dtype.kind in "mM":
        return "date"
    present = ~column.missing
    compact = column.each(is_compact, False, bool)[present]
    is_number = column.is_numeric and not (len(compact) and compact.mean() > MOSTLY)
    return "number" if is_number else "date"


def is_compact(value: Any) -> bool:
    return _COMPACT.fullmatch(str(value).strip()) is not None


def times(table: Table, name: str, form: Literal["date", "number"]) -> Times:
    """A column of times. Raises DataError for the first that is none."""
    require_present(table, name, "time")
    column = table.columns[name]
    kind = column.values.dtype.kind
    if kind == "m":
        raise DataError(f"{table.source}, column {name!r} holds durations: give numbers, as by .dt.total_seconds()")
    if form == "date":
        return Times(_nanoseconds(table, name), 10**9)
    if kind == "M":
        raise DataError(f"{table.source}, column {name!r} holds dates: leave data.time_format out, it is number")
    values = numbers(
        table, name, fix="write it as the other times, or, if they are dates, give --data.time_format date"
    )
    if kind == "f":
        return Times(values, 1)
    if kind in "iu":
        return Times(_exact(column.values), 1)
    # Texts of a limited number of decimals are integers of the last of them.
    texts = {v: v.strip() if isinstance(v, str) else v for v in column.uniques}
    exact = {v: Decimal(as_number(text, column.decimal) if column.decimal else text) for v, text in texts.items()}
    digits = min(_DECIMALS, max(0, *(-int(value.as_tuple().exponent) for value in exact.values())))
    context = Context(prec=3 * _DECIMALS, Emin=-999999, Emax=999999)
    return Times(_exact(column.each(lambda v: int(exact[v].scaleb(digits, context)), 0, object)), 10**digits)


def _exact(values: np.ndarray) -> np.ndarray:
    """Integers whose differences do not overflow."""
    if max(abs(int(values.min())), abs(int(values.max()))) < 2**62:
        return values.astype(np.int64)
    return values.astype(object)


def _nanoseconds(table: Table, name: str) -> np.ndarray:
    """Dates as nanoseconds since 1970; without a time zone, they are UTC."""
    import pandas

    column = table.columns[name]
    texts = column.each(_iso, "", object)
    dates = pandas.to_datetime(pandas.Series(texts), format="ISO8601", utc=True, errors="coerce")
    if (wrong := np.flatnonzero(~dates.dt.year.between(1678, 2261))).size:  # where int64 holds nanoseconds
        raise DataError(
            f"{table.at(wrong[0], name)}: {plain(column.values[wrong[0]])} is no date ({wrong.size} of its "
            f"{table.height} rows): write it as 2026-01-31 12:00:00, in a year from 1678 to 2261, or, if all are "
            "numbers, give --data.time_format number"
        )
    return np.asarray(dates.dt.as_unit("ns").astype(np.int64))


def _iso(value: Any) -> str:
    """The text of a date. Pandas would read `now` and `today`, too, and cut digits beyond nanoseconds off."""
    text = _COMPACT.sub(r"\1", str(value).strip())
    if (dotted := _DOTTED.match(text)) is not None:
        day, month, year = dotted.groups()
        text = f"{year}-{month:0>2}-{day:0>2}{text[dotted.end() :]}"
    return text if text[:4].isdigit() and not re.search(r"[.,][0-9]{10}", text) else ""


def zones(table: Table, name: str) -> int:
    """How many of a column's dates name a time zone."""
    column = table.columns[name]
    return int(column.each(lambda value: _ZONE.search(str(value).strip(), 10) is not None, False, bool).sum())
