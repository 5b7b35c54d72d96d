"""What a series model answers about the windows of a panel, and how good that is.

A forecast is scored on the next step's observed channels; the answers of the step before a series' first, from static
facts alone, are trained and not scored, as there is no last value to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import DataError
from glissando.series.batches import Batch, Floats, Steps, Windows
from glissando.series.heads import Head
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
from glissando.state import map_state

#: questions that the anchor answers at once
_AT_ONCE = 16384
#: with fewer series the groups of `shares` are so many stretches of consecutive answers
_GROUPS = 20
#: series that are searched for a period at most
_SEARCHED = 200


def on_device(model: SeriesModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of the model on its device, numbers in its type."""
    like = model.output_scale

    def moved(part: Tensor) -> Tensor:
        return part.to(like) if part.is_floating_point() else part.to(like.device)

    return {name: map_state(moved, part) for name, part in inputs.items()}


def call(model: SeriesModel, batch: Batch) -> Tensor:
    """The model's answers for a batch, on its device; of classes of whole series, those of the series."""
    return advance(model, batch)[0]


def advance(model: SeriesModel, batch: Batch, compiled: bool = False, state: Any = None) -> tuple[Tensor, Any]:
    """As `call`, and the state after the batch where one is given."""
    inputs = on_device(model, batch.inputs)
    if state is not None:  # what is known of a series does not depend on the state that its layers start from
        state = inputs.pop("past").put_into(state)
    run = torch.compile(_run, dynamic=False) if compiled else _run
    y, after = run(model, state, inputs)
    return (model.pooled(y, batch.mask.to(y.device)) if batch.whole else y), after


