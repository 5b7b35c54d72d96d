"""A part of a model whose gradient vanishes or explodes in training, as the audit judges it."""

from __future__ import annotations

import numpy as np
import pytest

from research.audit.hybrid.gradients import departure
from research.audit.training import running_median


def curve(end: float, n: int = 100) -> np.ndarray:
    """From 1 to `end` at an even pace in the logarithm."""
    return np.logspace(0, np.log10(end), n)


@pytest.mark.parametrize("end", [1e4, 1e-4])
def test_a_part_departs_where_its_median_is_a_hundred_times_off(end: float):
    """Over a decade in 25 rows the medians of windows 50 rows apart are 100 times apart."""
    result = departure(curve(end, 101), 10)
    assert result is not None
    assert abs(np.log10(result)) == pytest.approx(2.02, abs=0.03)
    assert (result > 1) is (end > 1)


@pytest.mark.parametrize(
    "norms",
    [
        curve(90.0),
        curve(1 / 90),
        np.where(np.arange(100) == 50, 1e6, 1.0),  # a single step is no trend
        np.where(np.arange(100) < 10, 0.0, 1.0),  # nothing to be compared with
        curve(1e9, 15),  # too short for two windows
    ],
)
def test_what_is_no_departure(norms: np.ndarray):
    assert departure(norms, 10) is None


def test_a_part_whose_gradient_stops_vanishes():
    assert departure(np.where(np.arange(100) < 50, 1.0, 0.0), 10) == 0


def test_running_median():
    assert running_median([1.0, 9, 2, 3, 4], 3) == [5, 2, 3, 3, 3.5]
    assert running_median([1.0, 9], 1) == [1, 9]
