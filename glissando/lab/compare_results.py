"""From what was measured of each run to what is said of each model.

Intervals are 95 %, for what two things would do. Rows of the held-out text, which all models share, are drawn with
replacement; differences are taken within each draw, which cancels what is hard or easy for every model alike. To a mean
over S seeds is added s / sqrt(S) times a draw of Student's t with S - 1 degrees of freedom, s being their deviation:
seeds are so few that drawing them with replacement would give intervals which hold the truth 69 and 80 times in 100
for two and three. With one seed an interval knows nothing of what another seed would have given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glissando.errors import RunError
from glissando.evaluation.scoring import wilson
from glissando.lab.compare_measure import Rows, metric_rows, read_measured
from glissando.lab.compare_plan import Comparison, Job

_RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean over seeds, its 95 % interval, and each seed's own value."""

    value: float
    low: float
    high: float
    seeds: tuple[float, ...] = ()


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
    """Everything that the report says of one model; `runs`, `sweep` and `probes` hold the runs it comes from."""

    preset: str
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
    def excess(self) -> float | None:
        return None if self.bits is None or self.floor is None else self.bits.value - self.floor

    def mean(self, *keys: str) -> float | None:
        """Of one figure over the runs, such as ("epiplexity", "bits")."""
        values = [_inside(run.figures, keys) for run in self.runs if run.failed is None]
        return sum(values) / len(values) if values else None

    def at_edge(self) -> str | None:
        """`lowest` or `highest` where the chosen rate is the last one tried: a better one may lie beyond."""
        rates = sorted(run.job.learning_rate for run in self.sweep)
        if len(rates) < 2 or self.learning_rate not in (rates[0], rates[-1]):
            return None
        return "lowest" if self.learning_rate == rates[0] else "highest"


def _inside(values: Any, keys: Sequence[str]) -> float:
    for key in keys:
        values = values[key]
    return float(values)


# ---------------------------------------------------------------------- which rows


def reported(comparison: Comparison) -> slice:
    """The held-out rows that are reported: those of odd number where the others have chosen learning rates."""
    return slice(1, None, 2) if comparison.sweeps else slice(None)


def bits_on(figures: dict[str, Any], rows: slice) -> float:
    """Bits per byte on some of the held-out rows. Raises RunError where they hold nothing to score."""
    held = figures["held_out"]
    n_bytes = sum(held["bytes"][rows])
    if not n_bytes:
        raise RunError("the held-out text has a single row, and a sweep needs rows to choose by and others to report")
    return sum(held["nats"][rows]) / math.log(2) / n_bytes


def choose(sweep: Sequence[Finished]) -> dict[str, float]:
    """preset -> the learning rate of fewest bits per byte on the rows of even number; failed ones cannot win."""
    best: dict[str, tuple[float, float]] = {}
    for run in sweep:
        if run.failed is None:
            candidate = (bits_on(run.figures, slice(0, None, 2)), run.job.learning_rate)
            best[run.job.preset] = min(best.get(run.job.preset, candidate), candidate)
    return {preset: rate for preset, (_, rate) in best.items()}


# ---------------------------------------------------------------------- intervals


def estimate(above: np.ndarray, below: np.ndarray, seed: int = 0) -> Estimate:
    """Mean over seeds of sum(above) / sum(below), above and below (S, R)."""
    each = above.sum(1) / below.sum(1)
    draws = _draws(above, below, seed)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return Estimate(float(each.mean()), low, high, tuple(each.tolist()))


def difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray], seed: int = 0) -> Estimate:
    """estimate(a) - estimate(b) on the same rows. Raises RunError where these are not the same in number."""
    if a[0].shape[1] != b[0].shape[1]:
        raise RunError(f"the models were scored on {a[0].shape[1]} and {b[0].shape[1]} held-out rows; train them anew")
    value = (a[0].sum(1) / a[1].sum(1)).mean() - (b[0].sum(1) / b[1].sum(1)).mean()
    # The same generator seed draws the same rows; what seeds do is drawn for each model apart.
    draws = _draws(*a, seed) - _draws(*b, seed, stream=1)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return Estimate(float(value), low, high)


