"""What each column of a table is for, by --data.* or by the encoding of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from glissando.errors import ConfigError, DataError, unknown_name
from glissando.series import tables
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Form, Task
from glissando.series.tables import Names, Table, counted, listed
from glissando.series.times import is_compact, time_form, zones

#: a column of texts that is read without being named has at most this many categories, unless they repeat
_CATEGORIES = 20


class Roles(NamedTuple):
    """What a table's columns are for, beside the encoding.

    facts     the second table; None without data.static_path
    target    columns to predict; none of a forecast, or of a table without them
    channels  of a long table: the channel of each row
    encoding  without the categories and classes, which are counted later
    report    lines for the user
    """

    facts: Table | None
    target: list[str]
    channels: Names | None
    encoding: Encoding
    report: list[str]


#: an option -> one that it needs
_NEEDS = (
    ("channel", "value"), ("value", "channel"), ("channel", "time"), ("time_format", "time"), ("time_unit", "time"),
    ("static_path", "group"), ("label", "target"),
)  # fmt: skip


def roles(data: SeriesData, table: Table, encoding: Encoding | None) -> Roles:
    """Raises UnknownNameError for a column that is not there, ConfigError for options that contradict each other."""
    _require_consistent(data)
    facts = (
        None if data.static_path is None else tables.read_table(data.static_path, data.delimiter, "data.static_path")
    )
    report: list[str] = []
    for option in ("group", "time", "channel", "value"):
        if (name := getattr(data, option)) is not None:
            _require(table, None, [name], f"data.{option}")
    if facts is not None:
        _require(facts, None, [str(data.group)], "data.group")
    form, unit = _clock(data, table, encoding, report)
    channels = None if data.channel is None else tables.names(table, data.channel, "channel")
    if encoding is not None:
        return _of_run(data, table, facts, channels, encoding, form, report)
    task = _task(data, table, facts, channels)
    target = data.target if task != "forecast" else []
    _require(table, facts, data.static, "data.static")
    _require(table, facts, target, "data.target")
    _require(table, None, data.future, "data.future")
    numeric, categorical = _channels(data, table, channels, target, task, report)
    categories = [
        name
        for name in data.static
        if name in data.categorical or not home(table, facts, name).columns[name].is_numeric
    ]
    static = [name for name in data.static if name not in categories]
    known = {*numeric, *categorical, *data.static}
    if strange := [name for name in data.categorical if name not in known]:
        raise unknown_name("column of data.categorical", strange[0], known)
    forecast = data.target or numeric
    if task == "forecast" and (texts := [name for name in forecast if name not in numeric]):
        raise ConfigError(
            f"{texts[0]} is no numeric channel, and a forecast is of numbers: leave it out of data.target"
        )
    fixed = Encoding(
        columns=numeric, categorical={name: [] for name in categorical}, static=static,
        static_categorical={name: [] for name in categories}, future=data.future,
        target=forecast if task == "forecast" else target, task=task, time_form=form, unit=unit,
    )  # fmt: skip
    return Roles(facts, target, channels, fixed, report)


def _require_consistent(data: SeriesData) -> None:
    for option, needed in _NEEDS:
        if getattr(data, option) is not None and not getattr(data, needed):
            raise ConfigError(
                f"data.{option} needs data.{needed}, which is not named: name that column, or leave data.{option} out"
            )
    if data.static_path is not None and not data.static and not data.target:
        raise ConfigError("data.static_path is given and data.static names none of its columns: name those to read")
    if data.task in ("regression", "classification") and not data.target:
        raise ConfigError(
            f"data.task {data.task} needs data.target, the column to predict; without one values are forecast"
        )
    named = [
        *(n for n in (data.group, data.time, data.channel, data.value) if n is not None),
        *data.static,
        *data.future,
    ]
    if data.task != "forecast" and data.channel is None:
        named += data.target
    if twice := [name for name in named if named.count(name) > 1]:
        raise ConfigError(f"the column {twice[0]} is named by two options of data: leave it out of one")
    if mixed := [name for name in data.columns if name in named]:
        raise ConfigError(f"{mixed[0]} is in data.columns and has another role too: leave it out of one")


def _known(table: Table, facts: Table | None) -> tuple[str, dict[str, tables.Column]]:
    """The tables' name, and the columns of both."""
    if facts is None:
        return table.source, table.columns
    return f"{table.source} or {facts.source}", {**table.columns, **facts.columns}


def _require(table: Table, facts: Table | None, columns: Iterable[str], option: str) -> None:
    where, known = _known(table, facts)
    for name in columns:
        if name not in known:
            raise unknown_name(f"column of {where} ({option})", name, known)


def home(table: Table, facts: Table | None, name: str) -> Table:
    """The table that has a column: the second one before the first."""
    return table if facts is None or name not in facts.columns else facts


def _clock(data: SeriesData, table: Table, encoding: Encoding | None, report: list[str]) -> tuple[Form, str]:
    """The form of the times and their unit."""
    if data.time is None:
        return "row", "row"
    form = encoding.time_form if encoding is not None else data.time_format or time_form(table, data.time)
    if form == "date":
        if data.time_unit not in (None, "s"):
            raise ConfigError(f"data.time_unit is {data.time_unit}, and the times {data.time} are dates: leave it out")
        first = table.columns[data.time].values[0]
        if is_compact(first):
            report.append(
                f"the times {data.time}, such as {first}, are read as dates; if they are numbers, give "
                "--data.time_format number"
            )
        if named := zones(table, data.time):
            unnamed = table.height - named
            others = f"; {unnamed:,} without a time zone, read as UTC" if unnamed else ""
            report.append(f"converted to UTC: {counted(named, 'time')} {data.time} with a time zone{others}")
        return form, "s"
    return form, (encoding.unit if encoding is not None else data.time_unit or "s")


