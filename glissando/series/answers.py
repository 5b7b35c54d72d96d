"""What a series model answers about the windows of a panel, and how good that is.

A forecast is scored on the next step's observed channels; the answers of the step before a series' first, from static
facts alone, are trained and not scored, as there is no last value to compare with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import DataError
from glissando.series.batches import Batch, Windows
from glissando.series.history import Past
from glissando.series.model import SeriesModel
from glissando.series.panel import Encoding
from glissando.series.scores import ANCHOR, LAST, MEAN, Answers, Score, score_classes, score_forecasts


def call(model: SeriesModel, batch: Batch, compiled: bool = False) -> Tensor:
    """The model's answers for a batch, on its device; of classes, those of whole series where these have the labels."""
    like = model.output_scale
    inputs = {name: _moved(value, like) for name, value in batch.inputs.items()}
    run = torch.compile(_run, dynamic=False) if compiled else _run
    y = run(model, batch.x.to(like), inputs)
    if batch.labels is not None and batch.labels.ndim == 1:
        return model.pooled(y, batch.mask.to(y.device))
    return y


def _run(model: SeriesModel, x: Tensor, inputs: dict[str, Any]) -> Tensor:
    return model(x, **inputs)[0]


def _moved(value: Any, like: Tensor) -> Any:
    """A part of a batch on the model's device, numbers in its type."""
    if isinstance(value, Tensor):
        return value.to(like) if value.is_floating_point() else value.to(like.device)
    return None if value is None else Past(*(part.to(like) for part in value))


def standard(model: SeriesModel, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters (..., O, P) and targets (..., O) in units of the target's deviation about its mean."""
    centre, scale = model.output_mean, model.output_scale
    params = y.unsqueeze(-1) if model.config.head == "point" else y
    return model.distribution.affine(params, -centre / scale, 1 / scale), (target - centre) / scale


class Scored(NamedTuple):
    """loss  the mean of what training minimises, where the next step alone is asked about"""

    loss: float
    score: Score

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.score.as_dict()}


@torch.no_grad()
def scored(model: SeriesModel, held: Windows, encoding: Encoding, stride: int = 1) -> Scored:
    """How good the model's answers are about held-out windows, or about one of `stride`."""
    was = model.training
    model.eval()
    try:
        return (_classes if encoding.classes else _numbers)(model, held, encoding, stride)
    finally:
        model.train(was)


def _classes(model: SeriesModel, held: Windows, encoding: Encoding, stride: int) -> Scored:
    scores, labels, series, _ = logits(model, held, stride)
    shares = torch.bincount(labels, minlength=len(encoding.classes)).double().numpy() / len(labels)
    loss = F.cross_entropy(scores, labels)
    if not bool(loss.isfinite()):
        return Scored(float(loss), Score(0, 0, {}, {}))
    figures = score_classes(
        scores.numpy(), labels.numpy(), series.numpy(), encoding.target[0], encoding.classes, shares
    )
    return Scored(float(loss), figures)


