"""What happens to a series, one time after another, and what may come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import DataError, unknown_name
from glissando.events.batches import Steps
from glissando.events.log import NONE, EventLog
from glissando.events.sample import Ahead, ahead
from glissando.events.task import EventRun, moved
from glissando.series.live import Live, out_of_order, since

#: usual name of the column of series, where the table of the training has none
_SERIES = "series"


@torch.no_grad()
def observe(
    run: EventRun, live: Live | None, time: Any, events: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, float | None] = {}, facts: Mapping[str, Any] = {},
) -> tuple[Live, list[str]]:  # fmt: skip
    """Read what happens to a series at one time: a set of events, or none where prediction starts (data.start) -> what
    is kept from now on, and the kinds that training does not know.

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
    parts = [_inputs(run, _log(run, time, events, facts))] if events else []
    if values or not events:
        last = _inputs(run, blank)
        last["codes"][:] = NONE
        columns = run.encoding.values.columns if run.encoding.values else []
        for name, value in values.items():
            last["values"][..., columns.index(name)] = math.nan if value is None else float(value)
        parts.append(last)
    inputs = {
        name: part if name.startswith("static") else torch.cat([each[name] for each in parts], 1)
        for name, part in parts[0].items()
    }
    inputs["dt"][0, 0] = gap
    inputs = moved(inputs, run.model.time_scale.device)
    h, after = run.model(inputs.pop("codes"), run.model.init_state(1) if live is None else live.state, **inputs)
    assert after is not None
    known = {*run.encoding.kinds, *run.encoding.inputs}
    kinds = [str(event[run.data.kind]) for event in events if run.data.kind is not None]
    return Live(after, blank.clock.origins[0], h[0, -1]), [kind for kind in kinds if kind not in known]


def _inputs(run: EventRun, log: EventLog) -> dict[str, Any]:
    """What the model is called with for the steps of one series, (1, T, ...)."""
    steps, index = Steps.of(log, run.encoding, run.model), np.arange(len(log.times))[None]
    inputs = {name: part for name, part in steps.inputs_at(index, index >= 0).items() if name not in ("mask", "past")}
    if run.encoding.values is not None:
        inputs["values"] = torch.full((1, len(log.times), len(run.encoding.values.columns)), torch.nan)
    return inputs


def what_comes(run: EventRun, live: Live, horizon: Tensor, until: Any = None) -> Ahead:
    """Hazards, survival and the next event's kind at times `horizon` (J,) after `until`, up to which no event came;
    None: after the last one.

    Raises DataError for a time before the last observation.
    """
    after = 0.0 if until is None else since(_log(run, until, [{}], {}).clock, live.moment, run.data.time)
    assert live.features is not None
    return ahead(run.model, live.features[None], torch.tensor([after], dtype=torch.float64), horizon)


def _require_columns(
    run: EventRun, events: Sequence[Mapping[str, Any]], values: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Raise UnknownNameError, a DataError, for a column that the model does not read."""
    encoding, kind = run.encoding, run.data.kind
    channels = [] if encoding.values is None else encoding.values.columns
    read = {
        "an event": [*encoding.marks, *encoding.mark_categories, *([] if kind is None else [kind])],
        "values": channels, "facts": [*encoding.static, *encoding.static_categories],
    }  # fmt: skip
    for what, named in [*(("an event", event) for event in events), ("values", values), ("facts", facts)]:
        for name in named:
            if name not in read[what]:
                raise unknown_name(f"column of {what}", name, read[what])
    if kind is not None and any(event.get(kind) is None for event in events):
        raise DataError(f"an event has no {kind!r}: give each event its kind, one of {', '.join(encoding.kinds)}")


def _log(run: EventRun, time: Any, events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> EventLog:
    """Events of one time; one without a kind stands for a step without an event."""
    import pandas

    data, encoding = run.data, run.encoding
    group, columns = data.group or _SERIES, [*encoding.marks, *encoding.mark_categories, *encoding.static]
    row: dict[Any, Any] = dict.fromkeys([*columns, *encoding.static_categories])
    row[group], row[data.time] = "0", time
    row.update(facts)
    if data.kind is not None:
        row[data.kind] = encoding.kinds[0]
    rows = [{**row, **event} for event in events]
    plain = replace(data, path=None, group=group, start=None, end=None, static_path=None, values_path=None,
                    channel=None, value=None, columns=[], inputs=[])  # fmt: skip
    return replace(run, data=plain).read(pandas.DataFrame(rows))
