"""Series of numbers from a CSV or Parquet file: read, checked, split and cut into windows.

Each row of the file is a step of a series. A column `group` tells several series apart, a column `time` says when each
value was taken. Everything that cannot be used raises DataError, with the file's own row and the column.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from glissando.config import options
from glissando.errors import ConfigError, DataError, MissingExtraError, unknown_name


def _names(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [name.strip() for name in value.split(",")]


#: names of columns: a list, or a text with commas between, which `str` keeps the command line from reading as YAML
Names = Annotated[list[str], BeforeValidator(_names), str]


@options
class SeriesData:
    """A table of series, and what to learn from it.

    path            CSV with a line of names, or .parquet (needs pyarrow)
    columns         inputs of each step: a,b,c; if empty, all columns except time, group and a target that is not
                    forecast
    time            column with the time of each row, as numbers or ISO dates; without it, each step takes 1
    group           column that names the series that a row belongs to; without it, the file is one series
    target          columns to predict; if empty, `columns` are forecast
    task            forecast: the target's next value; regression: its value at the step itself; classification: its
                    class at the step itself; by default regression with a target, and forecast without
    window          number of steps of a training window
    batch_size      number of windows of a batch
    valid_path      file with the held-out series, with the same columns; without it, a part of `path` is held out
    valid_fraction  fraction of the series that is held out (whole series, or the end of a single one)
    delimiter       character between the columns of a CSV
    seed            seed of the choice of held-out series and of the order of the windows
    """

    path: str
    columns: Names = field(default_factory=list)
    time: str | None = None
    group: str | None = None
    target: Names = field(default_factory=list)
    task: Literal["forecast", "regression", "classification"] | None = None
    window: PositiveInt = 64
    batch_size: PositiveInt = 8
    valid_path: str | None = None
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    seed: NonNegativeInt = 0


class Series(NamedTuple):
    """One series of T steps, in the units of the data."""

    name: str
    x: np.ndarray  # (T, F)
    dt: np.ndarray  # (T,) until the next value of a forecast, else since the value before; the first is their median
    target: np.ndarray  # (T, O), or (T,) names of classes
    last: np.ndarray  # as target: what is known of it at the step where it is forecast
    place: np.ndarray  # (T,) the file's row of each target


class Windows(NamedTuple):
    """W windows of L steps; the rest of a last one is padding."""

    x: Tensor  # (W, L, F)
    dt: Tensor  # (W, L)
    mask: Tensor  # (W, L) bool, True at real steps
    target: Tensor  # (W, L, O), or (W, L) int64 classes
    last: Tensor  # as target
    place: Tensor  # (W, L) int64

    def batch(self, chosen: Any) -> Windows:
        return Windows(*(part[chosen] for part in self))


# ---------------------------------------------------------------------- files


class Table(NamedTuple):
    path: Path
    columns: dict[str, Sequence[Any]]
    places: Sequence[int]  # of each row: the line of a CSV, the row of a Parquet file, from 1
    unit: str  # "line" or "row"

    def at(self, row: int, name: str) -> str:
        return f"{self.path}, {self.unit} {self.places[row]}, column {name!r}"


def read_table(path: str | Path, delimiter: str = ",") -> Table:
    """Every column of a CSV, as texts, or of a Parquet file, as its values.

    Raises DataError for a file that is missing, empty or malformed, MissingExtraError for Parquet without pyarrow.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}: give an existing CSV or Parquet file")
    table = _read_parquet(path) if path.suffix in (".parquet", ".pq") else _read_csv(path, delimiter)
    if not table.places:
        raise DataError(f"{path} has no row below the names of its columns: give a file with values")
    return table


def _read_csv(path: Path, delimiter: str) -> Table:
    rows, lines, data = [], [], path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not a CSV in UTF-8: {error.reason}; save it in UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
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
    if not names:
        raise DataError(f"{path} is empty: its first line must name the columns")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{path} names the column {twice[0]!r} more than once: rename one")
    return Table(path, dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}, lines, "line")


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"{path} needs pyarrow: pip install pyarrow, or give a CSV") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} could not be read as Parquet: {error}") from error
    columns = {name: column.to_pylist() for name, column in zip(table.column_names, table.columns, strict=True)}
    return Table(path, columns, range(1, table.num_rows + 1), "row")


def _numbers(table: Table, name: str) -> np.ndarray:
    """A column as float64. Raises DataError for the first value that is no finite number."""
    values = table.columns[name]
    try:
        numbers = np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        numbers = np.array([_number(value) for value in values])
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        row, given = bad[0], values[bad[0]]
        what = "the value is missing" if given in (None, "") else f"{given!r} is no finite number"
        raise DataError(
            f"{table.at(row, name)}: {what} ({bad.size} of its {len(values)} rows): fill it in, leave these rows "
            "out, or leave the column out of data.columns"
        )
    return numbers


def _number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):
        return math.nan


