"""Hawkes processes, whose likelihood is known exactly: what a model of events can reach at best.

    lambda_k(t)  events of kind k in a unit of time, given all events before t
    log p = sum_i log lambda_{k_i}(t_i) - integral of sum_k lambda_k from 0 to the end

    lambda_k(t) = mu_k + sum_{t_i < t} n_{k k_i} b_{k k_i} exp(-b_{k k_i} (t - t_i))

An event of kind j is followed by n_kj of kind k on average, at exponential delays. A process is drawn as the clusters
that it is made of, and its likelihood is computed from the intensities: the two share no line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from glissando.errors import unknown_name

#: columns with the log-likelihood of the truth, which `glissando events evaluate` compares with the model's
TRUTH_TIME, TRUTH_KIND, TRUTH_END = "truth_time", "truth_kind", "truth_end"
#: digits after the point that times are written with
_DIGITS = 6


class Truth(NamedTuple):
    """The log-likelihood of one series, whose observation begins at 0, in nats.

    time    (N,) log p(t_i | the events before)
    kind    (N,) log p(k_i | t_i and the events before)
    end     log-probability that nothing follows the last event before the end
    """

    time: np.ndarray
    kind: np.ndarray
    end: float


class Hawkes:
    """K kinds of events between 0 and `end` that excite others; `branching` and `rate`, of the delays, are (K, K), the
    row that is excited."""

    def __init__(self, about: str, end: float, base: np.ndarray, branching: np.ndarray, rate: np.ndarray) -> None:
        self.about, self.end, self.kinds = about, end, len(base)
        self.base, self.branching, self.rate = base, branching, rate

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ascending times (N,) and kinds (N,) of one series: immigrants at the base rates, then the children of each
        generation until there are none."""
        kinds = np.repeat(np.arange(self.kinds), rng.poisson(self.base * self.end))
        times = rng.uniform(0, self.end, len(kinds))
        every = [(times, kinds)]
        while len(times):
            children = rng.poisson(self.branching[:, kinds])  # (K, N)
            target, parent = (
                np.repeat(index, children.ravel()) for index in np.divmod(np.arange(children.size), len(times))
            )
            times, kinds = times[parent] + rng.exponential(1 / self.rate[target, kinds[parent]]), target
            kept = times < self.end
            times, kinds = times[kept], kinds[kept]
            every.append((times, kinds))
        times, kinds = (np.concatenate(part) for part in zip(*every, strict=True))
        order = np.argsort(times)
        return times[order], kinds[order]

    def intensities(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """lambda_k (M, K) at the times `at` (M,), given the events before each."""
        lag, rate, made = at[:, None] - times, self.rate[:, kinds], []
        for k in range(self.kinds):
            density = rate[k] * np.exp(-rate[k] * lag.clip(0))
            made.append(self.base[k] + np.where(lag > 0, density, 0.0) @ self.branching[k, kinds])
        return np.stack(made, 1)

    def compensator(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """The integral (M,) of the sum of intensities from 0 to each of `at` (M,), which ascend."""
        lag, rate = (at[:, None] - times).clip(0), self.rate[:, kinds]
        excited = sum(-np.expm1(-rate[k] * lag) @ self.branching[k, kinds] for k in range(self.kinds))
        return self.base.sum() * at + excited

    def truth(self, times: np.ndarray, kinds: np.ndarray) -> Truth:
        """The log-likelihood of the events of one series."""
        each = self.intensities(times, times, kinds)
        total = each.sum(1)
        passed = np.diff(self.compensator(np.append(times, self.end), times, kinds), prepend=0.0)
        chosen = each[np.arange(len(times)), kinds]
        return Truth(np.log(total) - passed[:-1], np.log(chosen / total), -float(passed[-1]))


def _five() -> Hawkes:
    """Each kind excites itself and the next, some others too; the largest eigenvalue is 0.8."""
    base = np.array([0.05, 0.08, 0.02, 0.1, 0.05])
    branching = 0.3 * np.eye(5) + 0.4 * np.roll(np.eye(5), 1, axis=1)
    branching[0, 3], branching[4, 1] = 0.2, 0.1
    branching *= 0.8 / np.abs(np.linalg.eigvals(branching)).max()
    rates = np.random.default_rng(5).uniform(0.3, 4.0, (5, 5))
    return Hawkes("Hawkes process of five kinds, exponential kernels", 160.0, base, branching, rates)


_ONE = np.ones((1, 1))
#: processes by name
PROCESSES: dict[str, Hawkes] = {
    "hawkes1": Hawkes("Hawkes process of one kind, exponential kernel", 250.0, np.array([0.2]), 0.8 * _ONE, _ONE),
    "hawkes5": _five(),
}


def process_of(name: str) -> Hawkes:
    """The process of a name in PROCESSES."""
    if name not in PROCESSES:
        raise unknown_name("process", name, PROCESSES)
    return PROCESSES[name]


def drawn(process: Hawkes, count: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, Truth]]:
    """The times (N,), as they are written, and kinds (N,) of `count` series of a process, and what was likely; no two
    times of a series are equal."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        times, kinds = process.draw(rng)
        ticks = np.rint(times * 10**_DIGITS).astype(np.int64).clip(1)
        steps = np.arange(len(ticks))
        times = (np.maximum.accumulate(ticks - steps) + steps) / 10**_DIGITS  # ascending in the last digit too
        times, kinds = times[times < process.end], kinds[times < process.end]
        yield times, kinds, process.truth(times, kinds)


def table(name: str, count: int, seed: int = 0) -> str:
    """A CSV of series, time, kind, end of observation, and the truth's log-likelihood of time, kind and end."""
    process = process_of(name)
    lines = [f"series,time,kind,end,{TRUTH_TIME},{TRUTH_KIND},{TRUTH_END}"]
    for number, (times, kinds, truth) in enumerate(drawn(process, count, seed)):
        for t, k, at, of in zip(times, kinds, truth.time, truth.kind, strict=True):
            letter = chr(ord("a") + k)
            lines.append(f"{number},{t:.{_DIGITS}f},{letter},{process.end:g},{at:.6f},{of:.6f},{truth.end:.6f}")
    return "\n".join(lines) + "\n"
