"""The steps of a panel as a model reads them, what is asked of each, and their windows in batches.

A forecast has a step before a series' first, at its time, with nothing observed: first values are forecast from static
facts. What a step knows of its past is computed over the whole history, not over its window. Every step is asked for
the next one and, in training, for one more that follows, drawn anew in each epoch: near ones as often as far ones, by
the logarithm of their distance. Batches are functions of (seed, number): resuming is arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glissando.data.order import random_words
from glissando.data.windows import BatchedWindows
from glissando.errors import DataError
from glissando.series.history import Past, by_own_past, history
from glissando.series.panel import Encoding, Panel
from glissando.state import map_state

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: the smallest deviation of a column, and median step: below it, float32 divides by zero
_SMALLEST = 1e-30


# ---------------------------------------------------------------------- scales


class Scales(NamedTuple):
    """Means and deviations of what is trained on, as SeriesModel.set_scales takes them.

    law  (4, K) of series in their own units, see `glissando.series.history.by_own_past`; else None
    """

    input_mean: Floats
    input_scale: Floats
    output_mean: Floats
    output_scale: Floats
    static_mean: Floats
    static_scale: Floats
    future_mean: Floats
    future_scale: Floats
    time_scale: float
    law: Floats | None = None


def scales(panel: Panel, encoding: Encoding, by_series: bool = False) -> Scales:
    """Means and deviations of observed training values; a constant column has the scale 1, classes have none.

    by_series  channels are read in units of each series: input_mean is 0, and there is a law

    Raises DataError for a column whose variation float32 does not resolve.
    """
    channels: list[Any] = []
    outputs = np.zeros((1, len(encoding.classes) or len(encoding.target))) if panel.target is None else panel.target
    for values, names in (
        (panel.values, encoding.columns), (outputs, encoding.classes or encoding.target),
        (panel.static, encoding.static), (panel.future, encoding.future),
    ):  # fmt: skip
        pairs = [
            _scale(column, f"{panel.source}, column {name!r}") for column, name in zip(values.T, names, strict=True)
        ]
        channels += [np.array([mean for mean, _ in pairs]), np.array([scale for _, scale in pairs])]
    gaps = panel.gaps
    step = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0
    if step < _SMALLEST:
        raise DataError(
            f"{panel.source}: the median step {step:.3g} is too small for float32: multiply the times by a constant"
        )
    law = None
    if by_series:
        law, channels[0] = _law(panel, channels[0], channels[1]), np.zeros_like(channels[0])
    return Scales._make([*channels, step, law])


def _law(panel: Panel, mean: Floats, scale: Floats) -> Floats:
    """(4, K) a, b and f of log s = a + b log max(|m|, f), by least squares over deviations s and means m of series,
    with 0 <= b <= 1: Taylor's power law. f is a mean that few series are below. Last, the mean of all."""
    made = np.stack([0 * mean, 0 * mean, 1 + 0 * mean, mean / scale])
    for k, column in enumerate((panel.values / scale).T):
        cells = [part[~np.isnan(part)] for part in np.split(column, panel.starts[1:-1])]
        pairs = np.array([(abs(part.mean()), part.std(ddof=1)) for part in cells if len(part) > 1])
        pairs = pairs[(pairs > 0).all(1)] if len(pairs) else np.ones((1, 2))
        if len(pairs):
            x, y = np.log(pairs.T)
            b = np.clip(np.cov(x, y)[0, 1] / x.var(ddof=1), 0, 1) if np.ptp(x) else 0.0
            made[:3, k] = y.mean() - b * x.mean(), b, np.quantile(pairs[:, 0], 0.05)
    return made


