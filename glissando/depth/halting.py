"""Per-token adaptive depth on a fixed grid: a token is not evaluated any more once its slope can be extrapolated.

With s_j the slope of step j of size d (the tableau's increment over d), a token whose estimated error is small,

    d |s_j - s_{j-1}| <= tolerance |h|,        |.| the root mean square over the width

halts: its later slopes continue along the straight line through its last two, s_{j+1} = s_j + (s_j - s_{j-1}), and the
field is not evaluated for it. d |s_j - s_{j-1}| is the difference of Euler's step and the two-step Adams-Bashforth one,
up to a factor of 1/2, and costs no evaluation. The first two steps are always evaluated.

A halted token still passes through the field's mixer, with the representation it has by then, because later tokens
attend to it; what is left out is its MLP. The decision looks at one token's own representation, so that no other row
and no later token changes it. Embedded estimates: Hairer, Norsett and Wanner 1993, Solving Ordinary Differential
Equations I, II.4; halting per token: Graves 2016, arXiv 1603.08983.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glissando.depth.solvers import TABLEAUS, Tableau


class HaltingField(Protocol):
    """field(tau, h, *args, active=...) -> dh/dtau; what it returns where `active` (B, T) is False is not used.

    idle(active): no token needs a slope and the field keeps no state, so that it need not be called.
    """

    def __call__(self, tau: float, h: Tensor, *args: Tensor, active: Tensor | None = None) -> Tensor: ...

    def idle(self, active: Tensor) -> bool: ...


@dataclass
class EvaluationCount:
    """How often the field was evaluated for how many tokens; padding does not count."""

    evaluations: int = 0
    tokens: int = 0

    @property
    def per_token(self) -> float:
        return self.evaluations / self.tokens


def unroll_halting(
    field: HaltingField,
    h: Tensor,
    *,
    args: Sequence[Tensor] = (),
    n_steps: int,
    method: str,
    tolerance: float,
    mask: Tensor | None = None,
    count: EvaluationCount | None = None,
) -> Tensor:
    """h (B, T, D) at tau = 1; `unroll` where nothing halts. `count` is added to, at the tokens of `mask`."""
    tableau, size = TABLEAUS[method], 1 / n_steps
    active = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    slope = change = None
    for step in range(n_steps):
        if count is not None:
            count.evaluations += tableau.stages * int((active if mask is None else active & mask).sum())
        extrapolated = None if slope is None or change is None else slope + change
        new = _Step(field, tableau, step * size, size, args).slope(h, extrapolated, active)
        if slope is not None:
            change = new - slope
            active = active & (size * _rms(change) > tolerance * _rms(h))
        slope = new
        h = h + size * slope
    if count is not None:
        count.tokens += active.numel() if mask is None else int(mask.sum())
    return h


@dataclass(frozen=True)
class _Step:
    """One step of the grid, from tau to tau + size."""

    field: HaltingField
    tableau: Tableau
    tau: float
    size: float
    args: Sequence[Tensor]

    def slope(self, h: Tensor, extrapolated: Tensor | None, active: Tensor) -> Tensor:
        """The step's increment over its size; `extrapolated` where a token has halted."""
        if extrapolated is None:
            return self._increment(h, None, None)
        if self.field.idle(active):
            return extrapolated
        return torch.where(active.unsqueeze(-1), self._increment(h, extrapolated, active), extrapolated)

    def _increment(self, h: Tensor, extrapolated: Tensor | None, active: Tensor | None) -> Tensor:
        slopes: list[Tensor] = []
        for row, share in zip(self.tableau.a, self.tableau.c, strict=True):
            at = h if not any(row) else h + self.size * _weighted(row, slopes)
            if extrapolated is not None and active is not None and share:
                at = torch.where(active.unsqueeze(-1), at, h + share * self.size * extrapolated)
            slopes.append(self.field(self.tau + share * self.size, at, *self.args, active=active))
        return _weighted(self.tableau.b, slopes)


def _weighted(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    terms = [slope * weight for weight, slope in zip(weights, slopes, strict=True) if weight]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]


def _rms(values: Tensor) -> Tensor:
    return values.detach().square().mean(-1).sqrt()
