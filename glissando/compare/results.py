"""From what was measured of each run to what is reported of each model.

Intervals are of 95 % and have two sources. Rows of the held-out text, which all models share, are drawn with
replacement; differences are taken within each draw, which cancels what is hard or easy for every model alike. To a mean
over S seeds is added

    s / sqrt(S) * t        t drawn from Student's t with S - 1 degrees of freedom

s being the deviation of the seeds: they are so few that drawing them with replacement would give intervals which hold
the truth 69 and 80 times in 100 for two and three. Models of one seed read the same batches in the same order, so that
for a difference s is the deviation of the differences seed by seed, over the seeds of which both trainings ended well.

What a seed does to single rows is in the deviation and in the drawn rows, so that where it does much intervals are a
little wide: they hold the truth 95 to 98 times in 100. With one seed an interval knows nothing of what another seed
would have given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glissando.compare.measure import Rows, metric_rows
from glissando.compare.plan import Comparison, Job
from glissando.errors import RunError
from glissando.evaluation.scoring import wilson

_RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean over seeds and its 95 % interval."""

    value: float
    low: float
    high: float


class Finished(NamedTuple):
    """A training that has been measured, or has failed."""

    job: Job
    path: Path
    figures: dict[str, Any]

    @property
    def failed(self) -> str | None:
        return self.figures.get("failed")


@dataclass
class ModelResult:
    """Everything that the report contains of one model; `runs`, `sweep` and `probes` hold the runs it comes from."""

    model: str
    parameters: int
    learning_rate: float | None
    sweep: list[Finished] = field(default_factory=list)
    runs: list[Finished] = field(default_factory=list)
    probes: dict[str, list[Finished]] = field(default_factory=dict)
    curves: list[Rows] = field(default_factory=list)
    bits: Estimate | None = None
    against_first: Estimate | None = None
    floor: float | None = None  # of the very rows that are reported
    speed: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> list[Finished]:
        """The runs that ended well, from which every figure comes."""
        return [run for run in self.runs if run.failed is None]

    @property
    def excess(self) -> float | None:
        return None if self.bits is None or self.floor is None else self.bits.value - self.floor

    def mean(self, *keys: str) -> float | None:
        """The mean of a figure over the good runs, such as ("spent", "seconds"); None if one lacks it."""
        values: list[Any] = [reduce(getitem, keys, run.figures) for run in self.good]
        return sum(values) / len(values) if values and None not in values else None

    @property
    def is_at_edge(self) -> bool:
        """Whether the chosen rate is the lowest or the highest that was tried: a better one may lie beyond."""
        rates = [run.job.learning_rate for run in self.sweep]
        return len(rates) > 1 and self.learning_rate in (min(rates), max(rates))


# ---------------------------------------------------------------------- which rows


def reported(comparison: Comparison) -> slice:
    """The held-out rows that are reported: those of odd number where the others have chosen learning rates."""
    return slice(1, None, 2) if comparison.sweeps else slice(None)


def bits_on(figures: dict[str, Any], rows: slice) -> float:
    """Bits per byte on some of the held-out rows."""
    scores = figures["held_out"]
    return sum(scores["nats"][rows]) / math.log(2) / sum(scores["bytes"][rows])


def choose(sweep: Sequence[Finished]) -> dict[str, float]:
    """model -> the learning rate of fewest bits per byte on the rows of even number; failed ones cannot win."""
    best: dict[str, tuple[float, float]] = {}
    for run in sweep:
        if run.failed is None:
            candidate = (bits_on(run.figures, slice(0, None, 2)), run.job.learning_rate)
            best[run.job.model] = min(best.get(run.job.model, candidate), candidate)
    return {name: rate for name, (_, rate) in best.items()}


def beyond(comparison: Comparison, tried: Sequence[Finished]) -> list[Job]:
    """The next learning rate to try of each model whose best is the lowest or the highest so far, as far from it as its
    neighbour is, as a factor; below the lowest where all have failed."""
    jobs, best, requested = [], choose(tried), comparison.learning_rates
    for name in comparison.names:
        rates = sorted(run.job.learning_rate for run in tried if run.job.model == name)
        outside = [rate for rate in rates if not min(requested) <= rate <= max(requested)]
        if len(rates) < 2 or len(outside) >= comparison.sweep_beyond:
            continue
        edge = best.get(name, rates[0])
        neighbour = {rates[0]: rates[1], rates[-1]: rates[-2]}.get(edge)
        if neighbour is not None and (further := float(f"{edge * edge / neighbour:.4g}")) not in rates:
            jobs.append(Job("sweep", name, 0, further))
    return jobs


# ---------------------------------------------------------------------- intervals


#: (S, R) numerators and denominators of the held-out rows, a row of the array for each seed
Sums = tuple[np.ndarray, np.ndarray]