def _times(table: Table, name: str) -> np.ndarray:
    """A column of numbers, or of ISO dates as seconds."""
    values = table.columns[name]
    if not isinstance(values[0], datetime) and not math.isnan(_number(values[0])):
        return _numbers(table, name)
    seconds = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            when = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{table.at(row, name)}: {value!r} is not a time: give a number, or a date such as 2026-01-31 12:00:00"
            ) from error
        seconds[row] = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return seconds


# ---------------------------------------------------------------------- series


def resolved(data: SeriesData, table: Table) -> SeriesData:
    """`data` with its columns, targets and task named, each of them in the table.

    Raises UnknownNameError for a column that is not there, ConfigError for options that contradict each other.
    """
    task = data.task or ("regression" if data.target else "forecast")
    if task != "forecast" and not data.target:
        raise ConfigError(f"data.task {task} needs data.target, the column to predict; without one values are forecast")
    for name in [*data.columns, *data.target, *(n for n in (data.time, data.group) if n is not None)]:
        if name not in table.columns:
            raise unknown_name(f"column of {table.path}", name, table.columns)
    left = [] if task == "forecast" else data.target
    columns = data.columns or [name for name in table.columns if name not in (data.time, data.group, *left)]
    if not columns:
        raise ConfigError(
            f"{table.path} has no column to read but {', '.join(table.columns)}: name some in data.columns"
        )
    if task == "classification" and len(data.target) > 1:
        raise ConfigError(f"data.task classification is of one target, got {', '.join(data.target)}: name one")
    if mixed := [name for name in left if name in columns]:
        raise ConfigError(f"{mixed[0]} is both read and predicted at the same step: leave it out of data.columns")
    values = {"columns": columns, "target": data.target or columns, "task": task}
    return SeriesData(**{name: values.get(name, getattr(data, name)) for name in SeriesData.__dataclass_fields__})


def read_series(data: SeriesData, table: Table) -> list[Series]:
    """The series of a table, in the order in which they begin; `data` is resolved."""
    x = np.stack([_numbers(table, name) for name in data.columns], 1)
    if data.task == "classification":
        target = np.array([str(value) if value not in (None, "") else "" for value in table.columns[data.target[0]]])
        if (missing := np.flatnonzero(target == "")).size:
            raise DataError(
                f"{table.at(missing[0], data.target[0])}: the class is missing: fill it in, or leave it out"
            )
    else:
        target = np.stack([_targets(table, name) for name in data.target], 1)
    times = np.arange(len(x), dtype=float) if data.time is None else _times(table, data.time)
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(["" for _ in x] if data.group is None else table.columns[data.group]):
        rows.setdefault(str(name), []).append(row)
    places = np.array(table.places)
    return [_one(data, table, name, np.array(own), x, target, times, places) for name, own in rows.items()]


def _targets(table: Table, name: str) -> np.ndarray:
    if (
        (first := table.columns[name][0]) not in (None, "")
        and math.isnan(_number(first))
        and str(first).lower() != "nan"
    ):
        raise DataError(
            f"{table.at(0, name)}: {first!r} is not a number, and data.task regression or forecast predicts numbers; "
            "for classes give --data.task classification"
        )
    return _numbers(table, name)


def _one(
    data: SeriesData, table: Table, name: str, own: np.ndarray, x: np.ndarray, target: np.ndarray, times: np.ndarray,
    places: np.ndarray,
) -> Series:  # fmt: skip
    of = f" of {data.group} {name!r}" if data.group is not None else ""
    if len(own) < 2:
        raise DataError(f"{table.path} has a single row{of}, and a series has at least 2: leave it out")
    gaps = np.diff(times[own]) if data.time is not None else np.ones(len(own) - 1)
    if (back := np.flatnonzero(gaps <= 0)).size:
        row = own[back[0] + 1]
        raise DataError(
            f"{table.at(row, str(data.time))}: the time does not increase{of}: "
            f"{table.columns[str(data.time)][row]} comes after {table.columns[str(data.time)][own[back[0]]]}. Sort the "
            "rows by time, remove duplicate times"
            + (", or name the column that tells series apart with --data.group" if data.group is None else "")
        )
    if data.task == "forecast":
        return Series(name, x[own[:-1]], gaps, target[own[1:]], target[own[:-1]], places[own[1:]])
    return Series(name, x[own], np.concatenate([[np.median(gaps)], gaps]), target[own], target[own], places[own])


def split(data: SeriesData, series: list[Series]) -> tuple[list[Series], list[Series]]:
    """To train on, and held out: whole series, or the end of a single one."""
    if len(series) > 1:
        held = max(1, round(data.valid_fraction * len(series)))
        if held == len(series):
            raise ConfigError(f"data.valid_fraction {data.valid_fraction} holds all {held} series out: lower it")
        chosen = set(np.random.default_rng(data.seed).permutation(len(series))[:held].tolist())
        return [s for i, s in enumerate(series) if i not in chosen], [s for i, s in enumerate(series) if i in chosen]
    one = series[0]
    cut = round(len(one.x) * (1 - data.valid_fraction))
    if not 0 < cut < len(one.x):
        raise DataError(
            f"{data.path} has {len(one.x)} steps, of which data.valid_fraction {data.valid_fraction} cannot be "
            "held out: give a longer file, or data.valid_path"
        )
    first, second = (Series(one.name, *(part[s] for part in one[1:])) for s in (slice(cut), slice(cut, None)))
    return [first], [second]


