"""Generated dynamics sampled at random times, to train at one rate and read at another.

Gaps are uniform from 0 to twice their mean. Every series has its own start; the systems are

    damped   two oscillators, dz/dt = (-d + i w) z; the channels are mixtures of Re z
    forced   x'' = -0.2 x' - x + cos(1.7 t + phase); the channels are x and x'
    chaotic  Lorenz's equations with their usual constants, time slowed down tenfold; the channels are its three over 10
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray

#: time of a step of the fourth-order Runge-Kutta method, at most
_STEP = 0.02


def _forced(t: Array, state: Array) -> Array:
    x, speed, phase = state.T
    return np.stack([speed, -0.2 * speed - x + np.cos(1.7 * t + phase), 0 * phase], -1)


def _lorenz(t: Array, state: Array) -> Array:
    x, y, z = state.T
    return np.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1) / 10


def _damped(t: Array, state: Array) -> Array:
    real, imaginary = state[:, :2], state[:, 2:]
    decay, turn = np.array([0.05, 0.1]), np.array([1.0, 2.3])
    return np.concatenate([-decay * real - turn * imaginary, turn * real - decay * imaginary], -1)


def _starts(name: str, count: int, rng: np.random.Generator) -> Array:
    if name == "damped":
        return rng.normal(size=(count, 4))
    if name == "forced":
        return np.concatenate([rng.normal(size=(count, 2)), rng.uniform(0, 2 * np.pi, (count, 1))], -1)
    return np.array([0.0, 0.0, 25.0]) + rng.normal(size=(count, 3)) * np.array([8.0, 8.0, 8.0])


#: the derivative, and what is observed of the state
SYSTEMS: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]] = {
    "damped": (_damped, lambda s: np.stack([s[:, 0] + 0.5 * s[:, 1], s[:, 1] - 0.5 * s[:, 0]], -1)),
    "forced": (_forced, lambda s: s[:, :2]),
    "chaotic": (_lorenz, lambda s: s / 10),
}


def table(name: str, gap: float, count: int, length: int, seed: int) -> list[str]:
    """Lines of a CSV with the columns series, t and the channels, of `count` series at a mean gap."""
    derivative, observed = SYSTEMS[name]
    rng = np.random.default_rng(seed)
    state, t = _starts(name, count, rng), np.zeros(count)
    if name == "chaotic":  # onto the attractor
        for _ in range(500):
            state = _advanced(derivative, t, state, np.full(count, 0.2))
    gaps, values, times = rng.uniform(0, 2 * gap, (length, count)), [], []
    for step in gaps:
        values.append(observed(state))
        times.append(t.copy())
        state, t = _advanced(derivative, t, state, step), t + step
    rows = [f"series,t,{','.join('abc'[: values[0].shape[1]])}"]
    for number in range(count):
        for at, each in zip(times, values, strict=True):
            rows.append(f"{number},{at[number]:.6f}," + ",".join(f"{value:.6f}" for value in each[number]))
    return rows


def _advanced(derivative: Callable[[Array, Array], Array], t: Array, state: Array, time: Array) -> Array:
    """The states (N, S) after a time (N,) each."""
    parts = max(1, int(np.ceil(time.max() / _STEP)))
    h = time / parts
    for _ in range(parts):
        column = h[:, None]
        a = derivative(t, state)
        b = derivative(t + h / 2, state + column / 2 * a)
        c = derivative(t + h / 2, state + column / 2 * b)
        d = derivative(t + h, state + column * c)
        state, t = state + column / 6 * (a + 2 * b + 2 * c + d), t + h
    return state
