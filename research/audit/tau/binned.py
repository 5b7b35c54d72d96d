"""A memory of constant size for attention by |lambda_q - lambda_k|: two decayed sums for each of M bins of [0, 1).

    up_b   = sum_{k in b} exp(e_k - (right_b - k) / T) [v_k, 1]
    down_b = sum_{k in b} exp(e_k - (k - left_b) / T) [v_k, 1]

A query attends to the bins below its own through exp(-(q - right_b) / T) up_b, and to those above through down_b:
exactly. To its own bin it attends through (up_b + down_b) / 2, as if every key stood half a bin away; that weight is
off by a factor of at most exp(a) cosh(a), a = 1 / (2 M T): 1 % at T = 0.05 and 1024 bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class BinnedMemory:
    """H heads with values of K numbers. Each sum is relative to the largest exponent in it, its level."""

    def __init__(self, heads: int, size: int, bins: int = 1024) -> None:
        self.bins = bins
        self.sums = torch.zeros(2, heads, bins, size + 1)  # up and down
        self.levels = torch.full((2, heads, bins), -1e300, dtype=torch.float64)
        self.left = torch.arange(bins, dtype=torch.float64) / bins

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.levels.nbytes

    def write(self, k: Tensor, v: Tensor, e: Tensor, temperature: float) -> None:
        """One token: lambda k and exponent e (H,), v (H, K)."""
        heads, index = torch.arange(len(k)), self._bin(k)
        entry = torch.cat([v, torch.ones_like(v[:, :1])], -1)
        below = k.double() - self.left[index]
        for side, distance in enumerate((1 / self.bins - below, below)):
            exponent, before = e - distance / temperature, self.levels[side, heads, index]
            level = torch.maximum(before, exponent)
            share, weight = ((x - level).exp().float().unsqueeze(-1) for x in (before, exponent))
            self.sums[side, heads, index] = self.sums[side, heads, index] * share + entry * weight
            self.levels[side, heads, index] = level

    def read(self, q: Tensor, temperature: float) -> Tensor:
        """o (H, K) of one query, lambda q (H,)."""
        place, query = self._bin(q).unsqueeze(-1), q.double().unsqueeze(-1)
        each = torch.arange(self.bins)
        within = torch.where(each == place, math.log(2), torch.inf)  # half of either sum
        rise = torch.where(each < place, (query - self.left - 1 / self.bins) / temperature, within)
        fall = torch.where(each > place, (self.left - query) / temperature, within)
        logits = self.levels - torch.stack([rise, fall])
        weights = (logits - logits.amax((0, 2), keepdim=True)).exp().float()
        total = (weights.unsqueeze(-1) * self.sums).sum((0, 2))
        return total[:, :-1] / total[:, -1:]

    def _bin(self, x: Tensor) -> Tensor:
        return (x * self.bins).long().clamp(0, self.bins - 1)
