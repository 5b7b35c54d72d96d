"""The options of a log of events: --data.* on the command line."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from glissando.config import options
from glissando.series.options import Names, Unit

#: a time, or the name of a column of times: a text, also where it is a number
Moment = Annotated[str, BeforeValidator(lambda value: value if value is None else str(value)), str]
#: a duration: as for a horizon
Span = Annotated[Any, BeforeValidator(lambda value: value if value is None else str(value)), str]


@options
class EventsData:
    """A log of events, and what to learn from it.

    path            CSV with a line of names, or .parquet (needs pyarrow); a frame of pandas or polars takes its place
                    in Python
    group           column that names the series (person, machine, shop) of an event; without it, the table is one
    time            column with the time of each event, as numbers or dates
    time_format     date: the times are dates, ISO or 20260131; number: they are numbers; by default dates where most
                    times are such
    time_unit       unit of numeric times, by which a horizon such as 30d is converted: s by default; y is 365.25 days
    kind            column with the kind of each event; without it, all are of one kind
    inputs          kinds that are read and not predicted
    marks           further columns of the events, numbers or categories, which are read and not predicted
    categorical     columns among marks and static that hold categories; those of texts are without being named
    static          columns that do not vary within a series
    static_path     second table with the static columns and the column `group`, one row a series
    values_path     third table with measured values, and the columns `group` and `time`: they are read, not predicted
    channel         of a long table of values: the column that names what was measured
    value           of a long table of values: the column with what was measured
    columns         channels of the table of values to read: a,b,c; if empty, all
    start           when prediction starts: a time, or a column of times; what comes before it is read, not predicted;
                    by default the first event of each series
    end             when observation ends: a time, or a column of times; by default the last event of each series
    resolution      unit that the times are rounded up to, such as 1d; 0: none, times are exact; by default found from
                    the times
    split           series: whole series are held out; future: the end of each; by default series, if there are several
    window          number of steps of a training window
    batch_size      number of windows of a batch
    valid_path      table with the held-out series, with the same columns; without it, a part of `path` is held out
    valid_fraction  fraction that is held out, of the series or of the time of each
    delimiter       character between the columns of a CSV
    seed            seed of the choice of held-out series and of the order of the windows
    """

    path: str | None = None
    group: str | None = None
    time: str | None = None
    time_format: Literal["date", "number"] | None = None
    time_unit: Unit | None = None
    kind: str | None = None
    inputs: Names = field(default_factory=list)
    marks: Names = field(default_factory=list)
    categorical: Names = field(default_factory=list)
    static: Names = field(default_factory=list)
    static_path: str | None = None
    values_path: str | None = None
    channel: str | None = None
    value: str | None = None
    columns: Names = field(default_factory=list)
    start: Moment | None = None
    end: Moment | None = None
    resolution: Span | None = None
    split: Literal["series", "future"] | None = None
    window: PositiveInt = 128
    batch_size: PositiveInt = 16
    valid_path: str | None = None
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    seed: NonNegativeInt = 0
