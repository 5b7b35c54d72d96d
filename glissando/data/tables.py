"""Tables from CSV and Parquet files: their columns as numbers, names and times.

Each value has its place, the line of a CSV or the row of a Parquet file. Everything that cannot be used raises
DataError, with the file, that place and the column.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from glissando.errors import DataError, MissingExtraError
from glissando.machine import available_bytes, readable

#: the largest number of a table: beyond it, float32 has no room for the gradients of a model
LARGEST = 1e30
#: bytes that a value takes while it is read and cut into windows, at most (of a table of one column)
_BYTES = {"line": 300, "row": 150}
#: names of columns that pandas gives to an index
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


class Table(NamedTuple):
    path: Path
    columns: dict[str, Sequence[Any] | np.ndarray]  # texts of a CSV, else arrays, or a list where values may be missing
    places: Sequence[int]  # of each row: the line of a CSV, the row of a Parquet file, from 1
    unit: str  # "line" or "row"

    def at(self, row: int, name: str) -> str:
        return self.where(self.places[row], name)

    def where(self, place: int, name: str) -> str:
        return f"{self.path}, {self.unit} {place}, column {name!r}"


def is_index(name: str) -> bool:
    """Whether a column is an index that pandas wrote, with no name or with one of its own."""
    return _INDEX.fullmatch(name) is not None


# ---------------------------------------------------------------------- files


def read_table(path: str | Path, delimiter: str = ",") -> Table:
    """Every column of a CSV, as texts, or of a Parquet file, as its values.

    Raises DataError for a file that is missing, empty, malformed or larger than the free memory, MissingExtraError for
    Parquet without pyarrow.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}: give an existing CSV or Parquet file")
    try:
        table = _read_parquet(path) if path.suffix in (".parquet", ".pq") else _read_csv(path, delimiter)
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory: give fewer rows or columns") from error
    if not table.places:
        raise DataError(f"{path} has no row below the names of its columns: give a file with values")
    return table


def _require_memory(path: Path, values: float, unit: str) -> None:
    needed, free = values * _BYTES[unit], available_bytes(torch.device("cpu"))
    if needed > free:
        raise DataError(
            f"{path} has about {values:,.0f} values, which take {readable(needed)} to train on, and {readable(free)} "
            "of memory are free: give fewer rows or columns"
        )


def _require_different(path: Path, names: list[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"{path} names the column {twice[0]!r} more than once: rename one")


def _read_csv(path: Path, delimiter: str) -> Table:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    _require_memory(
        path, (head.count(delimiter.encode()) + head.count(b"\n")) / max(1, len(head)) * path.stat().st_size, "line"
    )
    rows: list[list[str]] = []
    lines: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            for row in filter(None, reader):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {reader.line_num} has {len(row)} values, and line 1 names {len(names)} columns: "
                        f"correct the line, or name another --data.delimiter than {delimiter!r}"
                    )
                rows.append(row)
                lines.append(reader.line_num)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not a CSV: {error}; correct the line") from error
        except UnicodeDecodeError as error:
            line = _undecodable_line(path)
            raise DataError(f"{path}, line {line}: not a CSV in UTF-8: {error.reason}; save it in UTF-8") from error
    if not names:
        raise DataError(f"{path} is empty: its first line must name the columns")
    _require_different(path, names)
    return Table(path, dict(zip(names, zip(*rows, strict=True), strict=False)) if rows else {}, lines, "line")


def _undecodable_line(path: Path) -> int:
    with path.open("rb") as file:
        return next(number for number, line in enumerate(file, 1) if "\ufffd" in line.decode("utf-8", "replace"))


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"{path} needs pyarrow: pip install pyarrow, or give a CSV") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        groups, leaves = range(metadata.num_row_groups), range(metadata.num_columns)
        _require_memory(path, sum(metadata.row_group(g).column(c).num_values for g in groups for c in leaves), "row")
        _require_different(path, schema.names)
        # Equal texts are stored once, however many rows have them.
        texts = [f.name for f in schema if f.type in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary())]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            table = file.read()
        columns = {name: _values(column) for name, column in zip(table.column_names, table.columns, strict=True)}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} could not be read as Parquet: {error}") from error
    return Table(path, columns, range(1, table.num_rows + 1), "row")


def _values(column: Any) -> Sequence[Any] | np.ndarray:
    """A column of Parquet: numbers, dates and durations as an array, where missing is NaN or NaT; else a list."""
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        values: list[Any] = []
        for chunk in column.chunks:
            known = chunk.dictionary.to_pylist()
            values += [None if index is None else known[index] for index in chunk.indices.to_pylist()]
        return values
    are = (types.is_integer, types.is_floating, types.is_timestamp, types.is_date, types.is_duration)
    return np.asarray(column.to_numpy()) if any(test(kind) for test in are) else column.to_pylist()


# ---------------------------------------------------------------------- numbers and names


def numbers(table: Table, name: str) -> np.ndarray:
    """A column as float64. Raises DataError for the first value that is no number a model can compute with."""
    values = table.columns[name]
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        found = values.astype(np.float64)
    else:
        found = np.array([_number(value) for value in values])
    bad = np.flatnonzero(~(np.abs(found) <= LARGEST))
    if bad.size:
        row, value = bad[0], values[bad[0]]
        count = f"({bad.size} of its {len(values)} rows)"
        if np.isfinite(found[row]):
            raise DataError(
                f"{table.at(row, name)}: {value} is beyond {LARGEST:g}, where float32 leaves no room to compute "
                f"{count}: divide the column by a constant, or correct the value"
            )
        what = "the value is missing" if _is_missing(value) else f"{value!r} is no finite number"
        raise DataError(
            f"{table.at(row, name)}: {what} {count}: fill it in, leave these rows out, or leave the column out of "
            "data.columns"
        )
    return found


