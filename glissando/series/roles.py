"""What each column of a table is for, by --data.* or by the encoding of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from glissando.errors import ConfigError, DataError, unknown_name
from glissando.series import tables
from glissando.series.columns import clock_of, homes_of, require_columns, require_options, require_read
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Task
from glissando.series.tables import Column, Names, Table

#: a column of texts that is read without being named has at most this many categories, unless they repeat
_CATEGORIES = 20


class Roles(NamedTuple):
    """What a table's columns are for, beside the encoding.

    facts     the second table; None without data.static_path
    homes     column -> the table that has it: the second one before the first
    target    columns to predict; none of a forecast, or of a table without them
    channels  of a long table: the channel of each row
    encoding  without the categories and classes, which are counted later
    report    lines for the user
    """

    facts: Table | None
    homes: dict[str, Table]
    target: list[str]
    channels: Names | None
    encoding: Encoding
    report: list[str]

    def column(self, name: str) -> Column:
        return self.homes[name].columns[name]


#: an option -> one that it needs
_NEEDS = (
    ("channel", "value"), ("value", "channel"), ("channel", "time"), ("time_format", "time"), ("time_unit", "time"),
    ("static_path", "group"), ("label", "target"),
)  # fmt: skip


def roles(data: SeriesData, table: Table, encoding: Encoding | None) -> Roles:
    """Raises UnknownNameError for a column that is not there, ConfigError for options that contradict each other."""
    _require_consistent(data)
    facts = None if data.static_path is None else tables.read_table(data.static_path, data, "data.static_path")
    for option in ("group", "time", "channel", "value"):
        require_columns(table.source, table.columns, [getattr(data, option)], option)
    homes, where = homes_of(table, facts), table.source
    if facts is not None:
        require_columns(facts.source, facts.columns, [data.group], "group")
        where = f"{where} or {facts.source}"
    report: list[str] = []
    form, unit = clock_of(data, table, encoding, report)
    channels = None if data.channel is None else tables.names(table, data.channel, "channel")
    assigned = Roles(facts, homes, data.target, channels, encoding or Encoding(time_form=form, unit=unit), report)
    if encoding is not None:
        return _of_run(assigned, table, where)
    require_columns(where, homes, data.static, "static")
    require_columns(table.source, table.columns, data.future, "future")
    if channels is None or not data.target or data.target[0] not in channels.names:
        require_columns(where, homes, data.target, "target")
    return _of_table(data, table, assigned)


def _of_table(data: SeriesData, table: Table, assigned: Roles) -> Roles:
    """The roles that the options and the values give."""
    task = _task(data, assigned)
    target = data.target if task != "forecast" else []
    numeric, categorical = _channels(data, table, assigned.channels, target, task, assigned.report)
    categories = [n for n in data.static if n in data.categorical or not assigned.column(n).is_numeric]
    known = {*numeric, *categorical, *data.static}
    if strange := [name for name in data.categorical if name not in known]:
        raise unknown_name("column of data.categorical", strange[0], known)
    forecast = data.target or numeric
    if task == "forecast" and (texts := [name for name in forecast if name not in numeric]):
        raise ConfigError(
            f"{texts[0]} is no numeric channel, and a forecast is of numbers: leave it out of data.target"
        )
    fixed = replace(
        assigned.encoding, columns=numeric, categorical={name: [] for name in categorical},
        static=[name for name in data.static if name not in categories],
        static_categorical={name: [] for name in categories}, future=data.future,
        target=forecast if task == "forecast" else target, task=task,
    )  # fmt: skip
    return assigned._replace(target=target, encoding=fixed)


def _of_run(assigned: Roles, table: Table, where: str) -> Roles:
    """The roles that a run's encoding gives. Raises DataError for a column that the table lacks."""
    encoding = assigned.encoding
    of_steps = [*encoding.future, *((*encoding.columns, *encoding.categorical) if assigned.channels is None else ())]
    require_read(where, table.columns, of_steps)
    require_read(where, assigned.homes, [*encoding.static, *encoding.static_categorical])
    target = encoding.target if encoding.task != "forecast" else []
    if absent := [name for name in target if name not in assigned.homes]:
        assigned.report.append(f"there is no column {absent[0]!r}: nothing is scored")
        target = []
    return assigned._replace(target=target)


