"""A run of series on what it has held out, or on another table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from glissando.errors import ConfigError
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series.answers import answered, logits, measure
from glissando.series.asking import rolling_answers
from glissando.series.batches import Windows
from glissando.series.forecast import SeriesRun, answer_table, placed, require_absent, require_finite, write_table
from glissando.series.panel import Panel
from glissando.series.scores import Answers, Score
from glissando.series.task import prepare, windows_of


def evaluate(
    path: str | Path,
    file: str | None = None,
    out: str | None = None,
    pictures: str | Path | None = None,
    origins: int | None = None,
    horizon: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> Score:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    Args:
        path: The run, or a checkpoint.
        file: Another table.
        out: CSV to write, with a row for each answer that is scored.
        pictures: Directory of the pictures of numbers; None: none are drawn.
        origins: Of a forecast: number of rolling origins of each series, from each of which all that follows is
            forecast, in the place of each step's forecast of the next.
        horizon: How far each origin forecasts, such as 24h; None: to the next origin.
        reading: Options of SeriesData by which the file is read, where they are not those of the run.

    Raises DataError for a file that does not fit, RunError for what is no run of series, or one that exists at `out`,
    NotFiniteError for answers that are not finite.
    """
    if out is not None:
        require_absent(out)
    run = SeriesRun.open(path).reading(reading or {})
    data, encoding, model = run.data, run.encoding, run.model
    span = None
    if origins is not None:
        if encoding.task != "forecast":
            raise ConfigError(f"origins are of forecasts, and the task of {path} is {encoding.task}: leave origins out")
        if origins < 1:
            raise ConfigError(
                f"origins is {origins}: give the number of times of each series to forecast from, such as 5"
            )
        span = None if horizon is None else run.clock().span(horizon)
    if file is None:
        require_texts(data, Run.open(path), fix="--file FILE, with its --data.static_path FILE if it has one")
        prepared = prepare(data, encoding)
        windows, panel, lines, trained = prepared.valid, prepared.panel, prepared.lines, prepared.train.steps
    else:
        panel = run.read(file)
        windows, lines, trained = windows_of(panel, data, encoding, run.scales), panel.report, None
    for line in lines:
        print(line, file=sys.stderr)
    forecast = None
    if origins is not None:
        forecast = rolling_answers(model, panel, windows.steps, origins, data.window, span)
    elif not encoding.classes:
        forecast = answered(model, windows, panel)
    result = measure(model, windows, panel, encoding, trained, None if pictures is None else Path(pictures), forecast)
    require_finite(result.loss, f"the predictions of {path}")
    if out is not None:
        write_table(_table(run, windows, panel, forecast, origins is not None), out, digits=None)
    return result


def _table(run: SeriesRun, windows: Windows, panel: Panel, forecast: Answers | None, rolling: bool) -> Any:
    """A frame with a row for each answer, or each label of a class: the user's names of series and time, the target,
    its value and the prediction; from rolling origins, with the time of the origin."""
    encoding, parts = run.encoding, dict[str, Any]()
    if forecast is None:
        scores, labels, series, row = (part.numpy() for part in logits(run.model, windows))
        names = np.array(encoding.classes, object)
        parts |= {"target": encoding.target[0], "value": names[labels], "predicted": names[scores.argmax(-1)]}
    else:
        series, row = forecast.series, forecast.row
        if rolling:
            parts["origin"] = panel.clock.written(series, panel.times[row] - forecast.horizon)
        parts |= {"target": np.array(encoding.target, object)[forecast.channel], "value": forecast.target}
        parts["predicted"] = run.model.distribution.mean(forecast.params).numpy()
    times = None if windows.whole else panel.times[row]
    table = answer_table([*placed(run, panel, series, times), *((None, name, cells) for name, cells in parts.items())])
    return table.iloc[np.argsort(row, kind="stable")]
