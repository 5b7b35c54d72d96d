"""What a series model predicts, and how far it is from the values beside what is predicted without a model."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.data.series import SeriesData, Windows
from glissando.errors import RunError
from glissando.series import SeriesModel
from glissando.storage import write_atomic


def predict(model: SeriesModel, batch: Windows, data: SeriesData) -> Tensor:
    """y (B, L, O) of a batch, on the model's device."""
    like = model.entry.weight
    dt = None if data.time is None else batch.dt.to(like)
    mask = None if bool(batch.mask.all()) else batch.mask.to(like.device)
    return model(batch.x.to(like), dt=dt, mask=mask)[0]


def loss_of(model: SeriesModel, y: Tensor, batch: Windows) -> Tensor:
    """The mean over real steps of the squared error in units of the target's variance, or of the cross-entropy."""
    real, target = batch.mask.to(y.device), batch.target.to(y.device)
    if target.dtype == torch.int64:
        return F.cross_entropy(y[real], target[real])
    return ((y - target.to(y)) / model.output_scale)[real].square().mean()


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
def predictions(model: SeriesModel, held: Windows, data: SeriesData, batch: int = 64) -> Tensor:
    """y (W, L, O) of every window, float64, on the CPU."""
    was = model.training
    model.eval()
    parts = [predict(model, held.batch(slice(i, i + batch)), data) for i in range(0, len(held.x), batch)]
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
