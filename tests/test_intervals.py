"""95 % intervals hold what they should about 95 times in 100, and decide only what they can."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from research.intervals import Gap, gap_of, mean_of, median_of, t_quantile


@pytest.mark.parametrize("freedom", [1, 3, 10, 11, 30])
def test_t_quantiles_are_those_of_draws(freedom: int):
    draws = np.abs(np.random.default_rng(0).standard_t(freedom, 400_000))
    assert np.mean(draws < t_quantile(freedom)) == pytest.approx(0.95, abs=0.002)


def test_t_without_a_degree_of_freedom_is_reported():
    with pytest.raises(ValueError, match="at least one degree of freedom, got 0"):
        t_quantile(0)


@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_gaps_hold_the_truth(seeds: int):
    rng, kept, trials = torch.Generator().manual_seed(seeds), 0, 2000
    for _ in range(trials):
        of_seed = 0.02 * torch.randn(seeds, 1, generator=rng, dtype=torch.float64)
        of_window = 0.1 * torch.randn(1, 64, generator=rng, dtype=torch.float64)
        low, high = gap_of(0.3 + of_seed + of_window).interval
        kept += low <= 0.3 <= high
    assert 0.94 <= kept / trials <= 0.985  # Student's t beside the normal law errs to the wide side


def test_gaps_are_of_seeds_as_well_as_windows():
    same_windows = torch.tensor([[0.1, 0.1, 0.1], [0.2, 0.2, 0.2], [0.3, 0.3, 0.3]])
    assert gap_of(same_windows).half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    same_seeds = torch.tensor([[0.1, 0.2, 0.3]] * 3)
    assert gap_of(same_seeds).half == pytest.approx(1.96 * 0.1 / math.sqrt(3), rel=1e-4)


def test_one_seed_decides_nothing():
    gap = mean_of(torch.tensor([-5.0]))
    assert (gap.value, gap.below(), gap.above()) == (-5.0, None, None)
    assert "of one" in str(gap)


@pytest.mark.parametrize(
    ("gap", "bound", "below", "above"),
    [
        (Gap(-1.0, 0.5), 0.0, True, False),
        (Gap(1.0, 0.5), 0.0, False, True),
        (Gap(0.2, 0.5), 0.0, None, None),
        (Gap(0.2, 0.5), 1.0, True, False),
    ],
)
def test_a_bound_inside_the_interval_is_not_decided(gap: Gap, bound: float, below: bool | None, above: bool | None):
    assert (gap.below(bound), gap.above(bound)) == (below, above)


@pytest.mark.parametrize("n", [6, 15, 31])
def test_medians_hold_the_truth_whatever_the_law(n: int):
    rng, kept, trials = np.random.default_rng(n), 0, 4000
    for _ in range(trials):
        result = median_of(np.exp(rng.normal(size=n)).tolist())
        kept += result.low <= 1.0 <= result.high
    assert 0.945 <= kept / trials <= 0.99


def test_medians_between_bounds():
    result = median_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert (result.value, result.low, result.high) == (1.3, 1.0, 1.6)
    assert (result.between(0.9), result.between(1.7), result.between(1.2)) == (True, False, None)
    assert result.between(0, 0.95) is False
    assert median_of([2.0]) == (2.0, 2.0, 2.0)
