"""Series of numbers from a table (glissando.data.tables): checked, split and cut into windows.

Each row of the table is a step of a series. A column `group` tells several series apart, a column `time` says when each
value was taken. Everything that cannot be used raises DataError, with the file's own row and the column.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from glissando.config import options
from glissando.data import tables
from glissando.data.tables import Table
from glissando.errors import ConfigError, DataError, unknown_name


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
    columns         inputs of each step: a,b,c; if empty, all columns except time, group, a target that is not
                    forecast, and an index that pandas wrote
    time            column with the time of each row, as numbers or dates; without it, each step takes 1
    time_format     date: the times are dates, ISO or digits alone (20260131, 202601, 202601311200), and steps are in
                    seconds; number: they are numbers; by default dates where every time is one
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
    time_format: Literal["date", "number"] | None = None
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
    table: Table
    x: np.ndarray  # (T, F)
    dt: np.ndarray  # (T,) until the next value of a forecast, else since the value before; the first is their median
    target: np.ndarray  # (T, O), or (T,) names of classes
    last: np.ndarray  # as target: what is known of it at the step where it is forecast
    read: np.ndarray  # (T,) the file's row of each x
    place: np.ndarray  # (T,) the file's row of each target, where dt ends


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


# ---------------------------------------------------------------------- series


def resolved(data: SeriesData, table: Table) -> SeriesData:
    """`data` with its columns, targets, task and form of times, as the table has them.

    Raises UnknownNameError for a column that is not there, ConfigError for options that contradict each other.
    """
    task = data.task or ("regression" if data.target else "forecast")
    if task != "forecast" and not data.target:
        raise ConfigError(f"data.task {task} needs data.target, the column to predict; without one values are forecast")
    for name in [*data.columns, *data.target, *(n for n in (data.time, data.group) if n is not None)]:
        if name not in table.columns:
            raise unknown_name(f"column of {table.path}", name, table.columns)
    left = [] if task == "forecast" else data.target
    used = (data.time, data.group, *left)
    columns = data.columns or [n for n in table.columns if n not in used and not tables.is_index(n)]
    if not columns:
        raise ConfigError(
            f"{table.path} has no column to read but {', '.join(table.columns)}: name some in data.columns"
        )
    if task == "classification" and len(data.target) > 1:
        raise ConfigError(f"data.task classification is of one target, got {', '.join(data.target)}: name one")
    if mixed := [name for name in left if name in columns]:
        raise ConfigError(f"{mixed[0]} is both read and predicted at the same step: leave it out of data.columns")
    if data.time is None and data.time_format is not None:
        raise ConfigError("data.time_format is of the column data.time, which is not named: name it, or leave it out")
    form = data.time_format or (tables.time_format(table, data.time) if data.time is not None else None)
    values = {"columns": columns, "target": data.target or columns, "task": task, "time_format": form}
    return SeriesData(**{name: values.get(name, getattr(data, name)) for name in SeriesData.__dataclass_fields__})


def read_series(data: SeriesData, table: Table) -> list[Series]:
    """The series of a table, in the order in which they begin; `data` is resolved."""
    rows: dict[str, Sequence[int]] = {"": range(len(table.places))}
    if data.group is not None:
        by_name: dict[str, list[int]] = {}
        for row, name in enumerate(tables.labels(table, data.group, "group")):
            by_name.setdefault(name, []).append(row)
        rows = dict(by_name)
    times = None if data.time is None else tables.times(table, data.time, data.time_format or "number")
    x = np.stack([tables.numbers(table, name) for name in data.columns], 1)
    if data.task == "classification":
        target = np.array(tables.labels(table, data.target[0], "class"))
    else:
        target = np.stack([_targets(table, name) for name in data.target], 1)
    places = np.array(table.places)
    return [_one(data, table, name, np.array(chosen), x, target, times, places) for name, chosen in rows.items()]


def described(data: SeriesData, table: Table, step: float) -> list[str]:
    """What of a table is read otherwise than it seems, and its median step with the unit; `data` is resolved."""
    used = (data.time, data.group, *data.columns, *data.target)
    lines = [
        f"{table.path}: {f'the column {name!r}' if name else 'a column without a name'} is left out, as an index that "
        "pandas wrote; to use it, " + (f"name it: --data.columns {name},..." if name else "give it a name")
        for name in table.columns
        if tables.is_index(name) and name not in used
    ]
    if data.time is None:
        return [*lines, "median step 1 row: no column of times is named (--data.time)"]
    first = table.columns[data.time][0]
    if data.time_format == "date" and tables.is_compact(first):
        lines.append(
            f"{table.path}: the times {data.time} are read as dates, {first} as {tables.shown(first)}; if they are "
            "numbers, give --data.time_format number"
        )
    in_seconds = data.time_format == "date" or tables.is_duration(table, data.time)
    unit = tables.duration(step) if in_seconds else f"{step:.6g}, in the unit of the numbers in {data.time}"
    return [*lines, f"median step {unit}"]


def _targets(table: Table, name: str) -> np.ndarray:
    if not tables.is_number(first := table.columns[name][0]):
        raise DataError(
            f"{table.at(0, name)}: {first!r} is not a number, and data.task regression or forecast predicts numbers; "
            "for classes give --data.task classification"
        )
    return tables.numbers(table, name)


def _one(
    data: SeriesData, table: Table, name: str, rows: np.ndarray, x: np.ndarray, target: np.ndarray,
    times: tables.Times | None, places: np.ndarray,
) -> Series:  # fmt: skip
    of = f" of {data.group} {name!r}" if data.group is not None else ""
    if len(rows) < 2:
        raise DataError(f"{table.path} has a single row{of}, and a series has at least 2: leave it out")
    gaps = np.ones(len(rows) - 1) if times is None else np.diff(times.ticks[rows])
    if (back := np.flatnonzero(gaps <= 0)).size:
        row, written = rows[back[0] + 1], table.columns[str(data.time)]
        raise DataError(
            f"{table.at(row, str(data.time))}: the time does not increase{of}: {written[row]} comes after "
            f"{written[rows[back[0]]]}. Sort the rows by time, remove duplicate times"
            + (", or name the column that tells series apart with --data.group" if data.group is None else "")
        )
    dt = gaps.astype(np.float64) / (1 if times is None else times.second or 1)
    places = places[rows]
    if data.task == "forecast":
        seen, asked = rows[:-1], rows[1:]
        return Series(name, table, x[seen], dt, target[asked], target[seen], places[:-1], places[1:])
    dt = np.concatenate([[np.median(dt)], dt])
    return Series(name, table, x[rows], dt, target[rows], target[rows], places, places)


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
    first, second = (Series(*one[:2], *(part[s] for part in one[2:])) for s in (slice(cut), slice(cut, None)))
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
                    f"{one.table.where(place, data.target[0])}: the class {name!r} is not among those that training "
                    f"knows, {', '.join(classes[:_SHOWN])}{more}. Hold other series out with data.seed, leave these "
                    "rows out, or, where the column holds numbers to predict, set data.task to regression"
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


#: the smallest deviation of a column, and median step: below it, float32 divides by zero
_SMALLEST = 1e-30


class Scales(NamedTuple):
    """Means and deviations of what is trained on, as SeriesModel.set_scales takes them."""

    input_mean: np.ndarray
    input_scale: np.ndarray
    output_mean: np.ndarray
    output_scale: np.ndarray
    time_scale: float


def scales(data: SeriesData, series: list[Series]) -> Scales:
    """Means and deviations of the training series; a constant column has the scale 1, classes have none.

    Raises DataError for a column whose variation float32 does not resolve.
    """
    x, dt = np.concatenate([one.x for one in series]), np.concatenate([one.dt for one in series])
    target = np.zeros((1, 1)) if data.task == "classification" else np.concatenate([one.target for one in series])
    found = []
    for values, names in ((x, data.columns), (target, data.target)):
        constant = values.min(0) == values.max(0)  # rounded, the mean of equal values may differ from each
        mean, scale = np.where(constant, values[0], values.mean(0)), np.where(constant, 1.0, values.std(0))
        if (coarse := np.flatnonzero(~constant & (scale < np.maximum(1e-4 * np.abs(mean), _SMALLEST)))).size:
            each = coarse[0]
            small = scale[each] < _SMALLEST
            raise DataError(
                f"{data.path}, column {names[each]!r} varies by {scale[each]:.3g} about {mean[each]:.8g}, which "
                f"float32 does not resolve: {'multiply it by a constant' if small else 'subtract a constant from it'}"
            )
        found += [mean, scale]
    if (step := np.median(dt)) < _SMALLEST:
        raise DataError(
            f"{data.path}, column {data.time!r}: the median step {step:.3g} is too small for float32: multiply "
            "the times by a constant"
        )
    return Scales(found[0], found[1], found[2], found[3], float(np.median(dt)))


#: deviations from the mean, and median steps, beyond which the squares of float32 overflow within a model
_FAR = 1e15


def require_near(data: SeriesData, series: list[Series], found: Scales) -> None:
    """Raises DataError for the first value or step that is too far from the scales of training for float32."""
    far: tuple[str, str] = ("deviations from the mean", "times the median step")
    for one in series:
        parts: list[tuple[np.ndarray, Any, Any, list[Any], np.ndarray, str]] = [
            (one.x, found.input_mean, found.input_scale, data.columns, one.read, far[0]),
            (one.dt[:, None], np.zeros(1), np.full(1, found.time_scale), [data.time], one.place, far[1]),
        ]
        if data.task != "classification":
            parts.append((one.target, found.output_mean, found.output_scale, data.target, one.place, far[0]))
        for values, mean, scale, names, places, what in parts:
            for row, column in np.argwhere(np.abs(values - mean) > _FAR * scale):
                count = abs(values[row, column] - mean[column]) / scale[column]
                raise DataError(
                    f"{one.table.where(places[row], names[column])}: {values[row, column]:.6g} is {count:.3g} {what} "
                    "of what is trained on, too far for float32: correct it, or leave this row out"
                )


def classes_of(data: SeriesData, series: list[Series]) -> list[str]:
    """Of a classification, the most frequent first; else none."""
    if data.task != "classification":
        return []
    return [name for name, _ in Counter(name for one in series for name in one.target.tolist()).most_common()]


class Prepared(NamedTuple):
    """What a configuration and its table come to; `data` names every column.

    lines  for the user: how the tables were read
    """

    data: SeriesData
    classes: list[str]
    train: Windows
    valid: Windows
    scales: Scales
    lines: list[str]


def prepare(data: SeriesData, classes: list[str] | None = None) -> Prepared:
    """Read and split the table. `classes`: those of a run that goes on. Raises DataError for what cannot be used."""
    table = tables.read_table(data.path, data.delimiter)
    data = resolved(data, table)
    training = read_series(data, table)
    if data.valid_path is not None:
        held_out = read_series(data, tables.read_table(data.valid_path, data.delimiter))
    else:
        training, held_out = split(data, training)
    classes, found = classes_of(data, training) if classes is None else classes, scales(data, training)
    require_near(data, [*training, *held_out], found)
    lines = described(data, table, found.time_scale)
    return Prepared(data, classes, windows(data, training, classes), windows(data, held_out, classes), found, lines)


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
