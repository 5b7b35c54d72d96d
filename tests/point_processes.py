"""Processes whose likelihood is known exactly beside those of the package: for tests alone."""

from __future__ import annotations

import numpy as np

from glissando.events.processes import PROCESSES, Hawkes


class Renewal(Hawkes):
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


class Poisson(Hawkes):
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


ALL: dict[str, Hawkes] = {
    **PROCESSES,
    "renewal": Renewal("Weibull waits, kinds by the wait", 250.0, 1.6, 1.1),
    "poisson": Poisson("two kinds, period 24", 240.0, np.array([0.7, 0.4]), 0.9, 24.0, np.array([0.0, 2.0])),
}
