"""What happens to a series, one time after another, and what may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.errors import DataError, unknown_name
from glissando.events.batches import Steps
from glissando.events.log import NONE, EventLog
from glissando.events.sample import Ahead, ahead
from glissando.events.task import EventRun, moved
from glissando.series.live import Live, out_of_order, since

#: usual names of the columns of series and kinds, where the table of the training has none
_SERIES = "series"


class Read(NamedTuple):
    """What `observe` has read: what is kept from now on, and the kinds that training does not know."""

    live: Live
    unknown: list[str]


@torch.no_grad()
def observe(
    run: EventRun, live: Live | None, time: Any, events: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, float | None] = {}, facts: Mapping[str, Any] = {},
) -> Read:  # fmt: skip
    """Read what happens to a series at one time: a set of events, or none where prediction starts (data.start).

    Args:
        run: The trained model.
        live: What is kept of the series; None: it begins.
        time: As in the table of the training.
        events: Of each the kind and the marks, by the names of their columns; a mark that is left out is missing.
        values: Measured values, by channel, of a model that reads them (data.values_path).
        facts: The static columns; those that are left out are missing.

    Raises:
        DataError: A kind is missing, a column is none of the model's, or the time is not after the one before; without
            events and values, before it.
    """
    _require_columns(run, events, values, facts)
    blank = _log(run, time, [{}], facts)
    gap = 0.0 if live is None else since(blank.clock, live.moment, run.data.time)
    if live is not None and (events or values) and not gap:
        raise out_of_order(blank.clock, live.moment, run.data.time)
    parts = [_inputs(run, _log(run, time, [dict(event) for event in events], facts))] if events else []
    if values or not events:
        last = _inputs(run, blank)
        last["codes"][:] = NONE
        for name, value in values.items():
            assert run.encoding.values is not None
            last["values"][..., run.encoding.values.columns.index(name)] = torch.nan if value is None else float(value)
        parts.append(last)
    facing = {"static", "static_codes"}
    inputs = {
        name: part if name in facing else torch.cat([each[name] for each in parts], 1)
        for name, part in parts[0].items()
    }
    inputs["dt"][0, 0] = gap
    like = run.model.time_scale
    state = run.model.init_state(1) if live is None else live.state
    h, after = run.model(inputs.pop("codes").to(like.device), state, **{n: moved(x, like) for n, x in inputs.items()})
    assert after is not None
    known = {*run.encoding.kinds, *run.encoding.inputs}
    kinds = [str(event[run.data.kind]) for event in events if run.data.kind is not None]
    return Read(Live(after, blank.clock.origins[0], h[0, -1]), [kind for kind in kinds if kind not in known])


def _inputs(run: EventRun, log: EventLog) -> dict[str, Any]:
    """What the model is called with for the steps of one series, (1, T, ...)."""
    steps, index = Steps.of(log, run.encoding, run.scales), np.arange(len(log.times))[None]
    inputs = {name: part for name, part in steps.inputs_at(index, index >= 0).items() if name not in ("mask", "past")}
    if run.encoding.values is not None:
        inputs["values"] = torch.full((1, len(log.times), len(run.encoding.values.columns)), torch.nan)
    return inputs


def what_comes(run: EventRun, live: Live, horizon: Tensor, until: Any = None) -> Ahead:
    """Hazards, survival and the next event's kind at times `horizon` (J,) after `until`, up to which no event came;
    None: after the last one.

    Raises DataError for a time before the last observation.
    """
    after = 0.0
    if until is not None:
        after = since(_log(run, until, [{}], {}).clock, live.moment, run.data.time)
    assert live.features is not None
    return ahead(run.model, live.features[None], torch.tensor([after], dtype=torch.float64), horizon)


def _require_columns(
    run: EventRun, events: Sequence[Mapping[str, Any]], values: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Raise UnknownNameError, a DataError, for a column that the model does not read."""
    encoding, kind = run.encoding, [] if run.data.kind is None else [run.data.kind]
    marks = [*kind, *encoding.marks, *encoding.mark_categories]
    channels = [] if encoding.values is None else encoding.values.columns
    static = [*encoding.static, *encoding.static_categories]
    for what, names, read in (
        ("an event", {n for e in events for n in e}, marks),
        ("values", values, channels),
        ("facts", facts, static),
    ):
        for name in names:
            if name not in read:
                raise unknown_name(f"column of {what}", name, read)
    for event in events:
        if kind and event.get(kind[0]) is None:
            raise DataError(
                f"an event has no {kind[0]!r}: give each event its kind, one of {', '.join(encoding.kinds)}"
            )


def _log(run: EventRun, time: Any, events: list[dict[str, Any]], facts: Mapping[str, Any]) -> EventLog:
    """Events of one time; one without a kind stands for a step without an event."""
    import pandas

    data, encoding = run.data, run.encoding
    group, marks = data.group or _SERIES, [*encoding.marks, *encoding.mark_categories]
    static = [*encoding.static, *encoding.static_categories]
    none = len(events) == 1 and not events[0]
    rows = []
    for event in events:
        row: dict[str, Any] = {group: "0", str(data.time): time, **dict.fromkeys(marks), **dict.fromkeys(static)}
        if data.kind is not None:
            row[data.kind] = encoding.kinds[0] if none else event.get(data.kind)
        rows.append(row | event | dict(facts))
    plain = replace(data, path=None, group=group, start=None, end=None, static_path=None, values_path=None,
                    channel=None, value=None, columns=[], inputs=[])  # fmt: skip
    return replace(run, data=plain).read(pandas.DataFrame(rows))
