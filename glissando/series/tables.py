"""Tables from CSV and Parquet files and from frames of pandas and polars, which pandas reads.

This module converts their columns to numbers, names and exact times. Each row has its place, the line of a CSV or the
row of a Parquet file or a frame. Everything that cannot be used raises DataError, with the file, that place and the
column.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from glissando.data.textfile import check_text
from glissando.errors import DataError, MissingExtraError
from glissando.machine import available_bytes, readable

if TYPE_CHECKING:
    from glissando.series.options import TableData

#: the largest number of a table: beyond it, float32 has no room for the gradients of a model
LARGEST = 1e30
#: bytes of memory for a byte of a file, while its values are read and cut into windows
_GROWTH = 50
#: texts of a cell without a value
_MISSING = frozenset(
    ["", "nan", "NaN", "NAN", "NA", "N/A", "n/a", "#N/A", "<NA>", "null", "NULL", "Null", "NaT"]
)  # fmt: skip
#: what separates groups of three digits: 1,310.1 and 1.310,1, 1 310,1 and 1'310.1
_GROUPS = ".,' \u2019\u00a0\u202f"
#: a column is one of numbers, or of dates, in which other values are mistakes, if at least this part of its values are
MOSTLY = 0.5


class Column:
    """A column of R cells.

    values   (R,) texts of a CSV; else the frame's numbers, datetime64, timedelta64 or Python objects
    decimal  the decimal sign of its texts, where digits may be apart in groups of three; None: a dot, and no groups
    """

    def __init__(self, values: np.ndarray, decimal: str | None = None) -> None:
        self.values, self.decimal = values, decimal

    @cached_property
    def _factors(self) -> tuple[np.ndarray, np.ndarray]:
        import pandas

        try:
            codes, uniques = pandas.factorize(self.values)
        except TypeError:  # lists and the like are their texts
            cells = [cell if isinstance(cell, Hashable) else str(cell) for cell in self.values]
            codes, uniques = pandas.factorize(pandas.Series(cells, dtype=object))
        return codes.astype(np.int64), np.asarray(uniques)

    @property
    def uniques(self) -> np.ndarray:
        """Its different cells, without None and NaN, in order of appearance."""
        return self._factors[1]

    def each(self, convert: Callable[[Any], Any], missing: Any, dtype: Any) -> np.ndarray:
        """(R,) what `convert` makes of each cell, computed once for equal cells; `missing` for None and NaN."""
        codes, uniques = self._factors
        made = np.empty(len(uniques) + 1, dtype)
        made[:-1] = [convert(value) for value in uniques]
        made[-1] = missing
        return made[codes]

    @cached_property
    def missing(self) -> np.ndarray:
        """(R,) bool: cells without a value."""
        if self.values.dtype.kind in "iuf":
            return np.isnan(self.values)
        return self.each(lambda value: str(value).strip() in _MISSING, True, bool)

    @cached_property
    def numbers(self) -> np.ndarray:
        """(R,) float64: NaN for cells that are no number."""
        import pandas

        if self.values.dtype.kind in "iuf":
            return self.values.astype(np.float64)
        codes, uniques = self._factors
        if self.decimal is not None:
            uniques = np.array([as_number(text, self.decimal) for text in uniques], object)
        made = np.full(len(uniques) + 1, np.nan)
        made[:-1] = pandas.to_numeric(pandas.Series(uniques, dtype=object), errors="coerce")
        made[:-1][[isinstance(value, bool) for value in uniques]] = np.nan
        return made[codes]

    @cached_property
    def separated(self) -> tuple[str, str] | None:
        """Where most of its values are numbers under another decimal sign, or with digits in groups, and more than so:
        that sign, and such a value."""
        if self.values.dtype.kind != "O" or not (np.isnan(self.numbers) & ~self.missing).any():
            return None
        other = {sign: Column(self.values, sign) for sign in ".," if sign != self.decimal}
        sign = max(other, key=lambda sign: int((~np.isnan(other[sign].numbers)).sum()))
        strange = np.isnan(self.numbers) & ~np.isnan(other[sign].numbers)
        more = int((~np.isnan(other[sign].numbers)).sum()) > int((~np.isnan(self.numbers)).sum())
        return (sign, str(self.values[strange.argmax()]).strip()) if other[sign].is_numeric and more else None

    @cached_property
    def is_numeric(self) -> bool:
        """Whether it holds numbers: most of its values are some, or it has no value."""
        numeric = ~self.missing & ~np.isnan(self.numbers)
        return self.values.dtype.kind not in "mM" and int(numeric.sum()) >= MOSTLY * int((~self.missing).sum())


class Table(NamedTuple):
    """R rows.

    source  the file's path, or "frame"
    places  (R,) of each row: the line of a CSV, the row of a Parquet file or a frame, from 1
    unit    "line" or "row"
    """

    source: str
    columns: dict[str, Column]
    places: np.ndarray
    unit: str

    def at(self, row: int, name: str) -> str:
        return f"{self.place(row)}, column {name!r}"

    def place(self, row: int) -> str:
        return place(self.source, self.unit, int(self.places[row]))

    @property
    def height(self) -> int:
        return len(self.places)


def place(source: str, unit: str, number: int) -> str:
    """data.csv, line 3; or: frame row 3."""
    return f"{source}{' ' if source == 'frame' else ', '}{unit} {number}"


# ---------------------------------------------------------------------- files and frames


def as_number(text: Any, decimal: str) -> Any:
    """A number's text with a decimal dot and without what separates its digits; "" for a text that is none."""
    if not isinstance(text, str):
        return text
    apart = _GROUPS.replace(decimal, "")
    whole = rf"\d{{1,3}}([{apart}])\d{{3}}(?:\3\d{{3}})*|\d*"
    match = re.fullmatch(rf"([+-]?)({whole})(?:{re.escape(decimal)}(\d*))?([eE][+-]?\d+)?", text.strip())
    if match is None:
        return ""
    sign, digits, _, rest, exponent = match.groups("")
    return f"{sign}{re.sub('[^0-9]', '', digits)}.{rest}{exponent}"


