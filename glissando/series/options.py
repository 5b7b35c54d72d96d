"""The options of a table of series: --data.* on the command line."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from glissando.config import options


def _names(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [name.strip() for name in value.split(",")]


def _task(value: Any) -> Any:
    if value == "interpolate":
        raise ValueError(
            "expected 'forecast', 'regression' or 'classification', got 'interpolate': a forecast reads the past "
            "alone, and nothing is filled in from both sides of a gap"
        )
    return value


#: names of columns: a list, or a text with commas between, which `str` keeps the command line from reading as YAML
Names = Annotated[list[str], BeforeValidator(_names), str]
Unit = Literal["ns", "us", "ms", "s", "min", "h", "d", "w", "y"]


@options
class TableData:
    """What a table of series and a log of events have in common.

    path            CSV with a line of names, or .parquet (needs pyarrow); a frame of pandas or polars takes its place
                    in Python
    group           column that names the series (person, machine, shop) of a row; without it, the table is one series
    time            column with the time of each row, as numbers or dates
    time_format     date: the times are dates, ISO or 20260131; number: they are numbers; by default dates where most
                    times are such
    time_unit       unit of numeric times, by which a horizon such as 24h is converted: s by default; y is 365.25 days
    channel         of a long table of values, one measurement a row: the column that names what was measured
    value           of a long table of values: the column with what was measured
    columns         channels to read: a,b,c; if empty, all of a long table, and of a wide one all columns that no other
                    option names, without an index that pandas wrote
    static          columns that do not vary within a series
    static_path     second table with the static columns and the column `group`, one row a series
    split           series: whole series are held out; future: the end of each; by default series, if there are several
    valid_path      table with the held-out series, with the same columns; without it, a part of `path` is held out
    valid_fraction  fraction that is held out, of the series, or of the end of each
    delimiter       character between the columns of a CSV
    decimal         decimal sign of a CSV's numbers, a dot or a comma, whose digits may then be in groups of three
                    (1,310.1; 1.310,1); by default a dot, without groups
    seed            seed of the choice of held-out series and of the order of the windows
    """

    path: str | None = None
    group: str | None = None
    time: str | None = None
    time_format: Literal["date", "number"] | None = None
    time_unit: Unit | None = None
    channel: str | None = None
    value: str | None = None
    columns: Names = field(default_factory=list)
    static: Names = field(default_factory=list)
    static_path: str | None = None
    split: Literal["series", "future"] | None = None
    valid_path: str | None = None
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    decimal: Literal[".", ","] | None = None
    seed: NonNegativeInt = 0


@options
class SeriesData(TableData):
    """A table of series, and what to learn from it: a table without `time` has a step a row, each of which takes 1.

    categorical     columns, or channels, of categories; those of texts are categorical without being named
    future          numeric columns that are known in advance, such as the hour of the day
    target          columns to predict; if empty, the numeric channels are forecast
    task            forecast: the target's next values; regression: its value at the step itself; classification: its
                    class; by default forecast without a target, else forecast where the target is a channel that
                    `columns` names or a long table's, and regression or classification by its values
    label           step: a class for each step; series: one for each series; by default series where no series has two
    scale           units in which a series is read and scored: all: the deviation of the whole table; series: its own
                    mean and deviation so far, where series have levels of their own
    duplicates      rows of the same series, time and channel with unequal values: error, or which of them is taken
    window          number of steps of a training window
    batch_size      number of windows of a batch
    """

    categorical: Names = field(default_factory=list)
    future: Names = field(default_factory=list)
    target: Names = field(default_factory=list)
    task: Annotated[Literal["forecast", "regression", "classification"] | None, BeforeValidator(_task)] = None
    label: Literal["step", "series"] | None = None
    scale: Literal["all", "series"] = "all"
    duplicates: Literal["error", "mean", "first", "last"] = "error"
    window: PositiveInt = 64
    batch_size: PositiveInt = 8
