"""Series that are generated: what `glissando series example` writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from glissando.errors import ConfigError, nearest
from glissando.series.gaussian import DEVIATION, TRUTH, draw, kalman, two_oscillators

#: steps of a series, and the share of values of linear_gaussian that are missing
_LENGTH, _ABSENT = 700, 0.4


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


def _oscillators(count: int, seed: int) -> list[str]:
    """Series of two values, a and b, at uneven times t."""
    rows = ["series,t,a,b"]
    for number, (values, times) in enumerate(oscillators(count, _LENGTH, seed)):
        tick = -1
        for t, (a, b) in zip(times, values, strict=True):
            tick = max(round(1e4 * t), tick + 1)  # time rises in four digits too
            rows.append(f"{number},{tick / 1e4:.4f},{a:.5f},{b:.5f}")
    return rows


def _linear_gaussian(count: int, seed: int, length: int = _LENGTH) -> list[str]:
    """Three channels of a linear-Gaussian system at random times, values missing at random, and for each the mean and
    deviation that the Kalman filter predicts from the steps before."""
    system = two_oscillators()
    times, values = draw(system, count, length, _ABSENT, np.random.default_rng(seed))
    values = np.round(values, 6)
    found, names = kalman(system, times, values), "abc"
    truths = [f"{TRUTH}{name}{suffix}" for name in names for suffix in ("", DEVIATION)]
    rows = [",".join(["series", "t", *names, *truths])]
    truth = np.stack([found.mean, found.deviation], -1).reshape(count, length, -1)
    for number in range(count):
        for t, row, of in zip(times[number], values[number], truth[number], strict=True):
            cells = ["" if np.isnan(value) else f"{value:.6f}" for value in row]
            rows.append(",".join([str(number), f"{t:.4f}", *cells, *(f"{value:.6f}" for value in of)]))
    return rows


#: what can be generated: lines of a CSV of `count` series
PROCESSES: dict[str, Callable[[int, int], list[str]]] = {
    "oscillators": _oscillators,
    "linear_gaussian": _linear_gaussian,
}


def table(process: str, count: int, seed: int) -> str:
    """A CSV of a process in PROCESSES."""
    if process not in PROCESSES:
        close = nearest(process, PROCESSES)
        raise ConfigError(
            f"process {process!r} is none of {', '.join(PROCESSES)}" + (f". Did you mean {close!r}?" if close else "")
        )
    return "\n".join(PROCESSES[process](count, seed)) + "\n"


def describe() -> dict[str, Any]:
    """The system of linear_gaussian, and what its truth reaches on a sample."""
    system = two_oscillators()
    times, values = draw(system, 31, _LENGTH, _ABSENT, np.random.default_rng(0))
    found = kalman(system, times, values)
    each, error = np.nanmean(found.log_density(values), (0, 1)), np.nanmean((values - found.mean) ** 2, (0, 1)) ** 0.5
    return {
        "states": "two damped oscillators with noise, D = 4",
        "channels": f"a, b, c: mixtures of the states with noise; {_ABSENT:.0%} of the values are missing at random",
        "times": "gaps are exponential, 1 on average",
        "log-likelihood of the Kalman filter, nats a value": ", ".join(f"{x:.3f}" for x in each),
        "root mean square error of the Kalman filter": ", ".join(f"{x:.3f}" for x in error),
        "deviation of the channels": ", ".join(f"{x:.3f}" for x in np.nanstd(values, (0, 1))),
    }


def sample() -> list[str]:
    """The first lines of a table."""
    return _linear_gaussian(1, 0, 5)