#: classes that an error lists
_SHOWN = 10


def windows(data: SeriesData, series: list[Series], classes: Sequence[str]) -> Windows:
    """Each series in windows that do not overlap, the last one padded, none longer than the longest series.

    classes  those that training knows

    Raises DataError for a class that is not among them.
    """
    parts: list[list[np.ndarray]] = [[] for _ in Windows._fields]
    length = min(data.window, max(len(one.x) for one in series))
    number = {name: index for index, name in enumerate(classes)}
    for one in series:
        target = one.target
        if data.task == "classification":
            if unknown := [
                (place, name)
                for place, name in zip(one.place.tolist(), target.tolist(), strict=True)
                if name not in number
            ]:
                place, name = unknown[0]
                more = f", ... ({len(classes):,} in all)" if len(classes) > _SHOWN else ""
                raise DataError(
                    f"{data.path}, row {place}, column {data.target[0]!r}: the class {name!r} is not among those that "
                    f"training knows, {', '.join(classes[:_SHOWN])}{more}. Hold other series out with data.seed, leave "
                    "these rows out, or, where the column holds numbers to predict, set data.task to regression"
                )
            target = np.array([number[name] for name in target])
        last = target if data.task == "classification" else one.last
        for start in range(0, len(one.x), length):
            real = np.ones(len(one.x[start : start + length]), bool)
            values = (one.x, one.dt, None, target, last, one.place)
            for part, value in zip(parts, values, strict=True):
                cut = real if value is None else value[start : start + length]
                padding = [(0, length - len(real)), *[(0, 0)] * (cut.ndim - 1)]
                part.append(np.pad(cut, padding))
    return Windows(*(torch.from_numpy(np.stack(part)) for part in parts))


class Scales(NamedTuple):
    """Means and deviations of what is trained on, as SeriesModel.set_scales takes them."""

    input_mean: np.ndarray
    input_scale: np.ndarray
    output_mean: np.ndarray
    output_scale: np.ndarray
    time_scale: float


def scales(data: SeriesData, series: list[Series]) -> Scales:
    """Of the training series; a constant column has the scale 1, classes have none.

    Raises DataError for a column whose variation float32 does not resolve.
    """
    x, dt = np.concatenate([one.x for one in series]), np.concatenate([one.dt for one in series])
    target = np.zeros((1, 1)) if data.task == "classification" else np.concatenate([one.target for one in series])
    found = []
    for values, names in ((x, data.columns), (target, data.target)):
        mean, scale = values.mean(0), values.std(0)
        if (coarse := np.flatnonzero((scale > 0) & (scale < 1e-4 * np.abs(mean)))).size:
            each = coarse[0]
            raise DataError(
                f"{data.path}, column {names[each]!r} varies by {scale[each]:.3g} about {mean[each]:.8g}, which "
                "float32 does not resolve: subtract a constant from it"
            )
        found += [mean, np.where(scale > 0, scale, 1.0)]
    return Scales(found[0], found[1], found[2], found[3], float(np.median(dt)))


def classes_of(data: SeriesData, series: list[Series]) -> list[str]:
    """Of a classification, the most frequent first; else none."""
    if data.task != "classification":
        return []
    return [name for name, _ in Counter(name for one in series for name in one.target.tolist()).most_common()]


def order(data: SeriesData, count: int, step: int) -> Iterator[Tensor]:
    """The windows of each batch, from batch `step` on: all in a new order each epoch, a function of seed and step."""
    per_epoch = -(-count // data.batch_size)
    while True:
        epoch, batch = divmod(step, per_epoch)
        shuffled = np.random.default_rng((data.seed, epoch)).permutation(count)
        yield torch.from_numpy(shuffled[batch * data.batch_size : (batch + 1) * data.batch_size])
        step += 1


# ---------------------------------------------------------------------- generated series


def oscillators(count: int, length: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Values (T, 2) and the time of each (T,): Re z of two oscillators with dz/dt = (-d + i w) z, kicked now and then,
    where w is one of two; gaps are exponential, 1 on average."""
    rng, made = np.random.default_rng(seed), []
    decay, turn = np.array([0.02, 0.1]), np.array([[0.3, 1.1], [0.9, 0.4]])
    for _ in range(count):
        regime, z = int(rng.integers(2)), rng.normal(size=2) + 1j * rng.normal(size=2)
        gaps, values = rng.exponential(1.0, length), []
        for gap in gaps:
            values.append(z.real)
            z = z * np.exp((-decay + 1j * turn[regime]) * gap)
            if rng.random() < 0.05:
                regime, z = 1 - regime, z + rng.normal(size=2)
        made.append((np.array(values), np.concatenate([[0.0], gaps[:-1].cumsum()])))
    return made
