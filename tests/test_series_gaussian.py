"""The Kalman filter against the dense Gaussian that it factors, and the tables that it is written into."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import linalg, stats

from glissando.cli import main
from glissando.errors import ConfigError
from glissando.series.example import table
from glissando.series.gaussian import draw, kalman, two_oscillators

SYSTEM = two_oscillators()


def dense(times: np.ndarray) -> np.ndarray:
    """The covariance (T, C, T, C) of all values at `times`."""
    stationary = linalg.solve_continuous_lyapunov(SYSTEM.drift, -SYSTEM.noise)
    size, channels = len(times), len(SYSTEM.variance)
    made = np.zeros((size, channels, size, channels))
    for i in range(size):
        for j in range(i + 1):
            move = linalg.expm(SYSTEM.drift * (times[i] - times[j]))
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
        whole = stats.multivariate_normal(cov=covariance.reshape(27, 27)[seen][:, seen])
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
    assert np.allclose(found.log_density(values)[known], stats.norm(found.mean, found.deviation).logpdf(values)[known])


def test_the_table_has_the_filters_forecast_of_the_values_that_it_holds() -> None:
    rows = list(csv.DictReader(io.StringIO(table("linear_gaussian", 2, 3))))
    for number in "01":
        chosen = [row for row in rows if row["series"] == number]
        times = np.array([float(row["t"]) for row in chosen])
        values = np.array([[float(row[name] or "nan") for name in "abc"] for row in chosen])
        found = kalman(SYSTEM, times[None], values[None])
        for place, name in enumerate("abc"):
            assert np.allclose([float(row[f"truth_{name}"]) for row in chosen], found.mean[0, :, place], atol=1e-6)
            deviation = [float(row[f"truth_{name}_deviation"]) for row in chosen]
            assert np.allclose(deviation, found.deviation[0, :, place], atol=1e-6)


def test_an_unknown_process_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'linear' is none of oscillators, linear_gaussian"):
        table("linear", 1, 0)


# ---------------------------------------------------------------------- beside a model


def test_a_run_is_scored_beside_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["series", "example", "--process", "linear_gaussian", "--count", "2", "--out", "t.csv"]) == 0
    train = capsys.readouterr().out.split("glissando ", 1)[1].split()
    lines = Path("t.csv").read_text().splitlines()
    Path("t.csv").write_text("\n".join([*lines[:201], *lines[701:901]]) + "\n")
    head = ["--model.head", "gaussian", "--model.hidden_size", "16", "--training.steps", "1", "--threads", "1"]
    assert main([*train, *head]) == 0
    assert "'truth_a' is left out: it is the truth of a generated table" in capsys.readouterr().err
    assert main(["series", "evaluate", train[-1], "--json", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(io.StringIO(Path("t.csv").read_text())))
    for name in "abc":
        row = found["targets"][name]
        # the held-out series has as many values as any other, but for its first step: as near as the figures of all
        values = [(float(row[name]), float(row[f"truth_{name}"]), float(row[f"truth_{name}_deviation"]))
                  for row in rows if row[name]]  # fmt: skip
        value, mean, deviation = np.array(values).T
        assert row["truth"]["nats"] == pytest.approx(-stats.norm(mean, deviation).logpdf(value).mean(), abs=0.2)
        assert row["truth"]["rmse"] == pytest.approx(np.sqrt(((value - mean) ** 2).mean()), rel=0.2)
        assert row["truth"]["nats"] < row["model"]["nats"]
        assert row["truth"]["crps"] < row["truth"]["mae"]
    assert "truth" not in found["worse"]
