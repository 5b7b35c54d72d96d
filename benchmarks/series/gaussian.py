"""A linear-Gaussian system seen at random times, and the Kalman filter: what a model of series can reach at best.

`table` is a CSV of values and of what the filter predicts of each, and `scored` has a run's figures beside it.

dx = A x dt + dW,  cov dW = Q dt,  x(0) from the stationary distribution N(0, P)
y_c = H_c x + N(0, R_c) of the channels c that are observed
x(t + d) = F x(t) + N(0, P - F P F'),  F = exp(A d),  A P + P A' + Q = 0
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from glissando.series.answers import answered, measure
from glissando.series.forecast import SeriesRun
from glissando.series.heads import Gaussian
from glissando.series.tables import read_table
from glissando.series.task import windows_of

#: a column of this name and a channel's holds the mean that the truth predicts, and one with the suffix its deviation
TRUTH, DEVIATION = "truth_", "_deviation"
#: series and steps of a table, and the share of values that are missing
_COUNT, _LENGTH, _ABSENT = 31, 700, 0.4


class System(NamedTuple):
    """D states and C channels: drift (D, D), noise (D, D), reading (C, D) and the variance (C) of what is read."""

    drift: np.ndarray
    noise: np.ndarray
    reading: np.ndarray
    variance: np.ndarray

    def stationary(self) -> np.ndarray:
        """P (D, D)."""
        eye = np.eye(len(self.drift))
        sum_ = np.kron(self.drift, eye) + np.kron(eye, self.drift)
        return np.linalg.solve(sum_, -self.noise.ravel()).reshape(self.noise.shape)

    def transitions(self, gaps: np.ndarray) -> np.ndarray:
        """F (..., D, D) over gaps (...); the eigenvalues of the drift are all different."""
        values, vectors = np.linalg.eig(self.drift)
        turned = np.exp(values * gaps[..., None])[..., None, :] * vectors
        return (turned @ np.linalg.inv(vectors)).real


class Predicted(NamedTuple):
    """What the filter knows of each value from the steps before its own.

    mean, deviation  (S, T, C)
    joint            (S, T) log-density of all values of a step together
    """

    mean: np.ndarray
    deviation: np.ndarray
    joint: np.ndarray

    def log_density(self, values: np.ndarray) -> np.ndarray:
        """The log-density (S, T, C) of each value by itself; NaN where there is none."""
        z = (values - self.mean) / self.deviation
        return -(z**2) / 2 - np.log(self.deviation) - np.log(2 * np.pi) / 2


def two_oscillators() -> System:
    """A slow and a fast damped oscillator, D = 4, of which three channels read mixtures."""
    drift = np.zeros((4, 4))
    for place, (damping, turn) in ((0, (0.05, 0.5)), (2, (0.3, 1.5))):
        drift[place : place + 2, place : place + 2] = [[-damping, turn], [-turn, -damping]]
    noise = np.diag([0.1, 0.1, 0.6, 0.6])
    reading = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.5], [0.5, -0.5, 1.0, 0.0]])
    return System(drift, noise, reading, np.array([0.02, 0.05, 0.1]))


def draw(
    system: System, count: int, length: int, missing: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Times (S, T), whose gaps are exponential, 1 on average, and values (S, T, C), NaN with probability `missing`.

    The first time is 0, times have four digits, and every step has a value.
    """
    gaps = np.maximum(np.rint(1e4 * rng.exponential(1.0, (count, length))), 1) / 1e4
    gaps[:, 0] = 0.0
    stationary = system.stationary()
    move = system.transitions(gaps)
    kicks = np.linalg.cholesky(stationary - move[:, 1:] @ stationary @ move[:, 1:].swapaxes(-1, -2))
    state = rng.normal(size=(count, len(stationary))) @ np.linalg.cholesky(stationary).T
    states = [state]
    for step in range(1, length):
        kick = kicks[:, step - 1] @ rng.normal(size=(*state.shape, 1))
        state = (move[:, step] @ state[..., None] + kick)[..., 0]
        states.append(state)
    clean = np.stack(states, 1) @ system.reading.T
    values = clean + rng.normal(size=clean.shape) * np.sqrt(system.variance)
    absent = rng.random(values.shape) < missing
    absent[absent.all(-1), 0] = False
    values[absent] = np.nan
    return np.rint(1e4 * gaps.cumsum(1)) / 1e4, values


