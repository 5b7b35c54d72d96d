"""A run of events on what it has held out, or on another table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from glissando.errors import ConfigError, DataError, NotFiniteError, RunError
from glissando.events.answers import predicted, truth_of
from glissando.events.scores import Score, score
from glissando.events.task import EventRun, prepare
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series.tables import read_table


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
    came = windows.steps.after.scored()
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
    result = score(came, prediction, fitted, log.clock.unit, truth)
    if pictures is not None:
        from glissando.events.pictures import draw  # matplotlib takes a second to import

        draw(run.model, windows, log, run.encoding, came, prediction, Path(pictures))
    return result
