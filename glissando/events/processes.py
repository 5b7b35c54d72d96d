"""Point processes whose likelihood is known exactly: what a model of events can reach at best.

    lambda_k(t)  events of kind k in a unit of time, given all events before t
    log p = sum_i log lambda_{k_i}(t_i) - integral of sum_k lambda_k from 0 to the end

hawkes1, hawkes5        lambda_k(t) = mu_k + sum_{t_i < t} n_{k k_i} g(t - t_i), where an event of kind j is followed by
                        n_kj of kind k on average, at delays of density g: exponential
powerlaw1, powerlaw5    the same with g(s) = theta c^theta / (s + c)^(1 + theta)
renewal                 Weibull waits, independent of each other; long ones end in another kind than short ones
poisson                 two kinds whose rates follow a period of 24, independent of all events

A Hawkes process is drawn as the clusters that it is made of, and its likelihood is computed from the intensities: the
two share no line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from glissando.errors import ConfigError, nearest


class Truth(NamedTuple):
    """The log-likelihood of one series, whose observation begins at 0, in nats.

    time    (N,) log p(t_i | the events before)
    kind    (N,) log p(k_i | t_i and the events before)
    end     log-probability that nothing follows the last event before the end
    likely  (N,) the most likely kind at t_i
    """

    time: np.ndarray
    kind: np.ndarray
    end: float
    likely: np.ndarray


class Process(ABC):
    """K kinds of events between 0 and `end`."""

    kinds: int
    end: float
    about: str

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ascending times (N,) and kinds (N,) of one series."""

    @abstractmethod
    def intensities(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """lambda_k (M, K) at the times `at` (M,), given the events before each."""

    @abstractmethod
    def compensator(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """The integral (M,) of the sum of intensities from 0 to each of `at` (M,), which ascend."""

    def truth(self, times: np.ndarray, kinds: np.ndarray) -> Truth:
        """The log-likelihood of the events of one series."""
        each = self.intensities(times, times, kinds)
        total = each.sum(1)
        passed = np.diff(self.compensator(np.append(times, self.end), times, kinds), prepend=0.0)
        chosen = each[np.arange(len(times)), kinds]
        return Truth(np.log(total) - passed[:-1], np.log(chosen / total), -float(passed[-1]), each.argmax(1))


class Hawkes(Process):
    """Events that excite others; `branching` and the parameters of the kernel are (K, K), the row that is excited."""

    def __init__(self, about: str, end: float, base: np.ndarray, branching: np.ndarray, kernel: Kernel) -> None:
        self.about, self.end, self.kinds = about, end, len(base)
        self.base, self.branching, self.kernel = base, branching, kernel

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Immigrants at the base rates, then the children of each generation until there are none."""
        kinds = np.repeat(np.arange(self.kinds), rng.poisson(self.base * self.end))
        times = rng.uniform(0, self.end, len(kinds))
        every = [(times, kinds)]
        while len(times):
            children = rng.poisson(self.branching[:, kinds])  # (K, N)
            target, parent = (
                np.repeat(index, children.ravel()) for index in np.divmod(np.arange(children.size), len(times))
            )
            times, kinds = times[parent] + self.kernel.delays(rng, target, kinds[parent]), target
            kept = times < self.end
            times, kinds = times[kept], kinds[kept]
            every.append((times, kinds))
        times, kinds = (np.concatenate(part) for part in zip(*every, strict=True))
        order = np.argsort(times)
        return times[order], kinds[order]

    def intensities(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        lag = at[:, None] - times
        made = [
            self.base[k] + np.where(lag > 0, self.kernel.density(lag.clip(0), k, kinds), 0.0) @ self.branching[k, kinds]
            for k in range(self.kinds)
        ]
        return np.stack(made, 1)

    def compensator(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        lag = (at[:, None] - times).clip(0)
        excited = sum(self.kernel.integral(lag, k, kinds) @ self.branching[k, kinds] for k in range(self.kinds))
        return self.base.sum() * at + excited


class Kernel(ABC):
    """A density of delays, for each kind that is excited and each that excites."""

    @abstractmethod
    def density(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def integral(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def delays(self, rng: np.random.Generator, target: np.ndarray, source: np.ndarray) -> np.ndarray: ...


class Exponential(Kernel):
    """g(s) = b exp(-b s)."""

    def __init__(self, rate: np.ndarray) -> None:
        self.rate = rate

    def density(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray:
        rate = self.rate[target, source]
        return rate * np.exp(-rate * lag)

    def integral(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray:
        return -np.expm1(-self.rate[target, source] * lag)

    def delays(self, rng: np.random.Generator, target: np.ndarray, source: np.ndarray) -> np.ndarray:
        return rng.exponential(1 / self.rate[target, source])


class PowerLaw(Kernel):
    """g(s) = theta c^theta / (s + c)^(1 + theta)."""

    def __init__(self, shift: np.ndarray, power: float) -> None:
        self.shift, self.power = shift, power

    def density(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray:
        shift = self.shift[target, source]
        return self.power / shift * (1 + lag / shift) ** (-1 - self.power)

    def integral(self, lag: np.ndarray, target: int, source: np.ndarray) -> np.ndarray:
        return -np.expm1(-self.power * np.log1p(lag / self.shift[target, source]))

    def delays(self, rng: np.random.Generator, target: np.ndarray, source: np.ndarray) -> np.ndarray:
        return self.shift[target, source] * np.expm1(rng.exponential(1 / self.power, len(target)))


class Renewal(Process):
    """Weibull waits of a `shape` and a `scale`; after a wait w the second kind has probability w / (w + scale)."""

    kinds = 2

    def __init__(self, about: str, end: float, shape: float, scale: float) -> None:
        self.about, self.end, self.shape, self.scale = about, end, shape, scale

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        waits = self.scale * rng.weibull(self.shape, int(4 * self.end / self.scale) + 100)
        times = waits.cumsum()
        waits, times = waits[times < self.end], times[times < self.end]
        return times, (rng.random(len(waits)) < waits / (waits + self.scale)).astype(np.int64)

    def intensities(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        wait = self._since(at, times) / self.scale
        total = self.shape / self.scale * wait ** (self.shape - 1)
        return np.stack([total / (1 + wait), total * wait / (1 + wait)], 1)

    def compensator(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        whole = np.append(0.0, ((np.diff(times, prepend=0.0) / self.scale) ** self.shape).cumsum())
        before = np.searchsorted(times, at)
        return whole[before] + (self._since(at, times) / self.scale) ** self.shape

    def _since(self, at: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Time (M,) since the last event before."""
        return at - np.append(0.0, times)[np.searchsorted(times, at)]


class Poisson(Process):
    """lambda_k(t) = rate_k (1 + swing sin(2 pi t / period + phase_k)), with 0 <= swing <= 1."""

    def __init__(
        self, about: str, end: float, rate: np.ndarray, swing: float, period: float, phase: np.ndarray
    ) -> None:
        self.about, self.end, self.kinds, self.rate = about, end, len(rate), rate
        self.swing, self.turn, self.phase = swing, 2 * np.pi / period, phase

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Thinned draws at the highest rates."""
        kinds = np.repeat(np.arange(self.kinds), rng.poisson(self.rate * (1 + self.swing) * self.end))
        times = rng.uniform(0, self.end, len(kinds))
        order = np.argsort(times)
        times, kinds = times[order], kinds[order]
        share = self.intensities(times, times, kinds)[np.arange(len(times)), kinds] / self.rate[kinds]
        kept = rng.random(len(times)) * (1 + self.swing) < share
        return times[kept], kinds[kept]

    def intensities(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        return self.rate * (1 + self.swing * np.sin(self.turn * at[:, None] + self.phase))

    def compensator(self, at: np.ndarray, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        waves = np.cos(self.phase) - np.cos(self.turn * at[:, None] + self.phase)
        return self.rate.sum() * at + self.swing / self.turn * waves @ self.rate


def _five() -> tuple[np.ndarray, np.ndarray]:
    """Base rates and branching of five kinds: each excites itself and the next, some others too; the largest eigenvalue
    is 0.8."""
    base = np.array([0.05, 0.08, 0.02, 0.1, 0.05])
    branching = 0.3 * np.eye(5) + 0.4 * np.roll(np.eye(5), 1, axis=1)
    branching[0, 3], branching[4, 1] = 0.2, 0.1
    return base, branching * (0.8 / np.abs(np.linalg.eigvals(branching)).max())


def _processes() -> dict[str, Process]:
    base, branching = _five()
    one = np.ones((1, 1))
    draws = np.random.default_rng(5)
    rates, shifts = draws.uniform(0.3, 4.0, (5, 5)), draws.uniform(0.1, 1.0, (5, 5))
    return {
        "hawkes1": Hawkes(
            "Hawkes process of one kind, exponential kernel", 250.0, np.array([0.2]), 0.8 * one, Exponential(one)
        ),
        "hawkes5": Hawkes(
            "Hawkes process of five kinds, exponential kernels", 160.0, base, branching, Exponential(rates)
        ),
        "powerlaw1": Hawkes(
            "Hawkes process of one kind, power-law kernel", 250.0, np.array([0.3]), 0.7 * one, PowerLaw(0.3 * one, 1.2)
        ),
        "powerlaw5": Hawkes(
            "Hawkes process of five kinds, power-law kernels", 160.0, base, branching, PowerLaw(shifts, 1.5)
        ),
        "renewal": Renewal("renewal process, Weibull waits, kinds by the wait", 250.0, 1.6, 1.1),
        "poisson": Poisson(
            "inhomogeneous Poisson process of two kinds, period 24", 240.0, np.array([0.7, 0.4]), 0.9, 24.0,
            np.array([0.0, 2.0]),
        ),
    }  # fmt: skip


#: processes by name
PROCESSES: dict[str, Process] = _processes()


def process_of(name: str) -> Process:
    """The process of a name in PROCESSES."""
    if name not in PROCESSES:
        close = nearest(name, PROCESSES)
        raise ConfigError(
            f"process {name!r} is none of {', '.join(PROCESSES)}" + (f". Did you mean {close!r}?" if close else "")
        )
    return PROCESSES[name]