def read_table(source: Any, data: TableData | None = None, option: str = "") -> Table:
    """Every column of a CSV or Parquet file, or of a frame of pandas or polars; a table that was read as it is.

    data    delimiter and decimal sign of a CSV; by default "," and "."
    option  the one that names the file, for the error where there is none

    Raises DataError for a file that is missing, empty, malformed or larger than the free memory, MissingExtraError for
    Parquet and polars without pyarrow.
    """
    if isinstance(source, Table):
        return source
    if not isinstance(source, str | Path):
        table = _of_frame("frame", as_pandas(source))
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise DataError(
                f"there is no file {path}: give an existing CSV or Parquet file" + (option and f" with --{option} FILE")
            )
        needed, free = _GROWTH * path.stat().st_size, available_bytes(torch.device("cpu"))
        if needed > free:
            raise DataError(
                f"{path} takes about {readable(needed)} to train on, and {readable(free)} of memory are free: give "
                "fewer rows or columns"
            )
        table = _read_parquet(path) if path.suffix in (".parquet", ".pq") else _read_csv(path, data)
    if not table.height:
        raise DataError(f"{table.source} has no row below the names of its columns: give a table with values")
    return table


def _table(
    source: str, names: Iterable[Any], cells: Iterable[np.ndarray], places: Any, unit: str, decimal: str | None = None
) -> Table:
    """Raises DataError for two columns of one name."""
    names = [str(name).strip() for name in names]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise DataError(f"{source} names the column {twice[0]!r} more than once: rename one")
    columns = {name: Column(values, decimal) for name, values in zip(names, cells, strict=True)}
    return Table(source, columns, np.asarray(places, np.int64), unit)


def _read_csv(path: Path, data: TableData | None) -> Table:
    """Every cell as its text: exact times and the user's own names of groups survive only so."""
    delimiter, decimal = (",", None) if data is None else (data.delimiter, data.decimal)
    rows: list[list[str]] = []
    lines: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if len(names) == 1 and (between := [each for each in ";\t|" if each in names[0]]):
                fix = "--data.delimiter " + ("$'\\t'" if between[0] == "\t" else f"'{between[0]}'")
                raise DataError(
                    f"{path}, line 1 names a single column, {names[0]!r}: give the character between the columns, {fix}"
                )
            for row in reader:
                if len(row) == len(names):
                    rows.append(row)
                    lines.append(reader.line_num)
                elif row:
                    raise DataError(
                        f"{path}, line {reader.line_num} has {counted(len(row), 'value')}, and line 1 names "
                        f"{counted(len(names), 'column')}: correct the line, or name another --data.delimiter than "
                        f"{delimiter!r}"
                    )
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not a CSV: {error}; correct the line") from error
        except UnicodeDecodeError:
            check_text(path)  # names the byte, its line and what converts the file
            raise
    if not names:
        raise DataError(f"{path} is empty: its first line must name the columns")
    cells = [np.array(column, object) for column in zip(*rows, strict=True)] or [np.empty(0, object)] * len(names)
    return _table(str(path), names, cells, lines, "line", decimal)


def _read_parquet(path: Path) -> Table:
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise MissingExtraError(f"{path} needs pyarrow: pip install pyarrow, or give a CSV") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path} could not be read as Parquet: {error}") from error
    return _of_frame(str(path), frame)


def as_pandas(source: Any) -> Any:
    """A frame of pandas."""
    import pandas

    if isinstance(source, pandas.DataFrame):
        return source
    if not hasattr(source, "to_pandas"):
        raise DataError(
            "a table is the path of a CSV or Parquet file, or a frame of pandas or polars; got a "
            f"{type(source).__module__}.{type(source).__qualname__}"
        )
    try:
        return source.to_pandas()
    except ImportError as error:
        raise MissingExtraError(f"a frame of polars needs pyarrow: pip install pyarrow ({error})") from error


