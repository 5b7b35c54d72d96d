"""The known-future columns at the times that are forecast, from a table of their own."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np

from glissando.errors import DataError
from glissando.series import tables
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel
from glissando.series.steps import Clash, Steps, merge, steps

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
    table = tables.read_table(source, data)
    for name in [*encoding.future, *([data.time] if data.time is not None else [])]:
        if name not in table.columns:
            raise DataError(
                f"there is no column {name!r} in {table.source}: --future needs the times and "
                f"{', '.join(encoding.future)}"
            )
    read = steps(data if data.group in table.columns else replace(data, group=None), table, encoding.time_form)
    values = np.stack([_by_steps(table, name, read) for name in encoding.future], 1)
    moments = None if data.time is None else read.times.origins(read.places, encoding.time_form)
    spans = dict(zip(read.names, zip(read.starts[:-1], read.starts[1:], strict=True), strict=True))
    made = np.empty((len(panel.names), len(after), values.shape[1]))
    last = panel.times[panel.starts[1:] - 1]
    for s, name in enumerate(panel.names):
        of_series = slice(*spans.get(name if data.group in table.columns else "", (0, 0)))
        if moments is None:
            asked, since, tolerance = after, np.arange(1.0, len(read.places[of_series]) + 1), 0.0
        else:
            asked = last[s] + after
            since, tolerance = _since(moments[of_series], panel.clock.origins[s], encoding)
        place = np.searchsorted((since[1:] + since[:-1]) / 2, asked)  # the nearest of each
        near = np.abs(since[place] - asked) <= tolerance + _ROUNDINGS * asked if len(since) else asked < 0
        if not near.all():
            written = panel.clock.written([s], [last[s] + after[np.argmin(near)]])[0]
            of = f" of {data.group} {name!r}" if data.group in table.columns else ""
            raise DataError(
                f"{table.source} has no row{of} at {data.time or 'step'} {written}, which is forecast: add it"
            )
        made[s] = values[of_series][place]
        for j, column in np.argwhere(np.isnan(made[s]))[:1]:
            raise DataError(
                f"{table.at(read.places[of_series][place[j]], encoding.future[column])}: the value is missing, and is "
                "needed there: fill it in"
            )
    return made


def _since(moments: np.ndarray, origin: Any, encoding: Encoding) -> tuple[np.ndarray, float]:
    """Moments since an origin, float64 differences of exact numbers, and by how much they may be rounded: integers are
    exact, and what was computed with fractions is rounded as numbers of its size are."""
    if moments.dtype.kind == "i" and isinstance(origin, int | np.integer):
        return (moments - origin) / (1e9 if encoding.time_form == "date" else 1.0), 0.0
    start = Decimal(str(origin))
    since = np.array([float(Decimal(str(moment)) - start) for moment in moments])
    return since, _ROUNDINGS * abs(float(start))


def _by_steps(table: tables.Table, name: str, read: Steps) -> np.ndarray:
    """(N,) a column by steps. Raises DataError for two rows of one time with other values."""
    try:
        return merge(tables.numbers(table, name)[read.rows], read.step, len(read.first), np.nan).values
    except Clash as error:
        one, other = read.rows[error.first], read.rows[error.second]
        raise DataError(
            f"{table.place(other)} has the series and the time of {table.unit} {table.places[one]}, and other "
            f"values of {name}: leave one of these rows out"
        ) from None