def _number(value: Any) -> float:
    """NaN for what is no number; Python's 1_000 and other alphabets' digits are none."""
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        return np.nan
    try:
        return float(value) if isinstance(value, str | int | float | Decimal) else np.nan
    except (ValueError, OverflowError):
        return np.nan


def _is_missing(value: Any) -> bool:
    return value is None or str(value).strip() in ("", "nan", "NaN", "NaT", "<NA>")


def is_number(value: Any) -> bool:
    """Whether a value is a number, missing ones among them."""
    return _is_missing(value) or not np.isnan(_number(value.item() if isinstance(value, np.number) else value))


def labels(table: Table, name: str, what: str) -> list[str]:
    """A column of names, without spaces around them. Raises DataError for the first that is missing.

    what  that the names are of, for the error: "group" or "class"
    """
    values = table.columns[name]
    if missing := [row for row, value in enumerate(values) if _is_missing(value)]:
        raise DataError(
            f"{table.at(missing[0], name)}: the {what} is missing ({len(missing)} of its {len(values)} rows): fill it "
            "in, or leave these rows out"
        )
    return [str(value).strip() for value in values]


# ---------------------------------------------------------------------- times

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


class Times(NamedTuple):
    """A column of times, before anything is rounded: differences are taken first.

    ticks    (T,) integers, decimals or float64
    second   ticks of a second, for dates and durations; None: numbers, in the unit of the column
    """

    ticks: np.ndarray
    second: int | None


def times(table: Table, name: str, form: Literal["date", "number"]) -> Times:
    """A column of times. Raises DataError for the first that is none."""
    values = table.columns[name]
    if missing := [row for row, value in enumerate(values) if _is_missing(value)]:
        raise DataError(
            f"{table.at(missing[0], name)}: the time is missing ({len(missing)} of its {len(values)} rows): fill it "
            "in, or leave these rows out"
        )
    kind = values.dtype.kind if isinstance(values, np.ndarray) else "O"
    if kind in "mM":
        return _arrow_times(table, name, form)
    if form == "date":
        return Times(_exact([_nanoseconds(table, name, row) for row in range(len(values))]), 10**9)
    found = numbers(table, name)
    if kind == "f":
        return Times(found, None)
    if kind in "iu":
        return Times(_exact(values), None)
    return Times(np.array([Decimal(value.strip() if isinstance(value, str) else value) for value in values]), None)


def _exact(values: Any) -> np.ndarray:
    """Integers whose differences do not overflow."""
    is_array = isinstance(values, np.ndarray)
    low, high = (values.min(), values.max()) if is_array else (min(values), max(values))
    if max(abs(int(low)), abs(int(high))) < 2**62:
        return np.array(values, dtype=np.int64)
    return np.array(values.tolist() if is_array else values, dtype=object)


def _arrow_times(table: Table, name: str, form: Literal["date", "number"]) -> Times:
    """Dates and durations of Parquet."""
    values = np.asarray(table.columns[name])
    if (values.dtype.kind == "M") != (form == "date"):
        kind = "dates" if values.dtype.kind == "M" else "durations, which are numbers of seconds"
        raise DataError(f"{table.path}, column {name!r} holds {kind}: leave data.time_format out, it is {form}")
    unit, count = np.datetime_data(values.dtype)
    if unit not in ("ms", "us", "ns"):
        values, unit, count = values.astype(f"{values.dtype.kind}8[s]"), "s", 1
    return Times(_exact(values.astype(np.int64) * count), {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit])


def time_format(table: Table, name: str) -> Literal["date", "number"]:
    """What a column of times holds: dates, also ones without separators (20260131) if all values are; else numbers.

    Raises DataError where most values are dates without separators and some are not.
    """
    values = table.columns[name]
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
        return "date" if values.dtype.kind == "M" else "number"
    present = [row for row, value in enumerate(values) if not _is_missing(value)]
    first = values[present[0]] if present else 0
    if not is_number(first):
        return "date"
    digits = len(_digits(first))
    if not is_compact(first) and digits not in (6, 8, 10, 12, 14):
        return "number"
    bad = [row for row in present if not (is_compact(values[row]) and len(_digits(values[row])) == digits)]
    if not bad:
        return "date"
    if len(bad) > (1 - _MOSTLY) * len(present):
        return "number"
    raise DataError(
        f"{table.at(bad[0], name)}: {values[bad[0]]} is no date, and {len(present) - len(bad)} of the column's "
        f"{len(present)} values are dates without separators: correct it, or, if they are numbers, give "
        "--data.time_format number"
    )


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


def is_duration(table: Table, name: str) -> bool:
    values = table.columns[name]
    return isinstance(values, np.ndarray) and values.dtype.kind == "m"


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


def _nanoseconds(table: Table, name: str, row: int) -> int:
    """A date as nanoseconds since 1970; without a time zone, it is UTC."""
    value = table.columns[name][row]
    text = _iso(value) or str(value).strip()
    try:
        when = datetime.fromisoformat(text)
        beyond = _FRACTION.search(text)
        if beyond and len(beyond[1]) > 3:
            raise ValueError("more digits than nanoseconds")
    except ValueError as error:
        raise DataError(
            f"{table.at(row, name)}: {value!r} is not a time: give a number, or a date such as 2026-01-31 12:00:00"
        ) from error
    microseconds = ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
    return 1000 * microseconds + (int(beyond[1].ljust(3, "0")) if beyond else 0)


_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """86400.0 -> 86400 s (1 d)."""
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if seconds >= size), ("ns", 1e-9))
    return f"{seconds:,.9g} s" + ("" if unit == "s" else f" ({seconds / size:.4g} {unit})")
