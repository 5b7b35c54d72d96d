"""Series that are generated: what `glissando series example` writes."""

from __future__ import annotations

import numpy as np

#: steps of a series
_LENGTH = 700


def oscillators(count: int, length: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Values (T, 2) and the time of each (T,): Re z of two oscillators with dz/dt = (-d + i w) z, kicked now and then,
    where w is one of two; gaps are exponential, 1 on average."""
    rng, made = np.random.default_rng(seed), []
    decay, turn = np.array([0.02, 0.1]), np.array([[0.3, 1.1], [0.9, 0.4]])
    for _ in range(count):
        regime, z = int(rng.integers(2)), rng.normal(size=2) + 1j * rng.normal(size=2)
        gaps, values = rng.exponential(1.0, length), []
        for gap in gaps:
            values.append(z.real)
            z = z * np.exp((-decay + 1j * turn[regime]) * gap)
            if rng.random() < 0.05:
                regime, z = 1 - regime, z + rng.normal(size=2)
        made.append((np.array(values), np.concatenate([[0.0], gaps[:-1].cumsum()])))
    return made


def table(count: int, seed: int) -> str:
    """A CSV of series of two values, a and b, at uneven times t."""
    rows = ["series,t,a,b"]
    for number, (values, times) in enumerate(oscillators(count, _LENGTH, seed)):
        tick = -1
        for t, (a, b) in zip(times, values, strict=True):
            tick = max(round(1e4 * t), tick + 1)  # time rises in four digits too
            rows.append(f"{number},{tick / 1e4:.4f},{a:.5f},{b:.5f}")
    return "\n".join(rows) + "\n"