def _task(data: SeriesData, table: Table, facts: Table | None, channels: Names | None) -> Task:
    if data.task is not None:
        task: Task = data.task
    elif not data.target or (channels is not None and data.target[0] in channels.names):
        task = "forecast"
    else:
        _require(table, facts, data.target, "data.target")
        numeric = all(home(table, facts, name).columns[name].is_numeric for name in data.target)
        task = "regression" if numeric else "classification"
    if task == "classification" and len(data.target) > 1:
        raise ConfigError(f"data.task classification is of one target, got {', '.join(data.target)}: name one")
    return task


def _channels(
    data: SeriesData, table: Table, channels: Names | None, target: Sequence[str], task: str, report: list[str]
) -> tuple[list[str], list[str]]:
    """The numeric and the categorical channels."""
    if channels is not None:
        return _long_channels(data, table, channels)
    wanted = [*data.columns, *(data.target if task == "forecast" and data.columns else ())]
    _require(table, None, wanted, "data.columns")
    used = {data.group, data.time, *data.static, *data.future, *target}
    chosen = list(dict.fromkeys(wanted)) or [name for name in table.columns if name not in used]
    chosen += [name for name in data.categorical if name in table.columns and name not in {*chosen, *used}]
    numeric, categorical = [], []
    for name in chosen:
        column, named = table.columns[name], name in wanted or name in data.categorical
        why = None if named else _left_out(name, column)
        if why is not None:
            report.append(f"the column {name!r} is left out: {why}")
        elif column.values.dtype.kind in "mM":
            raise DataError(f"{table.source}, column {name!r} holds times: leave it out of data.columns")
        elif name in data.categorical or not column.is_numeric:
            categorical.append(name)
        else:
            numeric.append(name)
    if not numeric and not categorical:
        raise ConfigError(
            f"{table.source} has no column to read but {', '.join(table.columns)}: name some in data.columns"
        )
    return numeric, categorical


def _left_out(name: str, column: tables.Column) -> str | None:
    """Why a column that no option names is not read."""
    if not name or name.startswith("Unnamed: "):
        use = f"name it: --data.columns {name},..." if name else "give it a name"
        return f"it is an index that pandas wrote; to use it, {use}"
    if column.missing.all():
        return "it has no value"
    if column.values.dtype.kind in "mM":
        return "it holds times, and data.time names others"
    present = int((~column.missing).sum())
    if not column.is_numeric and len(column.uniques) > max(_CATEGORIES, present // 2):
        return (
            f"it holds {len(column.uniques):,} different texts in {present:,} rows; to read them as categories, give "
            f"--data.categorical {name}"
        )
    return None


def _long_channels(data: SeriesData, table: Table, channels: Names) -> tuple[list[str], list[str]]:
    chosen = list(dict.fromkeys([*data.columns, *(data.target if data.columns else ())])) or channels.names
    for name in chosen:
        if name not in channels.names:
            raise unknown_name(f"channel of {table.source}, column {data.channel!r}", name, channels.names)
    value, count = table.columns[str(data.value)], len(channels.names)
    of_numbers = np.bincount(channels.codes[~value.missing & ~np.isnan(value.numbers)], minlength=count)
    of_all = np.bincount(channels.codes[~value.missing], minlength=count)
    texts = {name for name, some, every in zip(channels.names, of_numbers, of_all, strict=True) if some < 0.5 * every}
    texts |= {name for name in data.categorical if name in channels.names}
    return [name for name in chosen if name not in texts], [name for name in chosen if name in texts]


def _of_run(
    data: SeriesData, table: Table, facts: Table | None, channels: Names | None, encoding: Encoding, form: str,
    report: list[str],
) -> Roles:  # fmt: skip
    """The roles that a run's encoding gives. Raises DataError for a column that the table lacks."""
    where, columns = _known(table, facts)
    of_steps = [*encoding.future, *((*encoding.columns, *encoding.categorical) if channels is None else ())]
    for name in [*of_steps, *encoding.static, *encoding.static_categorical]:
        if name not in (table.columns if name in of_steps else columns):
            raise DataError(
                f"there is no column {name!r} in {where}, and the model reads it: add it, blank where nothing is known"
            )
    target = [name for name in encoding.target if name in columns] if encoding.task != "forecast" else []
    if encoding.task != "forecast" and len(target) < len(encoding.target):
        target = []
        report.append(f"there is no column {encoding.target[0]!r}: nothing is scored")
    if channels is not None:
        known = {*encoding.columns, *encoding.categorical}
        if other := [name for name in channels.names if name not in known]:
            rows = int(np.isin(channels.codes, [channels.names.index(name) for name in other]).sum())
            report.append(f"left out: {counted(rows, 'row')} of channels that the model does not read, {listed(other)}")
    return Roles(facts, target, channels, encoding, report)
