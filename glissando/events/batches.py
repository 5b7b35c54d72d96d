"""The steps of a log as a model reads them, what comes after each, and their windows in batches.

At each step a model predicts whether another event comes at the same time, else the wait until the next event and its
kind. Where something else comes first, values, the start of prediction or the end of observation, all that is known is
that the wait was longer: it is censored there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.data.windows import BatchedWindows
from glissando.errors import DataError
from glissando.events.log import FIRST, EventEncoding, EventLog
from glissando.events.options import EventsData
from glissando.series.batches import Floats, Ints
from glissando.series.history import Past, history
from glissando.series.panel import SECONDS

#: the smallest deviation of a column, and median gap: below it, float32 divides by zero
_SMALLEST = 1e-30


class Scales(NamedTuple):
    """Units of what is trained on, as EventModel.set_scales takes them.

    time_scale            the median positive gap between steps
    log_mean, log_scale   of the logarithm of positive gaps in time scales
    wait_mean, wait_scale of the logarithm of waits that end with an event
    """

    mark_mean: Floats
    mark_scale: Floats
    value_mean: Floats
    value_scale: Floats
    static_mean: Floats
    static_scale: Floats
    time_scale: float
    log_mean: float
    log_scale: float
    wait_mean: float
    wait_scale: float


class After(NamedTuple):
    """What comes after each of n steps; nothing of it is read.

    series  (n,) of the step
    wait    (n,) time to the next event, or to what comes before one; 0 where there is none to score
    within  (n,) time within which it is known that nothing came, as prediction starts then
    kind    (n,) the next event's index among the predicted kinds; -1: the wait is censored, or not scored
    tie     (n,) 1: the next event is at the same time; 0: none is; -1: not scored
    end     (n,) bool: the wait is censored by the end of observation
    last    (n,) the predicted kind of the step itself; -1 where it is no such event
    phase   (n,) fraction of the week that has passed at the step; None without a clock
    kinds, resolution, week   K, r, and the length of a week in the unit of the times
    """

    series: Ints
    wait: Floats
    within: Floats
    kind: Ints
    tie: Ints
    end: np.ndarray
    last: Ints
    phase: Floats | None
    kinds: int
    resolution: float = 0.0
    week: float = SECONDS["w"]

    @classmethod
    def of(cls, log: EventLog, encoding: EventEncoding) -> After:
        count, series, kinds = len(log.times), log.series, len(encoding.kinds)
        last = np.zeros(count, bool)
        last[log.starts[1:] - 1] = True
        following = np.minimum(np.arange(count) + 1, count - 1)
        comes = log.scored[following] & ~last
        kind = np.where(comes, log.codes[following] - FIRST, -1)
        gap = np.where(last, log.until[series] - log.times, log.gaps[following])
        within = np.maximum(log.since[series] - log.times, 0.0)
        end = last & log.ended[series] & (gap > within)
        observed = (~last | end) & (gap > within)
        tied = comes & (gap == 0)
        may_tie = log.scored if encoding.ties else np.zeros(count, bool)
        itself = log.codes - FIRST
        return cls(
            series, np.where(observed, gap, 0.0), np.where(observed, within, 0.0), np.where(tied & ~may_tie, -1, kind),
            np.where(may_tie, np.where(tied, 1, 0), -1), end, np.where((itself >= 0) & (itself < kinds), itself, -1),
            log.phases[:, 1] if encoding.clock else None, kinds, encoding.resolution,
            SECONDS["w"] / SECONDS[encoding.unit],
        )  # fmt: skip

    def scored(self) -> After:
        """What comes after the scored steps alone."""
        return self.at(np.flatnonzero(self.is_scored))

    def at(self, index: Ints) -> After:
        parts: list[Any] = [part[index] if isinstance(part, np.ndarray) else part for part in self]
        return After(*parts)

    @property
    def is_scored(self) -> np.ndarray:
        return (self.wait > 0) | (self.tie >= 0)

    @property
    def is_event(self) -> np.ndarray:
        return self.kind >= 0

    @property
    def arrives(self) -> np.ndarray:
        """(n,) bool: the next event comes after a wait."""
        return self.is_event & (self.tie != 1)

    @property
    def events(self) -> int:
        return int(self.is_event.sum())

    @property
    def weight(self) -> int:
        """Events and ends of observation."""
        return self.events + int(self.end.sum())


def scales(log: EventLog, encoding: EventEncoding) -> Scales:
    """Reads the scales from the training log. Raises DataError for times that float32 cannot hold."""
    after, channels = After.of(log, encoding), list[Any]()
    for values in (log.marks, log.values, log.static):
        with np.errstate(invalid="ignore"):
            counts = (~np.isnan(values)).sum(0)
            mean = np.nansum(values, 0) / np.maximum(counts, 1)
            scale = np.sqrt(np.nansum((values - mean) ** 2, 0) / np.maximum(counts, 1))
        channels += [mean, np.where(scale > np.maximum(1e-6 * np.abs(mean), _SMALLEST), scale, 1.0)]
    gaps = log.gaps[log.gaps > 0]
    waits = after.wait[after.is_event & (after.wait > 0)]
    waits = waits if len(waits) else np.ones(1)
    gaps = gaps if len(gaps) else waits
    step = float(np.median(gaps))
    if step < _SMALLEST:
        raise DataError(
            f"{log.source}: the median gap {step:.3g} is too small for float32: multiply the times by a constant"
        )
    for each in (gaps, waits):
        logs = np.log(each / step)
        channels += [float(logs.mean()), max(float(logs.std()), 1e-3)]
    return Scales._make([*channels[:6], step, *channels[6:]])


@dataclass(frozen=True)
class Steps:
    """N steps of S series, one series after the other, tensors on the CPU.

    inputs  (N, ...) what the model is called with at each step, by name
    facts   (S, ...) of each series
    known   (N, K) each: what is known of the values after each step, in the model's units
    """

    series: Tensor  # (N,)
    first: Tensor  # (N,) bool
    inputs: dict[str, Tensor]
    facts: dict[str, Tensor]
    known: Past
    after: After

    @classmethod
    def of(cls, log: EventLog, encoding: EventEncoding, units: Any) -> Steps:
        """units: Scales, or the model that has them."""
        first = np.zeros(len(log.times), bool)
        first[log.starts[:-1]] = True
        begins = torch.from_numpy(first)
        columns = {
            "codes": log.codes, "dt": log.gaps, "marks": log.marks, "mark_codes": log.mark_codes, "values": log.values,
            "phases": log.phases if encoding.clock else log.phases[:, :0],
        }  # fmt: skip
        inputs = {name: torch.from_numpy(part) for name, part in columns.items() if part.ndim == 1 or part.shape[1]}
        facts = {"static": log.static, "static_codes": log.static_codes}
        parts = units.value_mean, units.value_scale, units.time_scale
        mean, scale, step = (torch.as_tensor(part).double().cpu() for part in parts)
        scaled, gaps = (torch.from_numpy(log.values)[None] - mean) / scale, torch.from_numpy(log.gaps)[None] / step
        known = history(scaled, ~scaled.isnan(), gaps, first=begins[None])
        return cls(
            torch.from_numpy(log.series), begins, inputs,
            {name: torch.from_numpy(part) for name, part in facts.items() if part.shape[1]},
            Past(*(part[0] for part in known)), After.of(log, encoding),
        )  # fmt: skip

    def inputs_at(self, index: Ints, real: np.ndarray) -> dict[str, Any]:
        """What the model is called with at the steps (B, L), those that are `real`, each row of one series."""
        at = torch.from_numpy(index)
        inputs: dict[str, Any] = {name: part[at] for name, part in self.inputs.items()}
        inputs |= {name: part[self.series[at[:, 0]]] for name, part in self.facts.items()}
        inputs["mask"] = None if bool(real.all()) else torch.from_numpy(real)
        if "values" in inputs:
            inputs["past"] = self.before(at[:, 0])
        return inputs

    def before(self, index: Tensor) -> Past:
        """What is known of the values before each of the steps."""
        previous = (index - 1).clamp_min(0)
        return Past(*(torch.where(self.first[index].unsqueeze(-1), 0, part[previous]) for part in self.known))


class Targets(NamedTuple):
    """What comes after n scored steps: as After, tensors; `place` (n,) is where each is among the B * L of a batch."""

    place: Tensor
    wait: Tensor
    within: Tensor
    kind: Tensor
    tie: Tensor
    last: Tensor


@dataclass  # not frozen: Fabric converts its tensors where the precision is not 32-true
class Batch:
    """B windows of L steps, the last ones padded.

    inputs   what the model is called with, by name
    index    (n,) of Steps, of each scored step
    targets  of the scored steps
    weight   events and ends of observation among them
    fresh    (B,) bool, in lanes: rows that do not go on where the row before ended
    """

    inputs: dict[str, Any]
    index: Tensor
    targets: Targets
    weight: int
    fresh: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.inputs["codes"])


@dataclass(frozen=True)
class Windows(BatchedWindows[Batch]):
    """Windows of steps; those before `scored` (W,) are read alone, so that what follows knows its past."""

    steps: Steps
    scored: Ints

    @classmethod
    def of(cls, steps: Steps, data: EventsData, warm: int) -> Windows:
        """The windows over all scored steps, each with `warm` earlier ones, as far as its series has them; the first
        window of a series has as many as data.window."""
        used, size = steps.after.is_scored, data.window
        begins = np.flatnonzero(steps.first.numpy())
        ends = np.r_[begins[1:], len(used)]
        begin, scored, end = [], [], []
        for first, stop in zip(begins, ends, strict=True):
            places = np.flatnonzero(used[first:stop])
            if not len(places):
                continue
            low, high = first + places[0], first + places[-1] + 1
            cuts = np.arange(low, high, size)
            begin.append(np.maximum(cuts - np.where(cuts == low, max(size, warm), warm), first))
            scored.append(cuts)
            end.append(np.minimum(cuts + size, high))
        if not begin:
            raise DataError("there is nothing to score: no event comes after the start of prediction")
        joined = np.concatenate(begin), np.concatenate(end)
        return cls(*joined, size, data.batch_size, data.seed, steps, np.concatenate(scored))

    def _follows(self) -> np.ndarray:
        series = self.steps.series.numpy()[self.scored]
        return np.r_[False, (self.scored[1:] == self.end[:-1]) & (series[1:] == series[:-1])]

    def batch(self, chosen: Ints, epoch: int | None = None, goes_on: bool | None = None) -> Batch:
        """goes_on: without the earlier steps, which the state has read."""
        steps, after = self.steps, self.steps.after
        begin, scored, end = self.begin[chosen], self.scored[chosen], self.end[chosen]
        begin = scored if goes_on else begin
        place = begin[:, None] + np.arange(int((end - begin).max()))
        real = place < end[:, None]
        index = np.minimum(place, end[:, None] - 1)
        inputs = steps.inputs_at(index, real)
        where = np.flatnonzero(real & (place >= scored[:, None]) & after.is_scored[index])
        chosen_steps = index.reshape(-1)[where]
        came = after.at(chosen_steps)
        parts = (where, came.wait, came.within, came.kind, came.tie, came.last)
        fresh = None if goes_on is None else torch.full((len(chosen),), not goes_on)
        targets = Targets(*(torch.from_numpy(part) for part in parts))
        return Batch(inputs, torch.from_numpy(chosen_steps), targets, came.weight, fresh)
