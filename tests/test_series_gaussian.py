"""The Kalman filter against the dense Gaussian that it factors, and the tables that it is written into."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import scipy

from benchmarks.series.gaussian import draw, kalman, scored, table, two_oscillators
from glissando.cli import main

SYSTEM = two_oscillators()


def dense(times: np.ndarray) -> np.ndarray:
    """The covariance (T, C, T, C) of all values at `times`."""
    stationary = scipy.linalg.solve_continuous_lyapunov(SYSTEM.drift, -SYSTEM.noise)
    size, channels = len(times), len(SYSTEM.variance)
    made = np.zeros((size, channels, size, channels))
    for i in range(size):
        for j in range(i + 1):
            move = scipy.linalg.expm(SYSTEM.drift * (times[i] - times[j]))
            made[i, :, j] = SYSTEM.reading @ move @ stationary @ SYSTEM.reading.T
            made[j, :, i] = made[i, :, j].T
        made[i, :, i] += np.diag(SYSTEM.variance)
    return made


def test_the_filter_predicts_what_the_dense_gaussian_does() -> None:
    times, values = draw(SYSTEM, 2, 9, 0.4, np.random.default_rng(0))
    assert np.isnan(values).any()
    found = kalman(SYSTEM, times, values)
    for series in range(2):
        covariance = dense(times[series])
        for step in range(9):
            seen = ~np.isnan(values[series, :step]).ravel()
            past = covariance[:step, :, :step].reshape(3 * step, 3 * step)[seen][:, seen]
            cross = covariance[step, :, :step].reshape(3, -1)[:, seen]
            gain = np.linalg.solve(past, cross.T).T if seen.any() else cross
            mean = gain @ values[series, :step].ravel()[seen]
            spread = covariance[step, :, step] - gain @ cross.T
            assert np.allclose(found.mean[series, step], mean, atol=1e-9)
            assert np.allclose(found.deviation[series, step], np.sqrt(np.diag(spread)), atol=1e-9)
        seen = ~np.isnan(values[series]).ravel()
        whole = scipy.stats.multivariate_normal(cov=covariance.reshape(27, 27)[seen][:, seen])
        assert found.joint[series].sum() == pytest.approx(whole.logpdf(values[series].ravel()[seen]), abs=1e-9)


def test_draws_have_the_spread_that_the_filter_predicts() -> None:
    times, values = draw(SYSTEM, 60, 120, 0.4, np.random.default_rng(1))
    found = kalman(SYSTEM, times, values)
    z = (values - found.mean) / found.deviation
    assert np.nanmean(z) == pytest.approx(0, abs=0.03)
    assert np.nanstd(z) == pytest.approx(1, abs=0.02)
    assert np.isnan(values).mean() == pytest.approx(0.4 - 0.4**3 / 3, abs=0.01)
    assert np.isfinite(values).any(-1).all()
    known = ~np.isnan(values)
    assert np.allclose(
        found.log_density(values)[known], scipy.stats.norm(found.mean, found.deviation).logpdf(values)[known]
    )


def test_the_table_has_the_filters_forecast_of_the_values_that_it_holds() -> None:
    rows = list(csv.DictReader(io.StringIO(table(2, 3))))
    for number in "01":
        chosen = [row for row in rows if row["series"] == number]
        times = np.array([float(row["t"]) for row in chosen])
        values = np.array([[float(row[name] or "nan") for name in "abc"] for row in chosen])
        found = kalman(SYSTEM, times[None], values[None])
        for place, name in enumerate("abc"):
            assert np.allclose([float(row[f"truth_{name}"]) for row in chosen], found.mean[0, :, place], atol=1e-6)
            deviation = [float(row[f"truth_{name}_deviation"]) for row in chosen]
            assert np.allclose(deviation, found.deviation[0, :, place], atol=1e-6)


# ---------------------------------------------------------------------- beside a model


def test_a_run_is_scored_beside_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glissando.series.pictures.draw", lambda *_: [])  # which takes longer than all else
    lines = table(2, 0).splitlines()
    Path("t.csv").write_text("\n".join([*lines[:201], *lines[701:901]]) + "\n")
    data = ["--data.path", "t.csv", "--data.time", "t", "--data.group", "series", "--data.columns", "a,b,c"]
    head = ["--model.head", "gaussian", "--model.hidden_size", "16", "--training.steps", "1", "--threads", "1"]
    assert main(["series", "train", *data, *head, "--out", "run"]) == 0
    found = scored(Path("run"), Path("t.csv"))
    rows = list(csv.DictReader(io.StringIO(Path("t.csv").read_text())))
    for name in "abc":
        row = found[name]
        # all values are scored but those of the first steps
        values = [(float(row[name]), float(row[f"truth_{name}"]), float(row[f"truth_{name}_deviation"]))
                  for row in rows if row[name]]  # fmt: skip
        value, mean, deviation = np.array(values).T
        assert row["truth"]["nats"] == pytest.approx(-scipy.stats.norm(mean, deviation).logpdf(value).mean(), abs=0.02)
        assert row["truth"]["rmse"] == pytest.approx(np.sqrt(((value - mean) ** 2).mean()), rel=0.02)
        assert row["truth"]["nats"] < row["model"]["nats"]
        assert row["truth"]["crps"] < row["truth"]["mae"]
