"""What a series model predicts, and how far it is from the values beside what is predicted without a model."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.config import from_dict, hints_of
from glissando.data.series import (
    Scales,
    SeriesData,
    Windows,
    described,
    prepare,
    read_series,
    require_near,
    resolved,
    windows,
)
from glissando.data.tables import read_table
from glissando.errors import NotFiniteError, RunError
from glissando.run_files import require_texts
from glissando.runs import Run
from glissando.series import SeriesModel
from glissando.storage import write_atomic

#: windows that are predicted at once
BATCH = 64


def predict(
    model: SeriesModel, batch: Windows, data: SeriesData, state: Any = None, compiled: bool = False
) -> tuple[Tensor, Any]:
    """y (B, L, O) of a batch on the model's device, and the state after it, None where none was given."""
    like = model.output_scale
    dt = None if data.time is None else batch.dt.to(like)
    mask = None if bool(batch.mask.all()) else batch.mask.to(like.device)
    run = torch.compile(_run, dynamic=False) if compiled else _run
    return run(model, batch.x.to(like), state, dt, mask)


def _run(model: SeriesModel, x: Tensor, state: Any, dt: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Any]:
    return model(x, state, dt=dt, mask=mask)


def loss_of(model: SeriesModel, y: Tensor, batch: Windows) -> Tensor:
    """The sum over real steps of the squared error in units of the target's variance, or of the cross-entropy."""
    real, target = batch.mask.to(y.device), batch.target.to(y.device)
    if target.dtype == torch.int64:
        return F.cross_entropy(y[real], target[real], reduction="sum")
    return ((y - target.to(y)) / model.output_scale)[real].square().mean(-1).sum()


class Score(NamedTuple):
    """loss, and figures by target and predictor: {"y": {"model": {"rmse": 0.1, "mae": 0.08}, "mean": ...}}."""

    loss: float
    steps: int
    figures: dict[str, dict[str, dict[str, float]]]

    def as_dict(self) -> dict[str, Any]:
        return {"scored": self.steps, "loss": self.loss, "targets": self.figures}

    def headline(self) -> str:
        name, found = next(iter(self.figures.items()))
        figure, value = next(iter(found["model"].items()))
        return f"{name}: {figure} {value:.4g}"

    def table(self) -> str:
        """For a person, a line for each target and predictor."""
        width = max(map(len, self.figures))
        lines = []
        for target, found in self.figures.items():
            for number, (predictor, values) in enumerate(found.items()):
                shown = "   ".join(f"{name} {value:.6g}" for name, value in values.items())
                lines.append(f"  {target if number == 0 else '':{width}}  {predictor:20}{shown}")
        return "\n".join(lines)


@torch.no_grad()
def predictions(model: SeriesModel, held: Windows, data: SeriesData) -> Tensor:
    """y (W, L, O) of every window, float64, on the CPU."""
    was = model.training
    model.eval()
    parts = [predict(model, held.batch(slice(i, i + BATCH)), data)[0] for i in range(0, len(held.x), BATCH)]
    model.train(was)
    return torch.cat(parts).cpu().double()


def score(model: SeriesModel, held: Windows, data: SeriesData, classes: list[str], y: Tensor | None = None) -> Score:
    """What the model predicts (`y`, if it is known) beside what is predicted without one: the last value and the mean
    of the training data, or its most frequent class."""
    real = held.mask
    y = predictions(model, held, data) if y is None else y
    if data.task == "classification":
        got, want = y[real], held.target[real]
        loss = F.cross_entropy(got, want).item()
        hits = {"model": got.argmax(-1) == want, f"always {classes[0]}": want == 0}
        found = {who: {"accuracy": float(hit.double().mean())} for who, hit in hits.items()}
        found["model"]["cross_entropy"] = loss
        return Score(loss, len(want), {data.target[0]: found})
    want, scale = held.target[real], model.output_scale.cpu().double()
    predicted = {"model": y[real]}
    if data.task == "forecast":
        predicted["last value"] = held.last[real]
    predicted["mean"] = model.output_mean.cpu().double().expand_as(want)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for number, name in enumerate(data.target):
        errors = {who: (each - want)[:, number] for who, each in predicted.items()}
        figures[name] = {
            who: {"rmse": float(e.square().mean().sqrt()), "mae": float(e.abs().mean())} for who, e in errors.items()
        }
    return Score(float(((predicted["model"] - want) / scale).square().mean()), len(want), figures)


def write_predictions(out: Path, y: Tensor, held: Windows, data: SeriesData, classes: list[str]) -> None:
    """A CSV of the row that is predicted, each target there and its prediction. Raises RunError where there is one."""
    if out.exists():
        raise RunError(f"{out} exists; nothing is overwritten: name another file")
    names, real = data.target, held.mask
    want, got, places = held.target[real].numpy(), y[real].numpy(), held.place[real].tolist()
    if classes:
        known = np.array(classes)
        want, got = known[want][:, None], known[got.argmax(-1)][:, None]
    header = ["row", *names, *(f"{name}_predicted" for name in names)]
    text = io.StringIO()
    rows = ([place, *w, *g] for place, w, g in zip(places, want, got, strict=True))
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_atomic(out, text.getvalue().encode())


def evaluate(path: str | Path, file: str | None = None, out: str | None = None) -> Score:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    out  CSV to write: the file's row that is predicted, each target there and its prediction

    Raises DataError for a file that does not fit, RunError for what is no run of series, or one that exists at `out`,
    NotFiniteError for predictions that are not finite.
    """
    run = Run.open(path)
    config, model = run.read_config(kind="series"), SeriesModel.load(path)
    if "data" not in config:
        raise RunError(f"{path} is a model that was saved without data: it can be loaded, and not evaluated here")
    data = from_dict(SeriesData, config["data"], "data")
    if file is None:
        require_texts(data, run, fix="--file FILE")
        prepared = prepare(data, config["classes"] or None)
        held, lines = prepared.valid, prepared.lines
    else:
        values = {name: getattr(data, name) for name in hints_of(SeriesData)}
        data = SeriesData(**values | {"path": file, "valid_path": None})
        table = read_table(file, data.delimiter)
        data = resolved(data, table)
        series = read_series(data, table)
        require_near(data, series, Scales(*(getattr(model, n).double().numpy() for n in Scales._fields)))
        lines = described(data, table, float(np.median(np.concatenate([one.dt for one in series]))))
        held = windows(data, series, config["classes"])
    for line in lines:
        print(line, file=sys.stderr)
    y = predictions(model, held, data)
    if not bool(y[held.mask].isfinite().all()):
        raise NotFiniteError(
            f"the predictions of {path} are not all finite: its training diverged, or the file has values far beyond "
            "those trained on. Train again with a lower training.optimizer.learning_rate"
        )
    if out is not None:
        write_predictions(Path(out).expanduser(), y, held, data, config["classes"])
    return score(model, held, data, config["classes"], y)
