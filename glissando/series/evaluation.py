"""A run of series on what it has held out, or on another table."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from glissando.errors import ConfigError, NotFiniteError
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series.answers import Scored, answers, logits
from glissando.series.batches import Windows
from glissando.series.forecast import SeriesRun, require_absent
from glissando.series.measuring import Rolling, measure
from glissando.series.model import SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel
from glissando.series.task import prepare, windows_of
from glissando.storage import write_atomic


def evaluate(
    path: str | Path,
    file: str | None = None,
    out: str | None = None,
    pictures: str | Path | None = None,
    origins: int | None = None,
    horizon: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> Scored:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    Args:
        path: The run, or a checkpoint.
        file: Another table.
        out: CSV to write, see `write_answers`.
        pictures: Directory of the pictures of numbers; None: none are drawn.
        origins: Of a forecast: number of rolling origins of each series, from each of which all that follows is
            forecast, in the place of each step's forecast of the next.
        horizon: How far each origin forecasts, such as 24h; None: to the next origin.
        reading: Options of SeriesData by which the file is read, where they are not those of the run.

    Raises DataError for a file that does not fit, RunError for what is no run of series, or one that exists at `out`,
    NotFiniteError for answers that are not finite.
    """
    if out is not None:
        require_absent(Path(out))
    run = SeriesRun.open(path).reading(reading or {})
    data, encoding, model = run.data, run.encoding, run.model
    if origins is not None and encoding.task != "forecast":
        raise ConfigError(f"origins are of forecasts, and the task of {path} is {encoding.task}: leave origins out")
    if origins is not None and origins < 1:
        raise ConfigError(f"origins is {origins}: give the number of times of each series to forecast from, such as 5")
    if file is None:
        require_texts(data, Run.open(path), fix="--file FILE")
        prepared = prepare(data, encoding)
        held, panel, lines, trained = prepared.valid, prepared.panel, prepared.lines, prepared.train.steps
    else:
        panel = run.read(file)
        held, lines, trained = windows_of(panel, data, encoding, run.scales), panel.report, None
    for line in lines:
        print(line, file=sys.stderr)
    rolling = None
    if origins is not None:
        span = None if horizon is None else panel.clock.span(horizon)
        rolling = Rolling(origins, span, data.window)
    result = measure(model, held, panel, encoding, trained, None if pictures is None else Path(pictures), rolling)
    if not np.isfinite(result.loss):
        raise NotFiniteError(
            f"the predictions of {path} are not all finite: its training diverged, or the file has values far beyond "
            "those trained on. Train again with a lower training.optimizer.learning_rate"
        )
    if out is not None:
        write_answers(Path(out).expanduser(), model, held, panel, data, encoding)
    return result


def write_answers(
    out: Path, model: SeriesModel, held: Windows, panel: Panel, data: SeriesData, encoding: Encoding
) -> None:
    """A CSV of what was predicted: the user's names of series and time, the target, its value and the prediction.

    Raises RunError where there is a file.
    """
    require_absent(out)
    if encoding.classes:
        scores, labels, series, rows = logits(model, held)
        names = np.array(encoding.classes)
        value, predicted = names[labels.numpy()], names[scores.argmax(-1).numpy()]
        series_, rows_, channel = series.numpy(), rows.numpy(), np.zeros(len(rows), np.int64)
    else:
        found, rows_ = answers(model, held)
        value, predicted = found.target, model.distribution.mean(found.params).double().numpy()
        series_, channel = found.series, found.channel
    keys: dict[str, Any] = {} if data.group is None else {data.group: np.array(panel.names, object)[series_]}
    if len(channel) and (encoding.label == "step" or not encoding.classes):
        keys[data.time or "step"] = panel.clock.written(series_.tolist(), panel.times[rows_].tolist())
    keys |= {"target": np.array(encoding.target, object)[channel], "value": value, "predicted": predicted}
    text = io.StringIO()
    order = np.lexsort((channel, rows_))
    columns = [np.asarray(column, object)[order] for column in keys.values()]
    csv.writer(text, lineterminator="\n").writerows([list(keys), *zip(*columns, strict=True)])
    write_atomic(out, text.getvalue().encode())