def _scale(values: Floats, column: str) -> tuple[float, float]:
    """Mean and deviation of the values that are there.

    column  the file and the column, for the error
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0, 1.0
    if values.min() == values.max():  # rounded, the mean of equal values may differ from each
        return float(values[0]), 1.0
    mean, scale = float(values.mean()), float(values.std())
    if scale < max(1e-4 * abs(mean), _SMALLEST):
        fix = "multiply it by a constant" if scale < _SMALLEST else "subtract a constant from it"
        raise DataError(f"{column} varies by {scale:.3g} about {mean:.8g}, which float32 does not resolve: {fix}")
    return mean, scale


#: deviations from the mean, and median steps, beyond which the squares of float32 overflow within a model
_FAR = 1e15


def require_near(panel: Panel, encoding: Encoding, units: Scales) -> None:
    """Raises DataError for the first value or gap that is too far from the scales of training for float32."""
    parts: list[tuple[Floats, Any, Any, list[str], str]] = [
        (panel.values, units.input_mean, units.input_scale, encoding.columns, "deviations from the mean"),
        (panel.gaps[:, None], np.zeros(1), np.full(1, units.time_scale), ["gap"], "times the median step"),
        (panel.future, units.future_mean, units.future_scale, encoding.future, "deviations from the mean"),
    ]
    if panel.target is not None:
        parts.append((panel.target, units.output_mean, units.output_scale, encoding.target, "deviations from the mean"))
    for values, mean, scale, names, what in parts:
        for row, column in np.argwhere(np.abs(values - mean) > _FAR * scale)[:1]:
            count = abs(values[row, column] - mean[column]) / scale[column]
            raise DataError(
                f"{panel.place(row)}, {names[column]!r}: {values[row, column]:.6g} is {count:.3g} {what} of "
                "what is trained on, too far for float32: correct it, or leave this row out"
            )


def scales_of(model: Any) -> Scales:
    """Those that a SeriesModel was trained with."""
    *parts, step = (model.get_buffer(name).double().cpu().numpy() for name in Scales._fields[:-1])
    law = None if model.law is None else model.law.double().cpu().numpy()
    return Scales._make([*parts, float(step), law])


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Steps:
    """N steps of S series, one series after the other, tensors on the CPU in float64.

    row     (N,) the panel's step; -1 of a step before the first
    series  (N,)
    known   (N, K) each: what is known after each step, in the model's units
    centre  (N, K) and scale (N, K): the units in which forecasts from the step are trained and scored
    """

    row: Tensor
    series: Tensor
    first: Tensor  # (N,) bool
    scored: Tensor  # (N,) bool
    time: Tensor  # (N,)
    values: Tensor  # (N, K)
    gaps: Tensor  # (N,)
    codes: Tensor  # (N, Q)
    future: Tensor  # (N, U)
    static: Tensor  # (S, P)
    static_codes: Tensor  # (S, R)
    known: Past
    centre: Tensor
    scale: Tensor
    target: Tensor | None  # (N, O)
    labels: Tensor | None  # (N,) or (S,)

    @classmethod
    def of(cls, panel: Panel, scales: Scales, starting: bool) -> Steps:
        """starting: with a step before the first of each series."""
        counts = np.diff(panel.starts)
        series = np.repeat(np.arange(len(counts)), counts + starting)
        row = np.full(len(series), -1)
        first = np.r_[True, series[1:] != series[:-1]]
        real = ~first if starting else np.ones_like(first)
        row[real] = np.arange(len(panel.times))
        taken = np.where(real, row, np.r_[row[1:], 0])  # the step before the first is at its time

        def steps(values: NDArray, missing: Any) -> Tensor:
            chosen = values[taken]
            chosen[~real] = missing
            return torch.from_numpy(chosen)

        values, gaps, begins = steps(panel.values, np.nan), steps(panel.gaps, 0.0), torch.from_numpy(first)
        mean, scale = torch.from_numpy(scales.input_mean), torch.from_numpy(scales.input_scale)
        known = history(
            ((values - mean) / scale)[None], ~values.isnan()[None], gaps[None] / scales.time_scale, first=begins[None]
        )
        known = map_state(lambda part: part[0], known)
        units = by_own_past(known, None if scales.law is None else torch.from_numpy(scales.law))
        per_step = panel.labels is not None and len(panel.labels) == len(panel.times)
        return cls(
            torch.from_numpy(row), torch.from_numpy(series), begins, torch.from_numpy(panel.scored[taken] & real),
            torch.from_numpy(panel.times[taken]), values, gaps, steps(panel.codes, 0),
            torch.from_numpy(panel.future[taken]), torch.from_numpy(panel.static),
            torch.from_numpy(panel.static_codes), known, mean + scale * units.centre, scale * units.scale,
            None if panel.target is None else steps(panel.target, np.nan),
            None if panel.labels is None else steps(panel.labels, -1) if per_step else torch.from_numpy(panel.labels),
        )  # fmt: skip

    def inputs(self, index: Tensor) -> dict[str, Tensor]:
        """What a model is called with at the steps (B, L), each row of one series, in the units of the data."""
        series, values = self.series[index[:, 0]], self.values[index]
        parts = {"codes": self.codes[index], "future": self.future[index]}
        parts |= {"static": self.static[series], "static_codes": self.static_codes[series]}
        read = {name: part for name, part in parts.items() if part.shape[-1]}
        return {"x": values, "observed": ~values.isnan(), "dt": self.gaps[index], **read}

    def before(self, index: Tensor) -> Past:
        """What is known before each of the steps."""
        previous = (index - 1).clamp_min(0)
        begins = self.first[index].unsqueeze(-1)
        return map_state(lambda part: torch.where(begins, 0, part[previous]), self.known)


@dataclass  # not frozen: Fabric converts its tensors where the precision is not 32-true
class Batch:
    """B windows of L steps, the last ones padded.

    inputs  what the model is called with, by name
    index   (B, L) of Steps
    whole   whether the answers are those of whole series
    target  (B, L, J, O) of a forecast and (B, L, O) of a regression, NaN where nothing is scored
    units   of a forecast: the centre and the deviation (B, L, 1, O) in which it is trained
    labels  (B, L), or (B,) of series; -1: not scored
    fresh   (B,) bool, in lanes: rows that do not go on where the row before ended
    """

    inputs: dict[str, Any]
    index: Tensor
    mask: Tensor
    whole: bool = False
    target: Tensor | None = None
    labels: Tensor | None = None
    units: tuple[Tensor, Tensor] | None = None
    fresh: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Windows(BatchedWindows[Batch]):
    """Windows of steps, each with the end of what may be asked about; random questions reach `size` steps far.

    limit    (W,) the step behind the last one that a question may be about
    targets  channels that are forecast; None: the answers are of the step itself
    whole    one window a series, however long
    """

    steps: Steps
    limit: Ints
    targets: list[int] | None
    whole: bool

    @classmethod
    def of(
        cls, steps: Steps, targets: list[int] | None, size: int, rows: int, seed: int = 0, whole: bool = False
    ) -> Windows:
        """The windows over all scored steps or, to forecast, over all steps before a scored one."""
        scored, first = steps.scored.numpy(), steps.first.numpy()
        used = np.r_[scored[1:] & ~first[1:], False] if targets is not None else scored
        begins = np.flatnonzero(first)
        ends = np.r_[begins[1:], len(first)]
        counts = np.add.reduceat(used.astype(np.int64), begins)
        begins, ends, counts = begins[counts > 0], ends[counts > 0], counts[counts > 0]
        until = ends - (targets is not None)  # the last step of a series has nothing to be asked about
        start = until - counts  # what is scored is the end of a series
        cuts = [np.arange(a, b, b - a if whole else size) for a, b in zip(start, until, strict=True)]
        numbers = [len(cut) for cut in cuts]
        begin, stop = np.concatenate(cuts), np.repeat(until, numbers)
        end = stop if whole else np.minimum(begin + size, stop)
        return cls(begin, end, size, rows, seed, steps, np.repeat(ends, numbers), targets, whole)

    def _follows(self) -> NDArray[np.bool_]:
        series = self.steps.series.numpy()[self.begin]
        return np.r_[False, (self.begin[1:] == self.end[:-1]) & (series[1:] == series[:-1])]

    def batch(self, chosen: Ints, epoch: int | None = None, goes_on: bool | None = None) -> Batch:
        """These windows; epoch: with a second question a step, that of its number."""
        steps, begin, end = self.steps, self.begin[chosen], self.end[chosen]
        place = np.arange(int((end - begin).max()))
        index = np.minimum(begin[:, None] + place, end[:, None] - 1)
        mask = torch.from_numpy(begin[:, None] + place < end[:, None])
        at = torch.from_numpy(index)
        inputs: dict[str, Any] = {**steps.inputs(at), "past": steps.before(at[:, 0])}
        inputs["mask"] = None if bool(mask.all()) else mask
        batch = Batch(inputs, at, mask, self.whole)
        batch.fresh = None if goes_on is None else torch.full((len(chosen),), not goes_on)
        if self.targets is None:
            if steps.target is not None:
                batch.target = torch.where(mask.unsqueeze(-1), steps.target[at], torch.nan)
            if steps.labels is not None:
                series = steps.series[at[:, 0]]
                batch.labels = steps.labels[series] if self.whole else torch.where(mask, steps.labels[at], -1)
            return batch
        asked = self._questions(index, self.limit[chosen], epoch)
        real = mask.unsqueeze(-1) & (asked >= 0)
        about = asked.clamp_min(0)
        inputs["horizon"] = torch.where(real, steps.time[about] - steps.time[at].unsqueeze(-1), 0)
        inputs["horizon"][..., 0] = torch.where(real[..., 0], steps.gaps[about[..., 0]], 0)
        if steps.future.shape[1]:
            inputs["ahead"] = steps.future[about]
        batch.target = torch.where(real.unsqueeze(-1), steps.values[about][..., self.targets], torch.nan)
        centre, scale = (part[at][..., self.targets].unsqueeze(2) for part in (steps.centre, steps.scale))
        batch.units = centre, scale
        return batch

    def _questions(self, index: Ints, limit: Ints, later: int | None) -> Tensor:
        """(B, L, J): the step that each question is about; -1 where there is none."""
        following = index + 1
        if later is None:
            return torch.from_numpy(following)[..., None]
        most = np.minimum(limit[:, None] - 1 - following, self.size)
        share = random_words(self.seed + 1, later, index) / 2.0**64
        further = np.floor(np.exp(share * np.log1p(np.maximum(most, 0)))).astype(np.int64)
        drawn = np.where(most > 0, following + np.minimum(further, most), -1)
        return torch.from_numpy(np.stack([following, drawn], -1))
