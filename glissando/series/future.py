"""The known-future columns at the times that are forecast, from a table of their own."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from glissando.errors import DataError
from glissando.series import tables
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel
from glissando.series.times import times as times_of


def ahead_of(data: SeriesData, encoding: Encoding, panel: Panel, after: np.ndarray, source: Any) -> np.ndarray:
    """(S, J, U) the columns of encoding.future, `after` (J,) each series' last step.

    Args:
        data: Names of the columns of groups and times.
        encoding: Names of the columns.
        panel: The series.
        after: (J,) times since the last step, in the panel's unit.
        source: File or frame with a row for each series and time. Without a column of groups, its rows are of every
            series; without one of times, row j is the j-th row after a series' last.

    Raises DataError for a column or a time that is missing, and for a value that is none.
    """
    table = tables.read_table(source, data.delimiter)
    for name in [*encoding.future, *([data.time] if data.time is not None else [])]:
        if name not in table.columns:
            raise DataError(
                f"there is no column {name!r} in {table.source}: --future needs the times and "
                f"{', '.join(encoding.future)}"
            )
    values = np.stack([tables.numbers(table, name) for name in encoding.future], 1)
    groups = None
    if data.group is not None and data.group in table.columns:
        found = tables.names(table, data.group, "group")
        groups = [found.names[code] for code in found.codes.tolist()]
    places: dict[tuple[str | None, Any], int] = {}
    for row, moment in enumerate(_moments(data, encoding, table, groups)):
        first = places.setdefault((None if groups is None else groups[row], moment), row)
        if not np.array_equal(values[row], values[first], equal_nan=True):
            raise DataError(
                f"{table.place(row)} has the series and the time of {table.unit} {table.places[first]}, and other "
                f"values of {', '.join(encoding.future)}: leave one of these rows out"
            )
    made = np.empty((len(panel.names), len(after), len(encoding.future)))
    last = panel.times[panel.starts[1:] - 1]
    for s, name in enumerate(panel.names):
        for j, time in enumerate(after):
            key = _asked(encoding, panel, s, last[s] + time) if data.time is not None else round(float(time))
            row = places.get((None if groups is None else name, key), -1)
            if row < 0:
                written = panel.clock.written([s], [last[s] + time])[0]
                of = f" of {data.group} {name!r}" if groups is not None else ""
                raise DataError(
                    f"{table.source} has no row{of} at {data.time or 'step'} {written}, which is forecast: add it"
                )
            made[s, j] = values[row]
            if (blank := np.flatnonzero(np.isnan(values[row]))).size:
                raise DataError(
                    f"{table.at(row, encoding.future[blank[0]])}: the value is missing, and is needed there: fill it in"
                )
    return made


def _moments(data: SeriesData, encoding: Encoding, table: tables.Table, groups: list[str] | None) -> list[Any]:
    """The time of each row, exact, in a form that _asked has too."""
    if data.time is None:
        counts: dict[str | None, int] = {}
        found = []
        for row in range(table.height):
            group = None if groups is None else groups[row]
            counts[group] = counts.get(group, 0) + 1
            found.append(counts[group])
        return found
    read = times_of(table, data.time, "date" if encoding.time_form == "date" else "number")
    moments = read.origins(np.arange(table.height), encoding.time_form)
    return [_key(encoding, moment) for moment in moments]


def _asked(encoding: Encoding, panel: Panel, series: int, time: float) -> Any:
    origin, since = panel.clock.origins[series], Decimal(f"{time:.15g}")
    if encoding.time_form == "date":
        return int(origin) + round(since * 10**9)
    return _key(encoding, (origin if isinstance(origin, Decimal) else Decimal(str(origin))) + since)


def _key(encoding: Encoding, moment: Any) -> Any:
    return int(moment) if encoding.time_form == "date" else Decimal(str(moment)).normalize()