def kalman(system: System, times: np.ndarray, values: np.ndarray) -> Predicted:
    """The predictive distribution of each value of S series: times (S, T) and values (S, T, C), NaN where missing."""
    stationary = system.stationary()
    count, length, channels = values.shape
    move = system.transitions(np.diff(times, axis=1, prepend=times[:, :1]))
    mean, covariance = np.zeros((count, len(stationary))), np.broadcast_to(stationary, (count, *stationary.shape))
    means, deviations, joint = np.zeros(values.shape), np.zeros(values.shape), np.zeros((count, length))
    for step in range(length):
        over = move[:, step]
        mean = (over @ mean[..., None])[..., 0]
        covariance = stationary + over @ (covariance - stationary) @ over.swapaxes(-1, -2)
        means[:, step] = mean @ system.reading.T
        spread = np.einsum("cd,sde,ce->sc", system.reading, covariance, system.reading)
        deviations[:, step] = np.sqrt(spread + system.variance)
        for channel in range(channels):  # one after another: the noise of channels is independent
            row, value = system.reading[channel], values[:, step, channel]
            observed = ~np.isnan(value)
            shared = covariance @ row
            variance = shared @ row + system.variance[channel]
            error = np.where(observed, value - mean @ row, 0.0)
            joint[:, step] -= observed * (error**2 / variance + np.log(2 * np.pi * variance)) / 2
            gain = shared * (observed / variance)[:, None]
            mean = mean + gain * error[:, None]
            covariance = covariance - gain[:, :, None] * shared[:, None, :]
    return Predicted(means, deviations, joint)


# ---------------------------------------------------------------------- beside a model


def table(count: int = _COUNT, seed: int = 0) -> str:
    """A CSV of three channels at random times, values missing at random, and for each the mean and the deviation that
    the filter predicts from the steps before."""
    system = two_oscillators()
    times, values = draw(system, count, _LENGTH, _ABSENT, np.random.default_rng(seed))
    values = np.round(values, 6)
    found, names = kalman(system, times, values), "abc"
    truths = [f"{TRUTH}{name}{suffix}" for name in names for suffix in ("", DEVIATION)]
    rows = [",".join(["series", "t", *names, *truths])]
    truth = np.stack([found.mean, found.deviation], -1).reshape(count, _LENGTH, -1)
    for number in range(count):
        for t, row, of in zip(times[number], values[number], truth[number], strict=True):
            cells = ["" if np.isnan(value) else f"{value:.6f}" for value in row]
            rows.append(",".join([str(number), f"{t:.4f}", *cells, *(f"{value:.6f}" for value in of)]))
    return "\n".join(rows) + "\n"


def scored(path: Path, file: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of a run with the head `gaussian` on a table, by channel and predictor, beside the truth; `nats` is
    the negative log-likelihood of a value by itself."""
    run = SeriesRun.open(path)
    panel = run.read(str(file))
    held = windows_of(panel, run.data, run.encoding, run.scales)
    found = answered(run.model, held, panel)
    figures = measure(run.model, held, panel, run.encoding, forecast=found).figures
    source, head = read_table(str(file)), Gaussian()
    at = np.searchsorted(source.places, panel.rows[found.row])
    for number, name in enumerate(run.encoding.target):
        chosen = found.channel == number
        truth = np.stack([source.columns[f"{TRUTH}{name}{end}"].numbers[at[chosen]] for end in ("", DEVIATION)], -1)
        target = torch.from_numpy(found.target[chosen])
        error = target.numpy() - truth[:, 0]
        figures[name]["truth"] = {"rmse": float(np.sqrt((error**2).mean())), "mae": float(np.abs(error).mean())}
        figures[name]["truth"]["crps"] = float(head.crps(torch.from_numpy(truth), target).mean())
        for who, params in (("truth", torch.from_numpy(truth)), ("model", found.params[chosen].double())):
            figures[name][who]["nats"] = float(head.each_loss(params, target).mean())
    return figures
