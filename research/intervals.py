"""95 % intervals of means by Student's t, and what they decide.

Two things vary a difference between two models: the held-out windows that were scored, and the seeds that were trained.
With d (S, W) the differences of S seeds on W windows,

    half = sqrt( (1.96 s_w)^2 / W + (t_{S-1} s_s)^2 / S ),

s_w the deviation of the windows' means over seeds and s_s that of the seeds' means over windows. One seed has no
deviation, so that its interval is infinite and decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: 0.975 quantiles of Student's t by degrees of freedom, from 1
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t: to four digits up to 10 degrees of freedom, then to 1e-4 by its expansion
    around the normal law (Cornish and Fisher; Abramowitz and Stegun, 26.7.5)."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}")
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, n = _NORMAL, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


class Gap(NamedTuple):
    """A mean and half of its 95 % interval."""

    value: float
    half: float

    def below(self, bound: float = 0.0) -> bool | None:
        """Whether it is below the bound; None where the interval holds the bound, which decides nothing."""
        if self.value + self.half < bound:
            return True
        return False if self.value - self.half > bound else None

    def above(self, bound: float = 0.0) -> bool | None:
        below = self.below(bound)
        return None if below is None else not below

    @property
    def interval(self) -> tuple[float, float]:
        return self.value - self.half, self.value + self.half

    def __str__(self) -> str:
        return f"{self.value:+.3f} " + (f"+- {self.half:.3f}" if math.isfinite(self.half) else "(of one)")


class Median(NamedTuple):
    """A median and its 95 % interval."""

    value: float
    low: float
    high: float

    def between(self, least: float, most: float = math.inf) -> bool | None:
        """Whether it lies there: the whole interval does, nothing of it does, or (None) a part."""
        if least <= self.low and self.high <= most:
            return True
        return False if self.high < least or self.low > most else None

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def median_of(values: Sequence[float]) -> Median:
    """The median of independent values, whatever their law: by order statistics; from the least to the greatest where
    there are fewer than six, which hold it with less than 95 %."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0  # P(at most k of n values lie below the median), k the values left out at either end
    while True:
        outside += math.comb(n, k) / 2**n
        if outside > 0.025:
            break
        k += 1
    k = max(0, min(k - 1, (n - 1) // 2))
    return Median(statistics.median(ordered), ordered[k], ordered[n - 1 - k])


def gap_of(differences: Tensor) -> Gap:
    """The mean of the differences (S, W) of S seeds on W windows."""
    _, windows = differences.shape
    spread = 1.96 * _deviation(differences.mean(0)) / math.sqrt(windows) if windows > 1 else 0.0
    return Gap(float(differences.mean()), math.hypot(spread, mean_of(differences.mean(1)).half))


def mean_of(values: Tensor) -> Gap:
    """The mean of independent values (N,); the interval of a single one has no end."""
    n = len(values)
    half = t_quantile(n - 1) * _deviation(values) / math.sqrt(n) if n > 1 else math.inf
    return Gap(float(values.mean()), half)


def _deviation(values: Tensor) -> float:
    return float(torch.as_tensor(values, dtype=torch.float64).std())
