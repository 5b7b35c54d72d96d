"""What a model of events answers about the windows of a log, what came, and what the truth would have answered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import DataError
from glissando.events.baselines import Predicted
from glissando.events.batches import Steps, Windows
from glissando.events.example import TRUTH_END, TRUTH_KIND, TRUTH_TIME
from glissando.events.log import EventLog
from glissando.events.model import EventModel
from glissando.events.task import features
from glissando.series.batches import Floats
from glissando.series.tables import Table


@torch.no_grad()
def predicted(model: EventModel, windows: Windows) -> Predicted:
    """What the model says of each scored step, in their order. Raises DataError where no event is scored."""
    if not windows.steps.after.events:
        raise DataError(
            "there is nothing to score: no event of a kind that the model predicts comes after the start of "
            "prediction; give a log with such events"
        )
    model.eval()
    index, parts = [], list[tuple[Tensor, ...]]()
    for batch in windows.scoring():
        h, targets, _ = features(model, batch)
        params, scale = model.waits(h), model.time_scale.double()
        likely, head, resolution = model.log_likelihood(h, targets), model.head, model.config.resolution
        comes = (targets.kind >= 0) & (targets.tie != 1)
        times = targets.wait, targets.within, (targets.wait - resolution).clamp_min(0)
        wait, within, begun = ((each / scale).to(params[0].dtype) for each in times)
        high, before = head.passed(params, wait), head.passed(params, within)
        low = torch.where(comes, torch.maximum(head.passed(params, begun), before), high)
        kinds = head.log_kinds(params, torch.where(wait > 0, wait, 1.0), resolution / float(scale))
        median = head.quantile(params, 0.5, targets.within / scale) * scale
        if model.tie is not None:
            none, ties = model.log_ties(h, targets.last)
            kinds = torch.where((targets.tie == 1).unsqueeze(-1), ties, kinds)
            median = torch.where(none < -math.log(2), 0.0, median)
        rescaled = (torch.where(wait > 0, each - before, 0.0) for each in (low, high))
        parts.append((likely.time, likely.kind, kinds, *rescaled, median))
        index.append(batch.index)
    order = torch.cat(index).argsort()
    return Predicted(*(torch.cat(part).double().cpu()[order].numpy() for part in zip(*parts, strict=True)))


def truth_of(table: Table, log: EventLog, steps: Steps) -> tuple[Predicted | None, list[str]]:
    """The log-likelihood of the truth where the table has it, as that of `glissando events example`, and a line that
    says why there is none although it has."""
    names = (TRUTH_TIME, TRUTH_KIND, TRUTH_END)
    if not table.columns.keys() >= set(names):
        return None, []
    index = np.flatnonzero(steps.after.is_scored)
    after = steps.after.at(index)
    if (after.within > 0).any():
        return None, [
            f"no truth: {TRUTH_TIME} is of whole waits, and some begin before the start of prediction; hold whole "
            "series out (--data.split series)"
        ]
    row = np.full(len(index), -1)
    event, end = after.is_event, after.end
    row[event], row[end] = _rows(table, log.rows[index[event] + 1]), _rows(table, log.rows[index[end]])
    columns = {name: table.columns[name].numbers for name in names}
    time = np.where(event, columns[TRUTH_TIME][row], np.where(end, columns[TRUTH_END][row], 0.0))
    kind = np.where(event, columns[TRUTH_KIND][row], 0.0)
    if (row[event | end] < 0).any() or not np.isfinite(time + kind).all():
        return None, [f"no truth: a series without an event, or an event, has no {TRUTH_TIME}, {TRUTH_KIND}"]
    return Predicted(time, kind), []


def _rows(table: Table, places: Any) -> Floats:
    """The rows of the table at these places; -1 of a place 0, which is no row."""
    return np.where(places > 0, np.searchsorted(table.places, places), -1)
