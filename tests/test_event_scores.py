"""Scores of events: baselines against closed forms, residuals of the truth, and figures by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy
from point_processes import ALL

from glissando.events.baselines import POISSON, RENEWAL, WEEK, Baseline, Hazard, Predicted, baselines
from glissando.events.batches import After
from glissando.events.processes import Hawkes, drawn
from glissando.events.scores import TRUTH, _kolmogorov, calibration, residuals, score


def seen(name: str, count: int, seed: int = 0, cut: float | None = None) -> tuple[After, Predicted, Predicted]:
    """Series of a process up to `cut`, the log-likelihood of the truth, and all that the truth predicts."""
    process = copy.copy(ALL[name])
    process.end = cut or process.end
    parts = [_one(process, s, *each[:2]) for s, each in enumerate(drawn(process, count, seed))]
    joined = [np.concatenate(part) for part in zip(*parts, strict=True)]
    observed = After(*joined[:8], kinds=process.kinds, week=24.0)
    time, kind, kinds, passed = joined[8:]
    return observed, Predicted(time, kind), Predicted(time, kind, kinds, passed, passed)


def _one(process: Hawkes, number: int, times: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, ...]:
    count, at, end = len(times) + 1, np.append(0.0, times), np.append(times, process.end)
    truth = process.truth(times, kinds)
    each = process.intensities(end, times, kinds)
    return (
        np.full(count, number), end - at, np.zeros(count), np.append(kinds, -1), np.full(count, -1),
        np.arange(count) == count - 1, np.append(-1, kinds), at / 24 % 1,
        np.append(truth.time, truth.end), np.append(truth.kind, 0.0), np.log(each / each.sum(1, keepdims=True)),
        np.diff(process.compensator(end, times, kinds), prepend=0.0),
    )  # fmt: skip


def chain(waits: list[float], kinds: list[int], resolution: float = 0.0, tied: int = -1) -> After:
    """One series, whose observation does not end but with its last event."""
    wait, kind = np.array(waits), np.array(kinds)
    count = len(wait)
    tie = np.where(wait == 0, 1, 0) if tied >= 0 else np.full(count, -1)
    return After(
        np.zeros(count, np.int64), wait, np.zeros(count), kind, tie, np.zeros(count, bool),
        np.append(-1, kind[:-1]), None, int(kind.max()) + 1, resolution,
    )  # fmt: skip


# ---------------------------------------------------------------------- baselines


def test_poisson_is_the_rate_and_the_shares_of_the_training() -> None:
    train = chain([0.5] * 4000, [0, 1, 1, 1] * 1000)
    found = Baseline(POISSON, train).predict(chain([0.1, 3.0], [0, 1]))
    assert np.allclose(found.time, np.log(2) - 2 * np.array([0.1, 3.0]), atol=2e-3)
    assert np.allclose(found.kind, np.log([0.25, 0.75]), atol=1e-3)
    assert found.median is not None
    assert np.allclose(found.median, np.log(2) / 2, rtol=1e-3)
    whole = Baseline(POISSON, chain([1.0, 2.0] * 3000, [0] * 6000, resolution=1.0)).predict(
        chain([3.0], [0], resolution=1.0)
    )
    assert whole.time[0] == pytest.approx(np.log((1 / 3) ** 2 * 2 / 3), abs=2e-3)  # geometric, two thirds a step


def test_ties_are_a_share_and_need_no_wait() -> None:
    train = chain([1.0, 0.0, 1.0, 1.0] * 1000, [0, 1, 0, 0] * 1000, tied=0)
    found = Baseline(POISSON, train).predict(chain([0.0, 2.0], [1, 0], tied=0))
    assert np.allclose(found.time, [np.log(0.25), np.log(0.75) - 2], atol=3e-3)


def test_a_wait_below_half_the_resolution_is_in_the_first_bin() -> None:
    hazard = Hazard(np.array([0.0, 1.0, 2.0, 1e30]))
    assert hazard.bin(np.array([0.1, 0.5, 1.6, 5.0]), resolution=1.0).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("period", [False, True])
def test_a_hazard_is_fitted_by_time_at_risk_and_its_integral_is_inverted(period: bool) -> None:
    rng = np.random.default_rng(0)
    hazard = Hazard(np.array([0.0, 0.2, 0.5, 1.0 if period else 1e30]))
    low = rng.uniform(0, 1, 500)
    high = low + rng.exponential(1.0, 500)
    hazard.fit(low, high, high, 0.0)
    grid = np.arange(200_000) * 3e-5
    at_risk = np.array([((low < t) & (t <= high)).sum() for t in grid[::40]]) * 40 * 3e-5
    risk = np.bincount(hazard.bin(grid[::40]), at_risk, minlength=3)
    counts = np.bincount(hazard.bin(high), minlength=3)
    assert np.allclose(hazard.rate, counts / risk, rtol=0.03)
    t = rng.uniform(0, 4, 100)
    assert np.allclose(hazard.inverse(hazard.integral(t)), t)
    steps = np.linspace(0, 3.3, 330_001)[:-1] + 5e-6
    assert hazard.integral(np.array([3.3]))[0] == pytest.approx(hazard.rate[hazard.bin(steps)].sum() * 1e-5, rel=1e-4)


@pytest.mark.parametrize("resolution", [0.0, 1.0])
@pytest.mark.parametrize("name", [POISSON, WEEK, RENEWAL])
def test_the_probabilities_of_a_baseline_sum_to_one(name: str, resolution: float) -> None:
    train = seen("poisson", 20)[0]
    if resolution:
        train = train._replace(wait=np.ceil(train.wait / 0.25), resolution=1.0, week=96.0)
    made = Baseline(name, train)
    # nothing can come before 2
    wait = np.arange(3, 400) * 1.0 if resolution else 2 + (np.arange(400_000) + 0.5) * 1e-4
    count = len(wait)
    asked = After(
        np.zeros(count, np.int64), wait, np.full(count, 2.0), np.zeros(count, np.int64), np.full(count, -1),
        np.zeros(count, bool), np.full(count, 1), np.full(count, 0.3), 2, resolution, train.week,
    )  # fmt: skip
    found = made.predict(asked)
    assert (np.exp(found.time) * (1.0 if resolution else 1e-4)).sum() == pytest.approx(1, abs=2e-3)
    assert found.kinds is not None
    assert np.allclose(np.exp(found.kinds).sum(1), 1)


def test_the_better_baseline_is_the_one_of_the_kind_of_the_process() -> None:
    for name, best in (("renewal", RENEWAL), ("poisson", WEEK)):
        train, held = seen(name, 40)[0], seen(name, 40, seed=1)[0]
        found = {each.name: each.predict(held) for each in baselines(train)}
        total = {who: (each.time + each.kind).sum() for who, each in found.items()}
        assert max(total, key=lambda who: total[who]) == best
        below = (held.wait < found[best].median)[held.arrives].mean()
        assert below == pytest.approx(0.5, abs=0.02)


# ---------------------------------------------------------------------- residuals


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("hawkes5", None),
        pytest.param("hawkes1", 3.0, marks=pytest.mark.slow),
        ("renewal", 3.0),
        pytest.param("poisson", None, marks=pytest.mark.slow),
    ],
)
def test_residuals_of_the_truth_are_exponential_where_many_are_cut_off_too(name: str, cut: float | None) -> None:
    held, _, truth = seen(name, 40 if cut is None else 1500, cut=cut)
    assert truth.high is not None
    found = residuals(held, truth.high, truth.high)
    assert len(found.values) > 1_500
    assert scipy.stats.kstest(found.values, "expon").pvalue == pytest.approx(found.p, abs=0.02)
    assert found.p > 0.01
    assert residuals(held, 1.1 * truth.high, 1.1 * truth.high).p < 0.01


def test_residuals_of_intervals_are_exponential() -> None:
    rng = np.random.default_rng(0)
    wait = np.ceil(rng.exponential(2.0, 20_000))
    held = chain(wait.tolist(), [0] * 20_000, resolution=1.0)
    assert residuals(held, (wait - 1) / 2, wait / 2).p > 0.01
    assert residuals(held, wait / 2, wait / 2).p < 1e-6


def test_a_wait_over_several_steps_is_one_residual_and_an_event_at_one_time_is_none() -> None:
    held = After(
        np.array([0, 0, 0, 0, 1]), np.array([1.0, 2.0, 0.0, 4.0, 8.0]), np.zeros(5), np.array([-1, 0, 1, 0, -1]),
        np.array([-1, 0, 1, 0, -1]), np.array([False] * 4 + [True]), np.full(5, -1), None, 2,
    )  # fmt: skip
    found = residuals(held, held.wait, held.wait).values
    assert found[:2].tolist() == [3.0, 4.0]
    assert len(found) == 3
    assert found[2] > 8


def test_the_distribution_of_kolmogorov_is_that_of_scipy() -> None:
    x = [0.05, 0.2, 0.5, 0.9, 1.17, 1.19, 1.358, 2.5]
    assert np.allclose([_kolmogorov(each) for each in x], scipy.stats.kstwobign.sf(x), atol=1e-9)


# ---------------------------------------------------------------------- figures


def test_the_truth_as_a_model_is_the_truth_and_beats_the_baselines() -> None:
    train, (held, truth, model) = seen("hawkes5", 30)[0], seen("hawkes5", 30, seed=1)
    found = score(held, model, train, "d", truth)
    total = (truth.time + truth.kind).sum() / held.events
    row = found.figures["model"]
    assert row["log_likelihood"] == pytest.approx(total)
    assert row["log_likelihood_low"] < total < row["log_likelihood_high"]
    assert row["log_likelihood"] == pytest.approx(row["time"] + row["kind"])
    assert found.figures[TRUTH]["model_minus"] == 0
    assert row["ks_p"] > 0.01
    assert row["calibration"] < 0.01
    assert not found.worse
    assert found.headline().startswith("The model is better than poisson, hour of week and renewal. It is 0.0000")
    assert "30 ends of observation of 30 series" in found.table()
    renewal = found.figures[RENEWAL]
    assert renewal["model_minus"] == pytest.approx(total - renewal["log_likelihood"])
    assert renewal["model_minus_low"] < renewal["model_minus"] < renewal["model_minus_high"]
    bad = score(held, model._replace(time=model.time - 1), train, "d", truth)
    assert bad.worse == [POISSON, WEEK, RENEWAL]
    assert "NO BETTER than poisson, hour of week and renewal" in bad.headline()
    assert bad.figures[TRUTH]["model_minus"] == pytest.approx(-len(held.wait) / held.events)


def test_figures_by_hand() -> None:
    held = chain([1.0, 3.0, 2.0], [0, 1, 1])
    kinds = np.log(np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]))
    model = Predicted(np.array([-1.0, -2.0, -3.0]), np.array([-0.1, -0.2, -0.3]), kinds, median=np.array([2.0, 2, 2]))
    found = score(held, model, None, "d")
    row = found.figures["model"]
    assert row["log_likelihood"] == pytest.approx(-2.2)
    assert row["next_time"] == pytest.approx(2 / 3)
    assert row["accuracy"] == pytest.approx(2 / 3)
    assert list(found.figures) == ["model"]
    assert found.headline() == "No predictor was fitted beside it."
    assert found.events == 3


def test_calibration_is_the_distance_of_probability_and_frequency() -> None:
    rng = np.random.default_rng(0)
    chance = rng.uniform(0.02, 0.98, 50_000)
    came = (rng.random(50_000) < chance).astype(np.int64)
    chances = np.stack([1 - chance, chance], 1)
    assert calibration(chances, came) < 0.01
    assert calibration(np.full((4, 2), 0.5), np.array([0, 0, 0, 1])) == 0.0
    assert calibration(np.array([[0.9, 0.1]] * 10), np.array([0] * 5 + [1] * 5)) == pytest.approx(0.4)