def estimate(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Mean over seeds of sum(above) / sum(below), above and below (S, R)."""
    each = _ratios((above, below))
    low, high = _interval(_drawn([(above, below)])[0], *_error(each))
    return Estimate(float(each.mean()), low, high)


def difference(a: Sums, b: Sums) -> Estimate:
    """estimate(a) - estimate(b) on the same rows; seed s of both read the same batches in the same order.

    Raises RunError where the rows are not the same in number.
    """
    if a[0].shape != b[0].shape:
        raise RunError(f"the models were scored on {a[0].shape[1]} and {b[0].shape[1]} held-out rows; train them again")
    each = _ratios(a) - _ratios(b)
    first, second = _drawn([a, b])
    low, high = _interval(first - second, *_error(each))
    return Estimate(float(each.mean()), low, high)


def _ratios(of: Sums) -> np.ndarray:
    """(S,) the figure of each seed."""
    return of[0].sum(1) / of[1].sum(1)


def _drawn(models: Sequence[Sums]) -> list[np.ndarray]:
    """(resamples,) of each model, the mean over its seeds on rows that are drawn once for all."""
    rows = models[0][0].shape[1]
    counts = np.random.default_rng(0).multinomial(rows, np.full(rows, 1 / rows), size=_RESAMPLES)
    return [(counts @ above.T / (counts @ below.T)).mean(1) for above, below in models]


def _error(each: np.ndarray) -> tuple[float, float]:
    """Standard error of the mean of (S,) and its degrees of freedom; nothing is known of a single one's."""
    if len(each) < 2:
        return 0.0, 1.0
    return float(each.std(ddof=1)) / math.sqrt(len(each)), len(each) - 1


def _interval(drawn: np.ndarray, error: float, freedom: float) -> tuple[float, float]:
    """What holds 95 of 100 of the draws, to each of which is added what other seeds would have made of it."""
    others = error * np.random.default_rng((0, 1)).standard_t(freedom, len(drawn))
    low, high = np.quantile(drawn + others, [0.025, 0.975]).tolist()
    return low, high


def sums(runs: Sequence[Finished], above: str, below: str, rows: slice) -> Sums:
    """(S, R) of two columns of the held-out rows, runs without a failure alone; rows that score nothing left out."""
    scores = [run.figures["held_out"] for run in runs if run.failed is None]
    a = np.asarray([h[above][rows] for h in scores], float)
    b = np.asarray([h[below][rows] for h in scores], float)
    scored = b[0] > 0
    return a[:, scored], b[:, scored]


# ---------------------------------------------------------------------- all of it


def gather(
    comparison: Comparison, sweep: Sequence[Finished], runs: Sequence[Finished], probes: Sequence[Finished],
    chosen: dict[str, float], speed: dict[str, Any],
) -> list[ModelResult]:  # fmt: skip
    """Every model's result, from its finished trainings."""
    counts, results, rows = comparison.parameters(), list[ModelResult](), reported(comparison)
    for name in comparison.names:
        result = ModelResult(name, counts[name], chosen.get(name), speed=speed.get(name, {}))
        result.sweep, result.runs = ([run for run in those if run.job.model == name] for those in (sweep, runs))
        for task in comparison.probes:
            own_probes = [run for run in probes if run.job.model == name and run.job.task == task]
            result.probes |= {task: own_probes} if own_probes else {}
        if result.good:
            result.curves = [metric_rows(run.path) for run in result.good]
            bits, n_bytes = bits_and_bytes(result.good, rows)
            result.bits = estimate(bits, n_bytes)
            floors = result.good[0].figures["held_out"]["floor_bits"]
            result.floor = None if floors is None else sum(floors[rows]) / float(n_bytes[0].sum())
            result.against_first = against(result, results[0], comparison) if results else None
        results.append(result)
    return results


def against(one: ModelResult, other: ModelResult, comparison: Comparison) -> Estimate | None:
    """The difference of two models in bits per byte, over the seeds that both have; None where they share none."""
    seeds = {run.job.seed for run in one.good} & {run.job.seed for run in other.good}
    if not seeds:
        return None
    sides = [[run for run in result.good if run.job.seed in seeds] for result in (one, other)]
    first, second = (bits_and_bytes(runs, reported(comparison)) for runs in sides)
    return difference(first, second)


def bits_and_bytes(runs: Sequence[Finished], rows: slice) -> Sums:
    """(S, R) bits and bytes of the held-out rows."""
    nats, n_bytes = sums(runs, "nats", "bytes", rows)
    return nats / math.log(2), n_bytes


def accuracy(runs: Sequence[Finished]) -> Estimate | None:
    """Accuracy on a probe, at least as wide as Wilson's interval; None where no training of it ended well."""
    good = [run for run in runs if run.failed is None]
    if not good:
        return None
    correct, targets = sums(good, "correct", "targets", slice(None))
    drawn, least = estimate(correct, targets), wilson(int(correct.sum()), int(targets.sum()))
    return drawn._replace(low=max(0.0, min(drawn.low, least[0])), high=min(1.0, max(drawn.high, least[1])))