@torch.no_grad()
def logits(model: SeriesModel, held: Windows, stride: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (N, C), the class, the series and the panel's step of each label; of whole series, their first step."""
    found: list[tuple[Tensor, ...]] = []
    for batch in held.scoring(stride):
        assert batch.labels is not None
        y, series = call(model, batch).cpu().double(), held.steps.series[batch.index]
        row, known = held.steps.row[batch.index], batch.labels >= 0
        if batch.labels.ndim == 1:
            series, row = series[:, 0], row[:, 0]
        found.append((y[known], batch.labels[known], series[known], row[known]))
    scores, labels, series, rows = (torch.cat(part) for part in zip(*found, strict=True))
    _require_scored(len(labels), "every label is missing")
    return scores, labels, series, rows


def _require_scored(count: int, why: str) -> None:
    if not count:
        raise DataError(f"there is nothing to score: {why}, in all that is held out or in the file")


def _numbers(model: SeriesModel, held: Windows, encoding: Encoding, stride: int) -> Scored:
    return measured(model, answers(model, held, stride)[0], encoding)


def measured(model: SeriesModel, found: Answers, encoding: Encoding, naive: np.ndarray | None = None) -> Scored:
    """The score of answers; naive: see score_forecasts."""
    centre, scale = model.output_mean.cpu().double(), model.output_scale.cpu().double()
    of = torch.from_numpy(found.channel)
    params = model.distribution.affine(
        found.params.double().unsqueeze(1), (-centre / scale)[of].unsqueeze(1), (1 / scale)[of].unsqueeze(1)
    )
    target = (torch.from_numpy(found.target) - centre[of]) / scale[of]
    loss = model.distribution.each_loss(params, target.unsqueeze(1)).mean()
    if not bool(loss.isfinite()):
        return Scored(float(loss), Score(0, 0, {}, {}))
    return Scored(float(loss), score_forecasts(found, model.distribution, encoding.target, naive))


@torch.no_grad()
def answers(model: SeriesModel, held: Windows, stride: int = 1) -> tuple[Answers, np.ndarray]:
    """Every scored answer of the windows, beside what needs no training and the anchor; and the panel's step (N,) that
    each is about."""
    steps, channels, found = held.steps, held.targets, list[dict[str, Any]]()
    means = model.output_mean.cpu().double()
    for batch in held.scoring(stride):
        assert batch.target is not None
        y = call(model, batch).cpu()
        params, target = y.unsqueeze(-1) if model.config.head == "point" else y, batch.target
        baselines, horizon = {}, torch.zeros_like(target)
        gap, about = torch.full_like(target, torch.nan), batch.index
        if channels is not None:
            params, target, horizon = (
                params[:, :, 0],
                target[:, :, 0],
                batch.inputs["horizon"].expand_as(target[:, :, 0]),
            )
            known = Past(*(part[batch.index] for part in steps.known))
            ever, age = known.ever[..., channels], known.age[..., channels] * model.time_scale.cpu().double()
            values = known.value[..., channels] * model.output_scale.cpu().double() + means
            baselines[LAST] = torch.where(ever, values, torch.nan)
            gap = torch.where(ever, age + horizon, torch.nan)
            target = torch.where(steps.row[batch.index].unsqueeze(-1) >= 0, target, torch.nan)
            baselines[ANCHOR] = _anchored(model, batch, known)
            about = about + 1
        baselines[MEAN] = means.expand_as(target)
        chosen = ~target.isnan()
        series = steps.series[batch.index].unsqueeze(-1).expand_as(target)
        parts = {
            "series": series, "target": target, "horizon": horizon, "gap": gap, **baselines, "params": params,
            "channel": torch.arange(target.shape[-1]).expand_as(target),
            "row": steps.row[about.clamp_max(len(steps.row) - 1)].unsqueeze(-1).expand_as(target),
        }  # fmt: skip
        found.append({name: part[chosen] for name, part in parts.items()})
    joined = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    _require_scored(len(joined["target"]), "every series has a single step" if channels else "the target is missing")
    rows = joined.pop("row").numpy()
    made = Answers(
        params=joined.pop("params"),
        baselines={name: joined.pop(name).double().numpy() for name in (LAST, MEAN, ANCHOR) if name in joined},
        **{name: part.numpy() for name, part in joined.items()},
    )
    return made, rows


def _anchored(model: SeriesModel, batch: Batch, known: Past) -> Tensor:
    like, inputs = model.output_scale, batch.inputs
    moved = {name: _moved(inputs.get(name), like) for name in ("static", "static_codes", "ahead")}
    ahead = moved.pop("ahead")
    horizon = inputs["horizon"][..., 0].to(like)
    y = model.anchored(
        Past(*(part.to(like) for part in known)), horizon, ahead=None if ahead is None else ahead[:, :, 0], **moved
    )
    return y.cpu().double()