def flat(frame: Any, source: str = "frame") -> Any:
    """A frame of pandas whose columns have the named levels of its index, too. Raises DataError for levels of times, or
    several, without a name."""
    if levels := [name for name in frame.index.names if name is not None and name not in frame.columns]:
        frame = frame.reset_index(level=levels)
    if frame.index.nlevels > 1 or frame.index.dtype.kind in "mM":
        raise DataError(
            f"the index of {source} holds times or several levels and has no name: name it, as in "
            "frame.rename_axis(['id', 'time']), and give group='id', time='time'"
        )
    return frame


def _of_frame(source: str, frame: Any) -> Table:
    frame = flat(frame, source)
    cells = [_cells(frame.iloc[:, number]) for number in range(frame.shape[1])]
    return _table(source, frame.columns, cells, np.arange(1, len(frame) + 1), "row")


def _cells(series: Any) -> np.ndarray:
    """A column of a frame: numbers, dates in UTC and durations as such, where missing is NaN or NaT; else objects."""
    from pandas.api import types

    kind = series.dtype
    if types.is_datetime64_any_dtype(kind):
        return np.asarray((series if series.dt.tz is None else series.dt.tz_convert(None)).to_numpy("datetime64"))
    if types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind):
        if types.is_integer_dtype(kind) and not series.hasnans:
            return np.asarray(series.to_numpy("uint64" if types.is_unsigned_integer_dtype(kind) else "int64"))
        return np.asarray(series.to_numpy(np.float64, na_value=np.nan))
    return np.asarray(series.to_numpy() if types.is_timedelta64_dtype(kind) else series.astype(object).to_numpy(object))


# ---------------------------------------------------------------------- numbers and names


#: what to do about a cell that is no number
_FIX = "correct it, leave it blank where nothing was measured, or name a column of categories in data.categorical"


def numbers(table: Table, name: str, among: np.ndarray | None = None, fix: str = _FIX) -> np.ndarray:
    """A column as float64, NaN where it is missing, of the rows `among` (R,) bool.

    Raises DataError for the first value that is no number a model can compute with.
    """
    column = table.columns[name]
    values = column.numbers
    wrong = ~(np.abs(values) <= LARGEST) & ~column.missing
    bad = np.flatnonzero(wrong if among is None else wrong & among)
    if not bad.size:
        return values if among is None else np.where(among, values, np.nan)
    row, value, count = bad[0], column.values[bad[0]], f"({bad.size} of its {len(values)} rows)"
    if np.isfinite(values[row]):
        raise DataError(
            f"{table.at(row, name)}: {value} is beyond {LARGEST:g}, where float32 leaves no room to compute {count}: "
            "divide the column by a constant, or correct the value"
        )
    raise DataError(f"{table.at(row, name)}: {plain(value)} is no finite number {count}: {fix}")


def plain(value: Any) -> str:
    """A cell as an error shows it."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def counted(count: int, what: str) -> str:
    """1 value, 1,000 values, 2 series."""
    return f"{count:,} {what}{'s' * (count != 1 and not what.endswith('series'))}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Some names, and how many more there are."""
    more = f", ... ({len(names):,} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_WHOLE = re.compile(r"^(-?[0-9]+)\.0+$")


class Names(NamedTuple):
    """A column of names: names[codes[row]] is that of a row, and the code -1 is a missing one."""

    codes: np.ndarray
    names: list[str]

    def by_frequency(self, codes: np.ndarray) -> list[str]:
        """The names that some codes have, the most frequent first."""
        counts = np.bincount(codes[codes >= 0], minlength=len(self.names))
        return [self.names[index] for index in np.argsort(-counts, kind="stable") if counts[index]]


def names(table: Table, name: str, what: str | None = None) -> Names:
    """A column as names, without spaces around them.

    what  what they are the names of, "group" or "channel"; a missing name is an error. Without it, they are categories:
          1 and 1.0 are the same

    Raises DataError for the first name that is missing.
    """
    index: dict[str, int] = {}

    def code(value: Any) -> int:
        # A float that is whole is of a column of integers with gaps: 3.0 -> 3.
        is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
        text = str(int(value) if is_whole else value).strip()
        if what is None:
            text = _WHOLE.sub(r"\1", text)
        return -1 if text in _MISSING else index.setdefault(text, len(index))

    codes = table.columns[name].each(code, -1, np.int64)
    if what is not None:
        require_present(table, name, what)
    return Names(codes, list(index))


def require_present(table: Table, name: str, what: str) -> None:
    """Raises DataError for the first cell without a value."""
    missing = np.flatnonzero(table.columns[name].missing)
    if missing.size:
        raise DataError(
            f"{table.at(missing[0], name)}: the {what} is missing ({missing.size} of its {table.height} rows): fill it "
            "in, or leave these rows out"
        )
