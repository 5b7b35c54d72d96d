"""Questions to a model that has read series: what will be at times after a step, drawn paths, and scored answers.

A question is asked of a step: the model reads the last steps up to it, as many as a window of its training has, and
knows the whole history before them. It answers for any later time; asking changes nothing that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.backbone import ModelState
from glissando.data.windows import by_length
from glissando.progress import track
from glissando.series.answers import answers_of, on_device, with_season
from glissando.series.batches import Ints, Steps
from glissando.series.model import SeriesModel
from glissando.series.panel import Panel
from glissando.series.scores import Answers
from glissando.state import select_rows

#: steps that are read at once, over all rows of a batch
_AT_ONCE = 16384


def _answer(
    model: SeriesModel, state: ModelState, inputs: dict[str, Any], horizon: Tensor, ahead: Tensor | None
) -> tuple[Tensor, ModelState]:
    """Parameters (B, J, O, P) at the horizons (B, J) after one step, and the state after it."""
    asked = {"horizon": horizon.unsqueeze(1), "ahead": None if ahead is None else ahead.unsqueeze(1)}
    y, after = model(**inputs, state=state, **on_device(model, asked))
    assert after is not None
    return model.params(y[:, 0]), after


def read(model: SeriesModel, steps: Steps, at: Ints, window: int) -> tuple[ModelState, dict[str, Any]]:
    """Read the steps before each of `at` (B,), so that with it they are at most `window`: the state, and what the model
    is called with at the last, x (B, 1, K) and the rest."""
    last = torch.from_numpy(np.asarray(at))
    begins = steps.first.nonzero().flatten()
    begin = torch.maximum(begins[torch.searchsorted(begins, last, right=True) - 1], last - window + 1)
    place = torch.arange(int((last - begin).max()) + 1) - (last - begin).max()  # the last steps are side by side
    index = last.unsqueeze(1) + place
    mask = index >= begin.unsqueeze(1)
    index = torch.where(mask, index, begin.unsqueeze(1))
    state = steps.before(begin).put_into(model.init_state(len(last)))
    if index.shape[1] > 1:
        read_before = on_device(model, steps.inputs(index[:, :-1]))
        kept = mask[:, :-1].to(read_before["x"].device)
        _, after = model(**read_before, state=state, mask=None if bool(kept.all()) else kept)
        assert after is not None
        state = after
    return state, on_device(model, steps.inputs(index[:, -1:]))


@torch.no_grad()
def ask(
    model: SeriesModel, steps: Steps, at: Ints, horizon: Tensor, ahead: Tensor | None = None, window: int = 64
) -> Tensor:
    """Parameters (M, J, O, P) of the forecasts, float64, on the CPU.

    Args:
        model: In evaluation mode.
        steps: Of all series.
        at: (M,) the steps at which is asked.
        horizon: (M, J) times from there.
        ahead: (M, J, U) known-future columns at the times that are asked about.
        window: Number of steps that are read before a question.
    """
    begins = np.flatnonzero(steps.first.numpy())
    lengths = np.minimum(at - begins[np.searchsorted(begins, at, side="right") - 1] + 1, window)
    shape = *horizon.shape, len(model.config.targets), model.distribution.width
    answer = torch.empty(shape, dtype=torch.float64)
    for chosen in track(by_length(lengths, _AT_ONCE), "forecasting", unit="batches"):
        state, inputs = read(model, steps, at[chosen], window)
        y, _ = _answer(model, state, inputs, horizon[chosen], None if ahead is None else ahead[chosen])
        answer[chosen] = y.double().cpu()
    return answer


@torch.no_grad()
def draw_paths(
    model: SeriesModel, steps: Steps, at: Ints, horizon: Sequence[float], ahead: Tensor | None, window: int, n: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """n joint paths (M, n, J, O) of the targets over ascending horizons, float64.

    A path is drawn step by step: the values at the first horizon from the answer, which are then read as an observation
    at that time; those at the second from the answer after it, and so on. The targets of one time are drawn
    independently of each other, given the path before.
    """
    like, targets = model.output_scale, model.config.targets
    paths = torch.empty(len(at), n, len(horizon), len(targets), dtype=torch.float64)
    per_batch = max(1, _AT_ONCE // (window * n))
    batches = np.split(np.arange(len(at)), np.arange(per_batch, len(at), per_batch))
    for chosen in track(batches, "drawing paths", unit="batches"):
        rows = torch.from_numpy(chosen).repeat_interleave(n)
        state, read_last = read(model, steps, at[chosen], window)
        copies = torch.arange(len(chosen)).repeat_interleave(n)
        state = select_rows(state, copies.to(like.device))
        inputs = {name: part[copies] for name, part in read_last.items()}
        before = 0.0
        for j, time in enumerate(horizon):
            gap = torch.full((len(rows), 1), time - before, dtype=like.dtype, device=like.device)
            y, state = _answer(model, state, inputs, gap, None if ahead is None else ahead[rows, j : j + 1])
            drawn = model.distribution.sample(y[:, 0], 1, generator)[0]
            paths[chosen, :, j] = drawn.double().cpu().unflatten(0, (len(chosen), n))
            # The step at which the drawn values are observed, and nothing else.
            x, seen = torch.zeros_like(inputs["x"]), torch.zeros_like(inputs["observed"])
            x[:, 0, targets], seen[:, 0, targets] = drawn, True
            inputs = {**inputs, "x": x, "observed": seen, "dt": gap}
            if "codes" in inputs:
                inputs["codes"] = torch.zeros_like(inputs["codes"])
            if ahead is not None:
                inputs["future"] = ahead[rows, j].to(like).unsqueeze(1)
            before = time
    return paths


# ---------------------------------------------------------------------- scored answers


def origins_of(steps: Steps, number: int) -> tuple[Ints, Ints]:
    """Rolling origins, and where the values that each forecasts end.

    Each series has `number` origins at most, evenly spaced over the steps before its scored ones, or over its later
    half where all are scored. An origin forecasts all values up to the next one, the last one those to the end.
    """
    first, scored = steps.first.numpy(), steps.scored.numpy()
    begins = np.flatnonzero(first)
    at, until = [], []
    for begin, end in zip(begins, np.r_[begins[1:], len(first)], strict=True):
        wanted = np.flatnonzero(scored[begin:end])
        if not len(wanted):
            continue
        start = begin + wanted[0] - 1 if wanted[0] > 1 else begin + (end - begin) // 2
        start = min(max(start, begin), end - 2)
        if start < begin:
            continue
        cuts = np.unique(np.linspace(start, end - 1, number + 1).astype(np.int64))
        at.append(cuts[:-1])
        until.append(cuts[1:] + 1)
    return np.concatenate(at), np.concatenate(until)


def rolling_answers(
    model: SeriesModel, panel: Panel, steps: Steps, number: int, window: int, horizon: float | None = None
) -> Answers:
    """Forecasts from rolling origins.

    Args:
        model: In evaluation mode.
        panel: The series.
        steps: Those of the panel.
        number: Number of origins of a series.
        window: Number of steps that are read before a question.
        horizon: How far each origin forecasts, past the next one too; None: to the next origin.
    """
    at, until = origins_of(steps, number)
    if horizon is not None:
        time, first = steps.time.numpy(), np.flatnonzero(steps.first.numpy())
        ends = np.r_[first[1:], len(time)][np.searchsorted(first, at, side="right") - 1]
        limit = (time[at] + horizon) * (1 + 1e-12)
        spans = zip(at + 1, ends, limit, strict=True)
        until = np.array([a + np.searchsorted(time[a:e], x, side="right") for a, e, x in spans])
    about = at[:, None] + 1 + np.arange(int((until - at).max()) - 1)
    real = about < until[:, None]
    about = np.where(real, about, at[:, None])
    times = steps.time[torch.from_numpy(about)] - steps.time[torch.from_numpy(at)].unsqueeze(1)
    ahead = steps.future[torch.from_numpy(about)] if steps.future.shape[1] else None
    params = ask(model, steps, at, times, ahead, window)
    origin = np.broadcast_to(at[:, None], about.shape)[real]
    chosen = torch.from_numpy(real)
    made = answers_of(model, steps, torch.from_numpy(origin), torch.from_numpy(about[real]), params[chosen])
    return with_season(made, panel, model.config.targets)