def _run(model: SeriesModel, state: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    return model(state=state, **inputs)


def standard(model: SeriesModel, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Parameters (..., O, P) and targets (..., O) in the units in which they are trained: the target's deviation about
    its mean, or that of its series so far."""
    assert batch.target is not None
    target = batch.target.to(y)
    centre, scale = (part.to(y) for part in batch.units or (model.output_mean, model.output_scale))
    return model.distribution.affine(model.params(y), -centre / scale, 1 / scale), (target - centre) / scale


@torch.no_grad()
def outputs(model: SeriesModel, windows: Windows, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Every answer of the windows, or of one of `stride`: its step (G,), the first of a whole series, and what it is,
    (G, O) or (G, O, P), of a forecast about the next step."""
    parts: list[tuple[Tensor, Tensor]] = []
    for batch in windows.scoring(stride):
        y = call(model, batch).cpu()
        y = y if windows.targets is None else y[:, :, 0]
        parts.append((batch.index[:, 0], y) if windows.whole else (batch.index[batch.mask], y[batch.mask]))
    at, y = (torch.cat(part) for part in zip(*parts, strict=True))
    return at, y


def logits(model: SeriesModel, windows: Windows, stride: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (N, C), the class, the series and the panel's step of each label; of whole series, their first step."""
    (at, y), steps = outputs(model, windows, stride), windows.steps
    series = steps.series[at]
    labels = torch.full_like(at, -1) if steps.labels is None else steps.labels[series if windows.whole else at]
    known = labels >= 0
    _require_scored(bool(known.any()), "every label is missing")
    return y[known].double(), labels[known], series[known], steps.row[at[known]]


def _require_scored(is_some: bool, why: str) -> None:
    if not is_some:
        raise DataError(f"there is nothing to score: {why}, in all that is held out or in the file")


# ---------------------------------------------------------------------- numbers


def answers(model: SeriesModel, windows: Windows, stride: int = 1) -> Answers:
    """Every scored answer of the windows, beside what needs no training and the anchor."""
    (at, y), steps = outputs(model, windows, stride), windows.steps
    if windows.targets is not None:
        real = steps.row[at] >= 0
        return answers_of(model, steps, at[real], at[real] + 1, model.params(y[real]))
    target = torch.full(y.shape[:2], torch.nan).double() if steps.target is None else steps.target[at]
    mean, scale = (part.double().cpu().expand_as(target) for part in (model.output_mean, model.output_scale))
    nowhere = torch.full_like(target, torch.nan)
    return _joined(steps, at, target, model.params(y), torch.zeros(len(at)).double(), nowhere, scale, {MEAN: mean})


@torch.no_grad()
def answers_of(model: SeriesModel, steps: Steps, at: Tensor, about: Tensor, params: Tensor) -> Answers:
    """The answers to those of G questions whose values were observed, with the forecasts that need no network.

    Args:
        model: In evaluation mode.
        steps: Of all series.
        at: (G,) the step of each question.
        about: (G,) the step with the values.
        params: (G, O, P).
    """
    targets, known = model.config.targets, map_state(lambda part: part[at], steps.known)
    horizon = torch.where(about == at + 1, steps.gaps[about], steps.time[about] - steps.time[at])
    mean, scale = model.output_mean.double().cpu(), model.output_scale.double().cpu()
    ever, age = known.ever[:, targets], known.age[:, targets] * float(model.time_scale)
    target = torch.where(steps.scored[about].unsqueeze(1), steps.values[about][:, targets], torch.nan)
    middle, units = (part[at][:, targets] for part in (steps.centre, steps.scale))
    anchor = []
    for chosen in torch.arange(len(at)).split(_AT_ONCE):
        series = steps.series[at[chosen]]
        asked = {
            "known": map_state(lambda part, chosen=chosen: part[chosen].unsqueeze(1), known),
            "horizon": horizon[chosen].unsqueeze(1), "static": steps.static[series],
            "static_codes": steps.static_codes[series], "ahead": steps.future[about[chosen]].unsqueeze(1),
        }  # fmt: skip
        anchor.append(model.anchored(**on_device(model, asked))[:, 0].double().cpu())
    baselines = {
        LAST: torch.where(ever, mean + scale * known.value[:, targets], torch.nan), MEAN: middle,
        ANCHOR: torch.cat(anchor) if anchor else target,
    }  # fmt: skip
    gap = torch.where(ever, age + horizon.unsqueeze(1), torch.nan)
    return _joined(steps, about, target, params, horizon, gap, units, baselines)


def _joined(
    steps: Steps, about: Tensor, target: Tensor, params: Tensor, horizon: Tensor, gap: Tensor, scale: Tensor,
    baselines: dict[str, Tensor],
) -> Answers:  # fmt: skip
    """The answers (G, O) that have a target."""
    rows, channels = target.isnan().logical_not().nonzero(as_tuple=True)
    _require_scored(len(rows) > 0, "every series has a single step, or no value of the target")
    place = about[rows]
    return Answers(
        steps.series[place].numpy(), channels.numpy(), target[rows, channels].numpy(), params[rows, channels].double(),
        horizon[rows].numpy(), gap[rows, channels].numpy(), scale[rows, channels].numpy(), steps.row[place].numpy(),
        {name: each[rows, channels].numpy() for name, each in baselines.items()},
    )  # fmt: skip


def with_season(answers: Answers, panel: Panel, channels: list[int] | None) -> Answers:
    """With the value one period before, where a period shows in a channel.

    Args:
        answers: What was forecast.
        panel: The series.
        channels: The panel's channel of each output; None: of no forecast, which has no such values.
    """
    import pandas

    spans = [slice(*span) for span in zip(panel.starts[:-1], panel.starts[1:], strict=True)]
    longest = sorted(spans, key=lambda span: span.start - span.stop)[:_SEARCHED]
    time, season = panel.times[answers.row], np.full(len(answers.row), np.nan)
    for output, channel in enumerate(channels or ()):
        values = panel.values[:, channel]
        gaps = np.concatenate([np.diff(panel.times[one][~np.isnan(values[one])]) for one in longest])
        if not len(gaps):
            continue
        step = float(np.median(gaps))
        period = period_of([panel.times[one] for one in longest], [values[one] for one in longest], step)
        if period is None:
            continue
        chosen = np.flatnonzero(answers.channel == output)
        for series, places in pandas.Series(chosen).groupby(answers.series[chosen]).indices.items():
            one, rows = spans[int(str(series))], chosen[places]
            asked = time[rows] - answers.horizon[rows]
            season[rows] = seasonal_values(panel.times[one], values[one], asked, time[rows], period, step)
    if np.isnan(season).all():
        return answers
    return answers._replace(baselines={**answers.baselines, SEASON: season})


# ---------------------------------------------------------------------- how much of the network is kept


def shares(answers: Answers, head: Head, channels: int) -> Floats:
    """(O,) how much of the network's contribution a forecast keeps, by channel, fitted on what is held out; 0 where
    nothing was answered.

        y = a + s n,     s = clip(S - e, 0, 1),     S = sum n (v - a) / sum n^2

    v are the values, a the anchor's forecasts and n the network's contributions, all of which the answers have; S has
    the least squares, e is its standard error over groups of answers, the series or, where these are few, stretches of
    them. What a small table does not show beyond one standard error is left to the anchor: the one-standard-error rule
    of Breiman et al. 1984.
    """
    network = _contribution(answers, head) / answers.scale
    left = (answers.target - answers.baselines[ANCHOR]) / answers.scale
    made = np.zeros(channels)
    for channel in range(channels):
        chosen = np.flatnonzero(answers.channel == channel)
        n, r = network[chosen], left[chosen]
        if not (n**2).sum() > 0:
            continue
        _, group = np.unique(answers.series[chosen], return_inverse=True)
        if group.max() + 1 < _GROUPS:
            group = np.arange(len(chosen)) * _GROUPS // len(chosen)
        products, squares = np.bincount(group, n * r), np.bincount(group, n**2)
        best = products.sum() / squares.sum()
        error = np.sqrt(((products - best * squares) ** 2).sum()) / squares.sum()
        made[channel] = np.clip(best - error, 0, 1)
    return made


def shrunk(answers: Answers, head: Head, share: Floats) -> Answers:
    """Answers with so much (O,) of the network's contribution."""
    shift = torch.from_numpy((share[answers.channel] - 1) * _contribution(answers, head))
    return answers._replace(params=head.affine(answers.params.unsqueeze(1), shift.unsqueeze(1), 1.0).squeeze(1))


def _contribution(answers: Answers, head: Head) -> Floats:
    """(N,) what the network adds to the anchor's forecasts."""
    return np.asarray(head.mean(answers.params).numpy() - answers.baselines[ANCHOR])


# ---------------------------------------------------------------------- how good it is


def classified(model: SeriesModel, windows: Windows, encoding: Encoding, stride: int = 1) -> Score:
    """How good the classes of a model in evaluation mode are on held-out windows, or on one of `stride`."""
    scores, labels, series, _ = logits(model, windows, stride)
    loss = float(F.cross_entropy(scores, labels))
    if not np.isfinite(loss):
        return Score(loss)
    shares = torch.bincount(labels, minlength=len(encoding.classes)).double().numpy() / len(labels)
    score = score_classes(scores.numpy(), labels.numpy(), series.numpy(), encoding.target[0], encoding.classes, shares)
    return replace(score, loss=loss)


def measured(model: SeriesModel, answers: Answers, encoding: Encoding, naive: np.ndarray | None = None) -> Score:
    """The score of answers, of series in their own units in these; naive: see score_forecasts."""
    in_units, is_own = answers.in_own_units(model.distribution), model.config.scale == "series"
    loss = float(model.distribution.each_loss(in_units.params, torch.from_numpy(in_units.target)).mean())
    if not np.isfinite(loss):
        return Score(loss)
    score = score_forecasts(in_units if is_own else answers, model.distribution, encoding.target, naive)
    return replace(score, loss=loss, own=is_own)


def answered(model: SeriesModel, windows: Windows, panel: Panel) -> Answers:
    """Every scored answer about numbers, of a forecast each step's about the next."""
    return with_season(answers(model, windows), panel, windows.targets)


def measure(
    model: SeriesModel, windows: Windows, panel: Panel, encoding: Encoding, trained: Steps | None = None,
    pictures: Path | None = None, forecast: Answers | None = None,
) -> Score:  # fmt: skip
    """Score the model by channel, and draw its pictures.

    Args:
        model: In evaluation mode.
        windows: The windows that are scored.
        panel: Their series.
        encoding: Of the run.
        trained: Steps of the training, by whose last values' errors MASE divides; None: no MASE.
        pictures: Directory of the pictures; None: none are drawn. Classes have none.
        forecast: What is scored; None: what `answered` returns.
    """
    if encoding.classes:
        return classified(model, windows, encoding)
    targets, naive = windows.targets, None
    made = answered(model, windows, panel) if forecast is None else forecast
    if trained is not None and targets is not None:
        naive = naive_errors(trained, targets, model.config.scale == "series")
    result = measured(model, made, encoding, naive)
    values = panel.target if targets is None else panel.values[:, targets]
    if pictures is not None and np.isfinite(result.loss) and values is not None:
        from glissando.series.pictures import draw  # matplotlib takes a second to import

        draw(made, panel, values, encoding.target, model.distribution, pictures)
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
