"""What a series model answers about the windows of a panel, and how good that is.

A forecast is scored on the next step's observed channels; the answers of the step before a series' first, from static
facts alone, are trained and not scored, as there is no last value to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import DataError
from glissando.series.batches import Batch, Floats, Ints, Steps, Windows
from glissando.series.history import Past
from glissando.series.model import SeriesModel
from glissando.series.panel import Encoding, Panel
from glissando.series.scores import (
    ANCHOR,
    LAST,
    MEAN,
    SEASON,
    Answers,
    Score,
    period_of,
    score_classes,
    score_forecasts,
    seasonal_values,
)

#: questions that the anchor answers at once
_AT_ONCE = 16384
#: series that are searched for a period at most
_SEARCHED = 200


def call(model: SeriesModel, batch: Batch) -> Tensor:
    """The model's answers for a batch, on its device; of classes, those of whole series where these have the labels."""
    return advance(model, batch)[0]


def advance(model: SeriesModel, batch: Batch, compiled: bool = False, state: Any = None) -> tuple[Tensor, Any]:
    """As `call`, and the state after the batch where one is given."""
    like = model.output_scale
    inputs = {name: _moved(value, like) for name, value in batch.inputs.items()}
    if state is not None:  # what is known of a series does not depend on the state that its layers start from
        state = inputs.pop("past").put_into(state)
    run = torch.compile(_run, dynamic=False) if compiled else _run
    y, after = run(model, batch.x.to(like), state, inputs)
    if batch.labels is not None and batch.labels.ndim == 1:
        return model.pooled(y, batch.mask.to(y.device)), after
    return y, after


