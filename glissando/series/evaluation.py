"""A run of series on what it has held out, or on another table."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from glissando.config import from_dict
from glissando.errors import NotFiniteError, RunError
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series.answers import Scored, answers, logits, scored
from glissando.series.batches import Windows, require_near, scales_of
from glissando.series.model import SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel
from glissando.series.reading import read_panel
from glissando.series.task import prepare, windows_of
from glissando.storage import write_atomic


def evaluate(path: str | Path, file: str | None = None, out: str | None = None) -> Scored:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    out  CSV to write, see `write_answers`

    Raises DataError for a file that does not fit, RunError for what is no run of series, or one that exists at `out`,
    NotFiniteError for answers that are not finite.
    """
    run = Run.open(path)
    config, model = run.read_config(kind="series"), SeriesModel.load(path)
    if "data" not in config:
        raise RunError(f"{path} is a model that was saved without data: it can be loaded, and not evaluated here")
    data, encoding = from_dict(SeriesData, config["data"], "data"), from_dict(Encoding, config["encoding"], "encoding")
    if file is None:
        require_texts(data, run, fix="--file FILE")
        prepared = prepare(data, encoding)
        held, panel, lines = prepared.valid, prepared.panel, prepared.lines
    else:
        panel, _ = read_panel(data, file, encoding)
        found = scales_of(model)
        require_near(panel, encoding, found)
        held, lines = windows_of(panel, data, encoding, found), panel.report
    for line in lines:
        print(line, file=sys.stderr)
    result = scored(model, held, encoding)
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
    if out.exists():
        raise RunError(f"{out} exists; nothing is overwritten: name another file")
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