def _draws(above: np.ndarray, below: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """(resamples,) means over seeds of the ratios on drawn rows, and what other seeds would have made of them."""
    seeds, rows = above.shape
    counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=_RESAMPLES)
    total = counts @ below.T
    ratios = np.divide(counts @ above.T, total, out=np.full(total.shape, np.nan), where=total > 0)
    means = ratios.mean(1)
    if seeds > 1:
        spread = (above.sum(1) / below.sum(1)).std(ddof=1) / math.sqrt(seeds)
        means = means + spread * np.random.default_rng((seed, 1 + stream)).standard_t(seeds - 1, _RESAMPLES)
    return means[np.isfinite(means)]


def sums(runs: Sequence[Finished], above: str, below: str, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """(S, R) of two columns of the held-out rows, runs without a failure alone; rows that score nothing left out."""
    held = [run.figures["held_out"] for run in runs if run.failed is None]
    a = np.asarray([h[above][rows] for h in held], float)
    b = np.asarray([h[below][rows] for h in held], float)
    scored = b[0] > 0
    return a[:, scored], b[:, scored]


# ---------------------------------------------------------------------- all of it


def gather(comparison: Comparison, chosen: dict[str, float], speed: dict[str, Any]) -> list[ModelResult]:
    """Every model's result, from the files of finished runs; what is not trained yet is left out."""
    sweep, runs = (_finished(comparison, jobs) for jobs in (comparison.sweep_jobs(), comparison.run_jobs(chosen)))
    probes = _finished(comparison, comparison.probe_jobs(chosen))
    counts, results = comparison.parameters(), list[ModelResult]()
    for preset in comparison.presets:
        result = ModelResult(preset, counts[preset], chosen.get(preset), speed=speed.get(preset, {}))
        result.sweep = [run for run in sweep if run.job.preset == preset]
        result.runs = [run for run in runs if run.job.preset == preset]
        for task in comparison.probes:
            mine = [run for run in probes if run.job.preset == preset and run.job.task == task]
            result.probes |= {task: mine} if mine else {}
        _summarise(result, comparison, results[0] if results else None)
        results.append(result)
    return results


def _finished(comparison: Comparison, jobs: Sequence[Job]) -> list[Finished]:
    found = [(job, job.path(comparison.out)) for job in jobs]
    return [Finished(job, path, figures) for job, path in found if (figures := read_measured(path)) is not None]


def _summarise(result: ModelResult, comparison: Comparison, first: ModelResult | None) -> None:
    good = [run for run in result.runs if run.failed is None]
    if not good:
        return
    rows = reported(comparison)
    result.curves = [metric_rows(run.path) for run in good]
    nats, n_bytes = sums(good, "nats", "bytes", rows)
    bits = nats / math.log(2)
    result.bits = estimate(bits, n_bytes)
    floors = good[0].figures["held_out"]["floor_bits"]
    if floors is not None:
        result.floor = sum(floors[rows]) / float(n_bytes[0].sum())
    if first is not None and first.bits is not None:
        theirs, their_bytes = sums(first.runs, "nats", "bytes", rows)
        result.against_first = difference((bits, n_bytes), (theirs / math.log(2), their_bytes))


def accuracy(runs: Sequence[Finished]) -> Estimate | None:
    """Of the answers of a probe, at least as wide as Wilson's interval; None where no training of it ended well."""
    good = [run for run in runs if run.failed is None]
    if not good:
        return None
    correct, targets = sums(good, "correct", "targets", slice(None))
    drawn, least = estimate(correct, targets), wilson(int(correct.sum()), int(targets.sum()))
    return drawn._replace(low=max(0.0, min(drawn.low, least[0])), high=min(1.0, max(drawn.high, least[1])))
