"""The options of a log of events: --data.* on the command line."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import BeforeValidator, PositiveInt

from glissando.config import options
from glissando.series.options import Names, TableData

#: a time, the name of a column of times, or a duration: a text, also where it is a number
Moment = Annotated[str, BeforeValidator(lambda value: value if value is None else str(value)), str]


@options
class EventsData(TableData):
    """A log of events, and what to learn from it. Values, `channel`, `value` and `columns` are those of values_path.

    kind         column with the kind of each event; without it, all are of one kind
    inputs       kinds that are read and not predicted
    marks        further columns of the events, numbers or categories, which are read and not predicted
    categorical  columns among marks and static that hold categories; those of texts are without being named
    values_path  third table with measured values, and the columns `group` and `time`: they are read, not predicted
    start        when prediction starts: a time, or a column of times; what comes before it is read, not predicted; by
                 default the first event of each series
    end          when observation ends: a time, or a column of times; by default the last event of each series
    resolution   unit that the times are rounded up to, such as 1d; 0: none, times are exact; by default found from the
                 times
    window       number of steps of a training window
    batch_size   number of windows of a batch
    """

    kind: str | None = None
    inputs: Names = field(default_factory=list)
    marks: Names = field(default_factory=list)
    categorical: Names = field(default_factory=list)
    values_path: str | None = None
    start: Moment | None = None
    end: Moment | None = None
    resolution: Moment | None = None
    window: PositiveInt = 128
    batch_size: PositiveInt = 16
