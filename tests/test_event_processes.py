"""Point processes: draws agree with the likelihood, the likelihood with numerical integrals, and tables with both."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import scipy
from point_processes import ALL

from glissando.errors import UnknownNameError
from glissando.events.processes import PROCESSES, Hawkes, drawn, process_of, table

NAMES = list(ALL)


def some(name: str, count: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [ALL[name].draw(rng) for _ in range(count)]


def residuals(process: Hawkes, times: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    return np.diff(process.compensator(times, times, kinds), prepend=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_residuals_of_draws_are_exponential_and_kinds_are_as_frequent_as_predicted(name: str) -> None:
    process = ALL[name]
    series = some(name, 40)
    made = np.concatenate([residuals(process, *each) for each in series])
    assert len(made) > 5_000
    assert scipy.stats.kstest(made, "expon").pvalue > 0.01
    assert abs(np.corrcoef(made[1:], made[:-1])[0, 1]) < 0.04
    kinds = np.concatenate([kinds for _, kinds in series])
    chances = []
    for times, of in series:
        each = process.intensities(times, times, of)
        chances.append(each / each.sum(1, keepdims=True))
    chance = np.concatenate(chances)
    error = np.eye(process.kinds)[kinds] - chance
    deviation = np.sqrt(np.maximum((chance * (1 - chance)).sum(0), 1e-9))
    assert (np.abs(error.sum(0)) < 3.5 * deviation).all()
    if process.kinds > 1:  # and the likely ones are those that happen
        weights = chance - chance.mean(0)
        assert (np.abs((error * weights).sum(0)) < 3.5 * np.sqrt((chance * (1 - chance) * weights**2).sum(0))).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_log_likelihood_is_that_of_the_intensities_integrated_numerically(name: str) -> None:
    process = ALL[name]
    times, kinds = some(name, 1)[0]
    truth = process.truth(times, kinds)
    log_rates = sum(
        float(np.log(process.intensities(np.array([t]), times, kinds)[0, k])) for t, k in zip(times, kinds, strict=True)
    )
    total = 0.0
    nodes, weights = np.polynomial.legendre.leggauss(12)
    for a, b in zip(np.append(0.0, times), np.append(times, process.end), strict=True):
        # smooth in u where t = a + (b - a) u^3: a Weibull hazard has a root at the event
        u = (nodes + 1) / 2
        at = a + (b - a) * u**3
        total += float((process.intensities(at, times, kinds).sum(1) * 3 * u**2) @ weights) * (b - a) / 2
    assert truth.time.sum() + truth.kind.sum() + truth.end == pytest.approx(log_rates - total, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_events_excite_only_what_is_later(name: str) -> None:
    process = ALL[name]
    times, kinds = some(name, 1)[0]
    at = times[50] + np.array([-1e-3, 0.0])
    changed = kinds.copy()
    changed[50:] = (kinds[50:] + 1) % process.kinds
    before = process.intensities(at, times, kinds)
    assert np.allclose(before, process.intensities(at, times[:50], kinds[:50]), rtol=1e-12)
    assert np.array_equal(before, process.intensities(at, times, changed))


def test_a_hawkes_process_has_the_mean_that_its_branching_gives() -> None:
    """The rates settle at (1 - n)^-1 mu."""
    process = PROCESSES["hawkes5"]
    expected = np.linalg.solve(np.eye(5) - process.branching, process.base) * process.end
    counts = np.mean([np.bincount(kinds, minlength=5) for _, kinds in some("hawkes5", 300)], 0)
    assert np.abs(np.linalg.eigvals(process.branching)).max() == pytest.approx(0.8)
    assert (counts < expected).all()  # it starts from an empty past
    assert np.allclose(counts, expected, rtol=0.1)


def test_a_table_has_the_truth_of_the_times_that_it_holds() -> None:
    text = table("hawkes5", 3, seed=7)
    assert text == table("hawkes5", 3, seed=7)
    rows = list(csv.DictReader(io.StringIO(text)))
    process = process_of("hawkes5")
    for number, (expected, _, _) in zip("012", drawn(process, 3, 7), strict=True):
        chosen = [row for row in rows if row["series"] == number]
        times = np.array([float(row["time"]) for row in chosen])
        assert np.array_equal(times, expected)
        assert (np.diff(times, prepend=0.0) > 0).all()
        truth = process.truth(times, np.array([ord(row["kind"]) - ord("a") for row in chosen]))
        assert np.allclose([float(row["truth_time"]) for row in chosen], truth.time, atol=1e-6)
        assert np.allclose([float(row["truth_kind"]) for row in chosen], truth.kind, atol=1e-6)
        assert float(chosen[0]["truth_end"]) == pytest.approx(truth.end, abs=1e-6)


def test_an_unknown_process_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown process 'hawks1'\. Did you mean 'hawkes1'"):
        process_of("hawks1")
