"""A run of events on what it has held out, or on another table: what it answers, what came, and what the truth would
have answered."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import ConfigError, DataError, NotFiniteError, RunError
from glissando.events.baselines import Floats, Predicted
from glissando.events.batches import Steps, Windows
from glissando.events.log import EventLog
from glissando.events.model import EventModel
from glissando.events.processes import TRUTH_END, TRUTH_KIND, TRUTH_TIME
from glissando.events.scores import Score, score
from glissando.events.task import EventRun, features, prepare
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series.tables import Table, read_table


def evaluate(
    path: str | Path,
    file: str | None = None,
    reading: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
) -> Score:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    The predictors without a network are those of the run's training table; where that is gone, a `file` is scored
    without them, and a line says so.

    Args:
        path: The run, or a checkpoint.
        file: Another table.
        reading: Options of EventsData by which the file is read, where they are not those of the run.
        pictures: Directory of the pictures; None: none are drawn.

    Raises DataError for a file that does not fit, RunError for what is no run of events, NotFiniteError for answers
    that are not finite.
    """
    trained = EventRun.open(path)
    run, train, lines = trained.reading(reading or {}), None, list[str]()
    if file is None:
        require_texts(run.data, Run.open(path), fix="--file FILE")
        prepared = prepare(run.data, run.encoding)
        windows, log, lines, train = prepared.valid, prepared.valid_log, prepared.lines, prepared.train
        source = run.data.valid_path or run.data.path
    else:
        log, source = run.read(file), file
        windows, lines = run.windows(log), [*log.report]
        try:
            require_texts(trained.data, Run.open(path))
            train = prepare(trained.data, trained.encoding).train
        except (ConfigError, DataError, RunError) as error:
            lines.append(f"without predictors that need no network, as the training table cannot be read: {error}")
    prediction = predicted(run.model, windows)
    if not np.isfinite(prediction.time.sum() + prediction.kind.sum()):
        raise NotFiniteError(
            f"the likelihoods of {path} are not all finite: its training diverged, or the file has times far beyond "
            "those trained on. Train again with a lower training.optimizer.learning_rate"
        )
    truth, notes = truth_of(read_table(str(source), run.data), log, windows.steps)
    for line in (*lines, *notes):
        print(line, file=sys.stderr)
    fitted = None if train is None else train.steps.after.scored()
    result = score(windows.steps.after.scored(), prediction, fitted, log.clock.unit, truth)
    if pictures is not None:
        from glissando.events.pictures import draw  # matplotlib takes a second to import

        draw(run, windows, log, prediction, Path(pictures))
    return result


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