def _run(model: SeriesModel, x: Tensor, state: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    return model(x, state, **inputs)


def _moved(value: Any, like: Tensor) -> Any:
    """A part of a batch on the model's device, numbers in its type."""
    if isinstance(value, Tensor):
        return value.to(like) if value.is_floating_point() else value.to(like.device)
    return None if value is None else Past(*(part.to(like) for part in value))


def standard(model: SeriesModel, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Parameters (..., O, P) and targets (..., O) in the units in which they are trained: the target's deviation about
    its mean, or that of its series so far."""
    assert batch.target is not None
    target = batch.target.to(y)
    centre, scale = (part.to(y) for part in batch.units or (model.output_mean, model.output_scale))
    params = y.unsqueeze(-1) if model.config.head == "point" else y
    return model.distribution.affine(params, -centre / scale, 1 / scale), (target - centre) / scale


class Scored(NamedTuple):
    """loss  the mean of what training minimises, where the next step alone is asked about"""

    loss: float
    score: Score

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.score.as_dict()}

    def table(self) -> str:
        return self.score.table()


def classified(model: SeriesModel, windows: Windows, encoding: Encoding, stride: int = 1) -> Scored:
    """How good the classes of a model in evaluation mode are on held-out windows, or on one of `stride`."""
    scores, labels, series, _ = logits(model, windows, stride)
    shares = torch.bincount(labels, minlength=len(encoding.classes)).double().numpy() / len(labels)
    loss = F.cross_entropy(scores, labels)
    if not bool(loss.isfinite()):
        return Scored(float(loss), Score(0, 0, {}, {}))
    figures = score_classes(
        scores.numpy(), labels.numpy(), series.numpy(), encoding.target[0], encoding.classes, shares
    )
    return Scored(float(loss), figures)


@torch.no_grad()
def logits(model: SeriesModel, windows: Windows, stride: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (N, C), the class, the series and the panel's step of each label; of whole series, their first step."""
    parts: list[tuple[Tensor, ...]] = []
    for batch in windows.scoring(stride):
        assert batch.labels is not None
        y, series = call(model, batch).cpu().double(), windows.steps.series[batch.index]
        row, known = windows.steps.row[batch.index], batch.labels >= 0
        if batch.labels.ndim == 1:
            series, row = series[:, 0], row[:, 0]
        parts.append((y[known], batch.labels[known], series[known], row[known]))
    scores, labels, series, rows = (torch.cat(part) for part in zip(*parts, strict=True))
    _require_scored(len(labels), "every label is missing")
    return scores, labels, series, rows


def _require_scored(count: int, why: str) -> None:
    if not count:
        raise DataError(f"there is nothing to score: {why}, in all that is held out or in the file")


def measured(model: SeriesModel, answers: Answers, encoding: Encoding, naive: np.ndarray | None = None) -> Scored:
    """The score of answers, of series in their own units in these; naive: see score_forecasts."""
    in_units = answers.in_own_units(model.distribution)
    loss = model.distribution.each_loss(in_units.params, torch.from_numpy(in_units.target)).mean()
    if not bool(loss.isfinite()):
        return Scored(float(loss), Score(0, 0, {}, {}))
    is_own = model.config.scale == "series"
    score = score_forecasts(in_units if is_own else answers, model.distribution, encoding.target, naive)
    return Scored(float(loss), score._replace(own=is_own))


@torch.no_grad()
def answers(model: SeriesModel, windows: Windows, stride: int = 1) -> tuple[Answers, Ints]:
    """Every scored answer of the windows, beside what needs no training and the anchor; and the panel's step (N,) that
    each is about."""
    steps, parts = windows.steps, list[tuple[Tensor, Tensor]]()
    for batch in windows.scoring(stride):
        y = call(model, batch).cpu()
        params = y.unsqueeze(-1) if model.config.head == "point" else y
        parts.append((batch.index[batch.mask], (params if windows.targets is None else params[:, :, 0])[batch.mask]))
    at, params = (torch.cat(part) for part in zip(*parts, strict=True))
    if windows.targets is not None:
        real = steps.row[at] >= 0
        return answers_of(model, steps, at[real], at[real] + 1, params[real])
    assert steps.target is not None
    target, nowhere = steps.target[at], torch.zeros(len(at), dtype=torch.float64)
    mean, scale = (part.double().cpu().expand_as(target) for part in (model.output_mean, model.output_scale))
    return _joined(steps, at, target, params, nowhere, torch.full_like(target, torch.nan), scale, {MEAN: mean})


@torch.no_grad()
def answers_of(model: SeriesModel, steps: Steps, at: Tensor, about: Tensor, params: Tensor) -> tuple[Answers, Ints]:
    """The answers to those of G questions whose values were observed, with the forecasts that need no network; and the
    panel's step (N,) that each is about.

    Args:
        model: In evaluation mode.
        steps: Of all series.
        at: (G,) the step of each question.
        about: (G,) the step with the values.
        params: (G, O, P).
    """
    targets, known = model.config.targets, Past(*(part[at] for part in steps.known))
    horizon = torch.where(about == at + 1, steps.gaps[about], steps.time[about] - steps.time[at])
    mean, scale = model.output_mean.double().cpu(), model.output_scale.double().cpu()
    ever, age = known.ever[:, targets], known.age[:, targets] * float(model.time_scale)
    last = torch.where(ever, mean + scale * known.value[:, targets], torch.nan)
    gap = torch.where(ever, age + horizon.unsqueeze(1), torch.nan)
    anchor = _anchored(model, steps, known, at, about, horizon)
    target = torch.where(steps.scored[about].unsqueeze(1), steps.values[about][:, targets], torch.nan)
    middle, units = (part[at][:, targets] for part in (steps.centre, steps.scale))
    baselines = {LAST: last, MEAN: middle, ANCHOR: anchor}
    return _joined(steps, about, target, params, horizon, gap, units, baselines)


def _joined(
    steps: Steps, about: Tensor, target: Tensor, params: Tensor, horizon: Tensor, gap: Tensor, scale: Tensor,
    baselines: dict[str, Tensor],
) -> tuple[Answers, Ints]:  # fmt: skip
    """The answers (G, O) that have a target."""
    rows, outputs = target.isnan().logical_not().nonzero(as_tuple=True)
    _require_scored(len(rows), "every series has a single step, or no value of the target")
    place = about[rows]
    made = Answers(
        steps.series[place].numpy(), outputs.numpy(), target[rows, outputs].numpy(), params[rows, outputs],
        horizon[rows].numpy(), gap[rows, outputs].numpy(), scale[rows, outputs].numpy(),
        {name: each[rows, outputs].numpy() for name, each in baselines.items()},
    )  # fmt: skip
    return made, steps.row[place].numpy()


def _anchored(model: SeriesModel, steps: Steps, known: Past, at: Tensor, about: Tensor, horizon: Tensor) -> Tensor:
    """(G, O) the anchor's forecasts, float64."""
    like, parts = model.output_scale, list[Tensor]()
    for chosen in torch.arange(len(at)).split(_AT_ONCE):
        series = steps.series[at[chosen]]
        y = model.anchored(
            Past(*(part[chosen].unsqueeze(1).to(like) for part in known)),
            horizon[chosen].unsqueeze(1).to(like),
            steps.static[series].to(like) if steps.static.shape[1] else None,
            steps.static_codes[series].to(like.device) if steps.static_codes.shape[1] else None,
            steps.future[about[chosen]].unsqueeze(1).to(like) if steps.future.shape[1] else None,
        )
        parts.append(y[:, 0].double().cpu())
    return torch.cat(parts)


def with_season(answers: Answers, panel: Panel, channels: Sequence[int], time: Floats) -> Answers:
    """With the value one period before, where a period shows in a channel.

    Args:
        found: What was forecast.
        panel: The series.
        channels: The panel's channel of each output.
        time: (N,) of the values that were forecast.
    """
    spans = [slice(*span) for span in zip(panel.starts[:-1], panel.starts[1:], strict=True)]
    longest = sorted(spans, key=lambda span: span.start - span.stop)[:_SEARCHED]
    season = np.full(len(time), np.nan)
    for output, channel in enumerate(channels):
        values = panel.values[:, channel]
        gaps = np.concatenate([np.diff(panel.times[one][~np.isnan(values[one])]) for one in longest])
        if not len(gaps):
            continue
        step = float(np.median(gaps))
        period = period_of([panel.times[one] for one in longest], [values[one] for one in longest], step)
        if period is None:
            continue
        chosen = np.flatnonzero(answers.channel == output)
        chosen = chosen[np.argsort(answers.series[chosen], kind="stable")]
        for rows in np.split(chosen, np.flatnonzero(np.diff(answers.series[chosen])) + 1):
            if len(rows):
                one = spans[answers.series[rows[0]]]
                asked = time[rows] - answers.horizon[rows]
                season[rows] = seasonal_values(panel.times[one], values[one], asked, time[rows], period, step)
    if np.isnan(season).all():
        return answers
    return answers._replace(baselines={**answers.baselines, SEASON: season})


# ---------------------------------------------------------------------- how good it is


def answered(model: SeriesModel, windows: Windows, panel: Panel) -> tuple[Answers, Ints]:
    """Every scored answer about numbers, of a forecast each step's about the next, and the panel's step (N,) that each
    is about."""
    forecast, rows = answers(model, windows)
    return forecast if windows.targets is None else with_season(
        forecast, panel, windows.targets, panel.times[rows]
    ), rows


def measure(
    model: SeriesModel, windows: Windows, panel: Panel, encoding: Encoding, trained: Steps | None = None,
    pictures: Path | None = None, forecast: tuple[Answers, Ints] | None = None,
) -> Scored:  # fmt: skip
    """Score the model by channel, and draw its pictures.

    Args:
        model: Put into evaluation mode.
        held: The windows that are scored.
        panel: Their series.
        encoding: Of the run.
        trained: Steps of the training, by whose last values' errors MASE divides; None: no MASE.
        pictures: Directory of the pictures; None: none are drawn. Classes have none.
        found: What is scored, as `answered` returns it; None: that.
    """
    if encoding.classes:
        return classified(model.eval(), windows, encoding)
    made, rows = answered(model.eval(), windows, panel) if forecast is None else forecast
    values = panel.target if windows.targets is None else panel.values[:, windows.targets]
    naive = None if trained is None or windows.targets is None else naive_errors(
        trained, windows.targets, model.config.scale == "series"
    )  # fmt: skip
    result = measured(model, made, encoding, naive)
    if pictures is not None and np.isfinite(result.loss) and values is not None:
        from glissando.series.pictures import draw  # matplotlib takes a second to import

        draw(made, rows, panel, values, encoding.target, model.distribution, pictures)
    return result


def naive_errors(steps: Steps, targets: list[int], by_series: bool) -> Floats:
    """(O,) the mean absolute error of the last value as a forecast of the next one, in the units of the data, or of the
    series' own; 0 where a channel has no two values in a series."""
    made = np.zeros(len(targets))
    for output, channel in enumerate(targets):
        seen = np.flatnonzero(~np.isnan(steps.values[:, channel].numpy()))
        series, values = steps.series.numpy()[seen], steps.values[:, channel].numpy()[seen]
        same, scale = np.diff(series) == 0, steps.scale[:, channel].numpy()[seen[:-1]] if by_series else 1.0
        made[output] = (np.abs(np.diff(values)) / scale)[same].mean() if same.any() else 0.0
    return made
