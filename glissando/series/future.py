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

#: roundings of float64 by which a time may differ
_ROUNDINGS = 4 * np.finfo(np.float64).eps


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
    rows, moments = _rows_of(data, table, panel.names), None
    if data.time is not None:
        read = times_of(table, data.time, "date" if encoding.time_form == "date" else "number")
        moments = read.origins(np.arange(table.height), encoding.time_form)
    made = np.empty((len(panel.names), len(after), values.shape[1]))
    last = panel.times[panel.starts[1:] - 1]
    for s, name in enumerate(panel.names):
        if moments is None:
            asked, since, tolerance = after, np.arange(1.0, len(rows[s]) + 1), 0.0
        else:
            asked, (since, tolerance) = last[s] + after, _since(moments[rows[s]], panel.clock.origins[s], encoding)
        order = np.argsort(since, kind="stable")
        since, chosen = since[order], rows[s][order]
        _require_agreement(encoding, table, since, chosen, values)
        place = np.searchsorted((since[1:] + since[:-1]) / 2, asked)  # the nearest of each
        near = np.abs(since[place] - asked) <= tolerance + _ROUNDINGS * asked if len(since) else asked < 0
        if not near.all():
            written = panel.clock.written([s], [last[s] + after[np.argmin(near)]])[0]
            of = f" of {data.group} {name!r}" if data.group in table.columns else ""
            raise DataError(
                f"{table.source} has no row{of} at {data.time or 'step'} {written}, which is forecast: add it"
            )
        made[s] = values[chosen[place]]
        for j, column in np.argwhere(np.isnan(made[s]))[:1]:
            raise DataError(
                f"{table.at(chosen[place[j]], encoding.future[column])}: the value is missing, and is needed there: "
                "fill it in"
            )
    return made


def _rows_of(data: SeriesData, table: tables.Table, names: list[str]) -> list[np.ndarray]:
    """The table's rows of each series: all of them where it has no groups."""
    if data.group not in table.columns:
        return [np.arange(table.height)] * len(names)
    codes, found = tables.names(table, data.group, "group")
    order = np.argsort(codes, kind="stable")
    by_code = np.split(order, np.cumsum(np.bincount(codes, minlength=len(found)))[:-1])
    by_name = dict(zip(found, by_code, strict=True))
    return [by_name.get(name, order[:0]) for name in names]


def _since(moments: np.ndarray, origin: Any, encoding: Encoding) -> tuple[np.ndarray, float]:
    """Moments since an origin, float64 differences of exact numbers, and by how much they may be rounded: integers are
    exact, and what was computed with fractions is rounded as numbers of its size are."""
    if moments.dtype.kind == "i" and isinstance(origin, int | np.integer):
        return (moments - origin) / (1e9 if encoding.time_form == "date" else 1.0), 0.0
    start = Decimal(str(origin))
    since = np.array([float(Decimal(str(moment)) - start) for moment in moments])
    return since, _ROUNDINGS * abs(float(start))


def _require_agreement(
    encoding: Encoding, table: tables.Table, since: np.ndarray, rows: np.ndarray, values: np.ndarray
) -> None:
    """Raises DataError for two rows of one time with other values."""
    one, next_ = values[rows[:-1]], values[rows[1:]]
    other = (np.diff(since) == 0) & ((one != next_) & ~(np.isnan(one) & np.isnan(next_))).any(1)
    for at in np.flatnonzero(other)[:1]:
        raise DataError(
            f"{table.place(rows[at + 1])} has the series and the time of {table.unit} {table.places[rows[at]]}, and "
            f"other values of {', '.join(encoding.future)}: leave one of these rows out"
        )