def _require_consistent(data: SeriesData) -> None:
    require_options(vars(data), _NEEDS)
    if data.static_path is not None and not data.static and not data.target:
        raise ConfigError("data.static_path is given and data.static names none of its columns: name those to read")
    if data.task in ("regression", "classification") and not data.target:
        raise ConfigError(
            f"data.task {data.task} needs data.target, the column to predict; without one values are forecast"
        )
    named = [n for n in (data.group, data.time, data.channel, data.value) if n is not None] + data.static + data.future
    if data.task != "forecast" and data.channel is None:
        named += data.target
    if twice := [name for name in named if named.count(name) > 1]:
        raise ConfigError(f"the column {twice[0]} is named by two options of data: leave it out of one")
    if mixed := [name for name in data.columns if name in named]:
        raise ConfigError(f"{mixed[0]} is in data.columns and has another role too: leave it out of one")


def _task(data: SeriesData, assigned: Roles) -> Task:
    if data.task is not None:
        task: Task = data.task
    elif not data.target or (assigned.channels is not None and data.target[0] in assigned.channels.names):
        task = "forecast"
    else:
        numeric = all(assigned.column(name).is_numeric for name in data.target)
        task = "regression" if numeric else "classification"
    if task == "classification" and len(data.target) > 1:
        raise ConfigError(f"data.task classification is of one target, got {', '.join(data.target)}: name one")
    return task


def _channels(
    data: SeriesData, table: Table, channels: Names | None, target: Sequence[str], task: str, report: list[str]
) -> tuple[list[str], list[str]]:
    """The numeric and the categorical channels."""
    if channels is not None:
        return _long_channels(data, table, channels, data.target if task == "forecast" else ())
    wanted = [*data.columns, *(data.target if task == "forecast" and data.columns else ())]
    require_columns(table.source, table.columns, wanted, "columns")
    used = {data.group, data.time, *data.static, *data.future, *target}
    chosen = list(dict.fromkeys(wanted)) or [name for name in table.columns if name not in used]
    chosen += [name for name in data.categorical if name in table.columns and name not in {*chosen, *used}]
    numeric, categorical = [], []
    for name in chosen:
        column, named = table.columns[name], name in wanted or name in data.categorical
        why = None if named else _left_out(name, column)
        if why is not None:
            report.append(f"the column {name!r} is left out: {why}")
        elif name not in data.categorical and (separated := column.separated):
            raise _separated(table, name, *separated)
        elif column.values.dtype.kind in "mM":
            raise DataError(f"{table.source}, column {name!r} holds times: leave it out of data.columns")
        elif name in data.categorical or not column.is_numeric:
            categorical.append(name)
        else:
            numeric.append(name)
    if not numeric and not categorical:
        why = "; ".join(line for line in report if "is left out" in line) or f"it has {', '.join(table.columns)} alone"
        raise ConfigError(f"{table.source} has no column to read: {why}. Name some in data.columns")
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
    if not column.is_numeric and column.separated is None and len(column.uniques) > max(_CATEGORIES, present // 2):
        return (
            f"it holds {len(column.uniques):,} different texts in {present:,} rows; to read them as categories, give "
            f"--data.categorical {shlex.quote(name)}"
        )
    return None


def _separated(table: Table, name: str, sign: str, example: str) -> DataError:
    """The error for numbers with another decimal sign, or with digits in groups."""
    return DataError(
        f"{table.source}, column {name!r} holds numbers such as {example}: give --data.decimal {sign} to read that as "
        f"{float(tables.as_number(example, sign)):.10g}, or, if they are categories, --data.categorical "
        f"{shlex.quote(name)}"
    )


def _long_channels(
    data: SeriesData, table: Table, channels: Names, forecast: Sequence[str]
) -> tuple[list[str], list[str]]:
    chosen = list(dict.fromkeys([*data.columns, *(forecast if data.columns else ())])) or channels.names
    for name in chosen:
        if name not in channels.names:
            raise unknown_name(f"channel of {table.source}, column {data.channel!r}", name, channels.names)
    value, count = table.columns[str(data.value)], len(channels.names)
    of_numbers = np.bincount(channels.codes[~value.missing & ~np.isnan(value.numbers)], minlength=count)
    of_all = np.bincount(channels.codes[~value.missing], minlength=count)
    texts = {name for name, some, every in zip(channels.names, of_numbers, of_all, strict=True) if some < 0.5 * every}
    texts |= {name for name in data.categorical if name in channels.names}
    return [name for name in chosen if name not in texts], [name for name in chosen if name in texts]
