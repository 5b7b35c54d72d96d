"""Times of a table: dates and numbers as exact integers, so that differences are taken before anything is rounded."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal
from typing import Any, Literal, NamedTuple

import numpy as np

from glissando.errors import DataError
from glissando.series.tables import Column, Table, number_of, numbers, plain, require_present

#: digits of a date without separators, from years to at most nanoseconds
_COMPACT = re.compile(
    r"([0-9]{4})([0-9]{2})(?:([0-9]{2})(?:([0-9]{2})(?:([0-9]{2})(?:([0-9]{2})((?:[0-9]{3}){0,3}))?)?)?)?(?:\.0*)?"
)
#: its years by the number of its digits; until 2030, ten digits below 19... are seconds since 1970
_YEARS = {6: range(1700, 2200), 8: range(1700, 2200)}
_YEARS_WITH_HOURS = range(1900, 2200)
#: how many of a column's values make it one of dates, in which others are mistakes
_MOSTLY = 0.5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FRACTION = re.compile(r"[.,][0-9]{6}([0-9]+)")
#: a time zone at the end of a date
_ZONE = re.compile(r"(Z|[+-][0-9]{2}(:?[0-9]{2}(:?[0-9]{2})?)?)$", re.IGNORECASE)
#: ends of dates in UTC
_UTC = ("Z", "z", "+00:00", "+0000")
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
    """What a column of times holds: dates, also ones without separators (20260131) if all values are; else numbers.

    Raises DataError where most values are dates without separators and some are not.
    """
    column = table.columns[name]
    if column.values.dtype.kind in "mM":
        return "date" if column.values.dtype.kind == "M" else "number"
    present = np.flatnonzero(~column.missing)
    if not present.size:
        return "number"
    first = column.values[present[0]]
    if np.isnan(number_of(first)):
        return "date"
    digits = len(_digits(first))
    if not is_compact(first) and digits not in (6, 8, 10, 12, 14):
        return "number"
    dated = column.each(lambda value: is_compact(value) and len(_digits(value)) == digits, False, bool)
    bad = present[~dated[present]]
    if not bad.size:
        return "date"
    if bad.size > (1 - _MOSTLY) * present.size:
        return "number"
    raise DataError(
        f"{table.at(bad[0], name)}: {column.values[bad[0]]} is no date, and {present.size - bad.size} of the column's "
        f"{present.size} values are dates without separators: correct it, or, if they are numbers, give "
        "--data.time_format number"
    )


def times(table: Table, name: str, form: Literal["date", "number"]) -> Times:
    """A column of times. Raises DataError for the first that is none."""
    require_present(table, name, "time")
    column = table.columns[name]
    kind = column.values.dtype.kind
    if kind in "mM":
        return _of_pandas(table, name, form)
    if form == "date":
        return Times(_exact(column.each(lambda value: _nanoseconds(table, name, value), 0, object)), 10**9)
    found = numbers(table, name, fix="write it as the other times, or, if they are dates, give --data.time_format date")
    if kind == "f":
        return Times(found, 1)
    if kind in "iu":
        return Times(_exact(column.values), 1)
    return _decimals(column)


def _decimals(column: Column) -> Times:
    """Numbers of a limited number of decimals as integers of the last of them."""
    exact = {v: Decimal(v.strip() if isinstance(v, str) else v) for v in column.uniques}
    digits = min(_DECIMALS, max(0, *(-int(value.as_tuple().exponent) for value in exact.values())))
    context = Context(prec=3 * _DECIMALS, Emin=-999999, Emax=999999)
    return Times(_exact(column.each(lambda v: int(exact[v].scaleb(digits, context)), 0, object)), 10**digits)


def _exact(values: np.ndarray) -> np.ndarray:
    """Integers whose differences do not overflow."""
    if max(abs(int(values.min())), abs(int(values.max()))) < 2**62:
        return values.astype(np.int64)
    return values.astype(object)


def _of_pandas(table: Table, name: str, form: Literal["date", "number"]) -> Times:
    """Dates and durations of a frame."""
    values = table.columns[name].values
    if (values.dtype.kind == "M") != (form == "date"):
        kind = "dates" if values.dtype.kind == "M" else "durations, which are numbers of seconds"
        raise DataError(f"{table.source}, column {name!r} holds {kind}: leave data.time_format out, it is {form}")
    unit, count = np.datetime_data(values.dtype)
    if unit not in ("ms", "us", "ns"):
        values, unit, count = values.astype(f"{values.dtype.kind}8[s]"), "s", 1
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    ticks = values.astype(np.int64).astype(object) * count
    return Times(_exact(ticks * (10**9 // per)), 10**9) if form == "date" else Times(_exact(ticks), per)


def is_duration(table: Table, name: str) -> bool:
    return table.columns[name].values.dtype.kind == "m"


def zones(table: Table, name: str) -> tuple[int, int]:
    """How many of a column's dates name a time zone, and how many do not; (0, 0) where none names another than UTC."""
    column = table.columns[name]
    if column.values.dtype.kind == "M":
        return 0, 0
    named = column.each(_has_zone, False, bool)
    if named.all() and all(str(value).strip().endswith(_UTC) for value in column.uniques):
        return 0, 0
    return int(named.sum()), int((~named).sum())


def _has_zone(value: Any) -> bool:
    if isinstance(value, datetime):
        return value.tzinfo is not None
    return _ZONE.search(str(value).strip(), 10) is not None


def is_compact(value: Any) -> bool:
    """Whether a text or a number is a date without separators, such as 202601, 20260131 or 202601311200."""
    text = _iso(value)
    try:
        return text is not None and datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def shown(value: Any) -> str:
    """A date without separators as people write it: 20260131 -> 2026-01-31 00:00:00."""
    return (_iso(value) or str(value)).replace("T", " ")


def _digits(value: Any) -> str:
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value).strip().partition(".")[0]


def _iso(value: Any) -> str | None:
    """20260131 -> 2026-01-31T00:00:00; None for what has not the digits of a date."""
    text = _digits(value) if isinstance(value, float | np.floating) else str(value).strip()
    if (found := _COMPACT.fullmatch(text)) is None:
        return None
    year, month, day, hour, minute, second, rest = found.groups()
    if int(year) not in _YEARS.get(len(_digits(text)), _YEARS_WITH_HOURS):
        return None
    return f"{year}-{month}-{day or '01'}T{hour or '00'}:{minute or '00'}:{second or '00'}" + (
        f".{rest}" if rest else ""
    )


def _nanoseconds(table: Table, name: str, value: Any) -> int:
    """A date as nanoseconds since 1970; without a time zone, it is UTC."""
    text = _iso(value) or str(value).strip()
    try:
        when = datetime.fromisoformat(text)
        beyond = _FRACTION.search(text)
        if beyond and len(beyond[1]) > 3:
            raise ValueError("more digits than nanoseconds")
    except ValueError as error:
        row = int(np.flatnonzero(table.columns[name].each(lambda each: each is value or each == value, False, bool))[0])
        raise DataError(
            f"{table.at(row, name)}: {plain(value)} is no date: write it as 2026-01-31 12:00:00; a column of numbers "
            "has nothing else"
        ) from error
    microseconds = ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
    return 1000 * microseconds + (int(beyond[1].ljust(3, "0")) if beyond else 0)
