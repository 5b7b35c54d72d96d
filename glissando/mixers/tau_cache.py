"""The caches of the tau mixer: all tokens seen, or their sums in bins along lambda.

`exact` keeps v and lambda_k, and e = g - C where there is an importance or a gate. Bytes of a layer and row at context
L, in float32:  4 L (G K + H), and 8 L H for e, beside 8 L H K for the cache of softmax attention.

`binned` cuts lambda in [0, 1) into M bins and keeps two sums a bin, whatever the context:

    up_b   = sum_{k in b} exp(e_k - (right_b - k) / T) [v_k, 1]
    down_b = sum_{k in b} exp(e_k - (k - left_b) / T) [v_k, 1]

A query attends to the bins below its own through exp(-(q - right_b) / T) up_b, and to those above through down_b:
exactly. To its own bin it attends through (up_b + down_b) / 2, as if every key stood half a bin away; that weight is
off by a factor of at most exp(1 / (2 M T)) cosh(1 / (2 M T)), 1 % at T = 0.05 and 1024 bins. What comes in one call is
attended to exactly. Bytes in float32: 8 H M (K + 3), less than the exact cache from about 2 M tokens on (where G = H).
Each sum is relative to the largest exponent in it, its level, so that the nearest keys count whatever stands farther
away. Either cache keeps 4 H bytes more for the latest lambdas with `keys: previous`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.mixers.base import require_parts
from glissando.mixers.slots import append, at_last, cut, latest_of
from glissando.ops.precise import add, difference, filled, rounded, wide, wide_zeros, widest
from glissando.ops.tau_attention import attend, exponents
from glissando.precision import without_autocast
from glissando.state import zeros_position


class Projected(NamedTuple):
    """What attention is computed from. B rows, T tokens, H heads, G heads of values."""

    q: Tensor  # lambda^q (B, H, T)
    k: Tensor  # lambda^k (B, H, T)
    v: Tensor  # (B, G, T, K)
    temperature: Tensor  # (H,)
    importance: Tensor | None  # g (B, H, T)
    decay: Tensor | None  # C (B, H, T) wide, from the first token of the call


class ExactState(NamedTuple):
    """Slots [0, length) are real; those behind them are spare and never read."""

    k: Tensor  # lambda_k (B, H, slots), at least float32
    v: Tensor  # (B, G, slots, K)
    e: Tensor | None  # (B, H, slots) wide
    total: Tensor | None  # (B, H) wide: C at the latest token
    latest: Tensor | None  # (B, H), at least float32: lambda^q of the latest token, the next one's key; 0 before any
    position: Tensor  # (B,) int64: tokens seen

    @property
    def filled(self) -> Tensor:
        return self.position

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def with_capacity(self, capacity: int) -> ExactState:
        e = None if self.e is None else cut(self.e, capacity)
        return self._replace(k=cut(self.k, capacity), v=cut(self.v, capacity), e=e)


class BinnedState(NamedTuple):
    up: Tensor  # (B, H, M, K + 1), at least float32
    down: Tensor  # (B, H, M, K + 1)
    up_level: Tensor  # (B, H, M) in the widest type: about the largest exponent in each bin so far, to which its sum
    #                   is relative
    down_level: Tensor  # (B, H, M)
    total: Tensor | None  # (B, H) wide: C at the latest token
    latest: Tensor | None  # (B, H) as in ExactState
    position: Tensor  # (B,) int64


TauState = ExactState | BinnedState


#: 1 % of a weight at T = 0.05
_BINS = 1024
#: the level of an empty bin, in place of -inf: differences of it stay numbers
_NOTHING = {torch.float64: -1e300, torch.float32: -1e30}
#: queries that attend to all bins at once
_QUERIES = 256


class ExactCache:
    """Keys and values of all tokens seen; `shifts`: keys are earlier queries."""

    def __init__(self, heads: int, groups: int, size: int, has_importance: bool, has_decay: bool, shifts: bool) -> None:
        self.heads, self.groups, self.size = heads, groups, size
        self.has_e, self.has_decay, self.shifts = has_importance or has_decay, has_decay, shifts

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> ExactState:
        exact = torch.promote_types(dtype, torch.float32)
        k = torch.zeros(batch_size, self.heads, 0, device=device, dtype=exact)
        v = torch.zeros(batch_size, self.groups, 0, self.size, device=device, dtype=dtype)
        total = wide_zeros(batch_size, self.heads, device=device) if self.has_decay else None
        latest = k.new_zeros(batch_size, self.heads) if self.shifts else None
        return ExactState(k, v, wide(k) if self.has_e else None, total, latest, zeros_position(batch_size, device))

    def attend(self, p: Projected, state: Any, counts: Tensor | int, donate: bool) -> tuple[Tensor, ExactState]:
        require_parts(state, e=self.has_e, total=self.has_decay, latest=self.shifts)
        lengths = state.position.tolist()
        end = max(lengths, default=0) + p.q.shape[2]
        uniform = len(set(lengths)) <= 1

        def grown(slots: Tensor, latest: Tensor) -> Tensor:
            return append(slots, latest, state.position, end, uniform, donate)

        keys, values, e, total = grown(state.k, p.k), grown(state.v, p.v), state.e, state.total
        if e is not None:
            decay = _continued(p.decay, total)
            e = grown(e, exponents(p.k, p.importance, decay))
            total = total if decay is None or total is None else at_last(decay, counts, total)
        # A step of decoding reads what it sees; cutting the rest off would copy all of the cache.
        end = keys.shape[2] if p.q.shape[2] == 1 else end
        seen = keys[:, :, :end].to(p.q.dtype)
        near = exponents(seen, None, None) if e is None else e[:, :, :end]
        y, _ = attend(p.q, seen, values[:, :, :end].to(p.v.dtype), p.temperature, near, past=state.position)
        latest = latest_of(p.q, counts, state.latest)
        return y, ExactState(keys, values, e, total, latest, state.position + counts)


class BinnedCache:
    """Sums of values in bins along lambda; `bins`: how many, 1024 if None."""

    def __init__(self, heads: int, groups: int, size: int, bins: int | None, has_decay: bool, shifts: bool) -> None:
        self.heads, self.groups, self.size, self.bins = heads, groups, size, bins or _BINS
        self.has_decay, self.shifts = has_decay, shifts

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> BinnedState:
        exact = torch.promote_types(dtype, torch.float32)
        up = torch.zeros(batch_size, self.heads, self.bins, self.size + 1, device=device, dtype=exact)
        most = widest(device)
        level = torch.full(up.shape[:3], _NOTHING[most], device=device, dtype=most)
        total = wide_zeros(batch_size, self.heads, device=device) if self.has_decay else None
        latest = up.new_zeros(batch_size, self.heads) if self.shifts else None
        return BinnedState(up, up.clone(), level, level.clone(), total, latest, zeros_position(batch_size, device))

    def attend(self, p: Projected, state: Any, counts: Tensor | int, donate: bool) -> tuple[Tensor, BinnedState]:
        require_parts(state, total=self.has_decay, latest=self.shifts)
        decay = _continued(p.decay, state.total)
        e = exponents(p.k, p.importance, decay)
        own, lse = attend(p.q, p.k, p.v, p.temperature, e)
        sums, top = self._past(p, state)
        # Both are sums relative to an exponent: the larger of the two becomes the common one.
        highest = torch.maximum(rounded(top), rounded(lse)).detach()
        highest = wide(highest)
        ratio = difference(lse, highest).exp().to(sums.dtype).unsqueeze(-1)
        sums = sums * difference(top, highest).exp().to(sums.dtype).unsqueeze(-1)
        y = (own.to(sums.dtype) * ratio + sums[..., :-1]) / (ratio + sums[..., -1:])
        total = None if decay is None else at_last(decay, counts, state.total)
        latest = latest_of(p.q, counts, state.latest)
        after = self._after(p, e, state, counts, donate)._replace(total=total, latest=latest)
        return y.to(own.dtype), after._replace(position=state.position + counts)

    def _past(self, p: Projected, state: BinnedState) -> tuple[Tensor, Tensor]:
        """sum of weight [v, 1] over the bins (B, H, T, K + 1), relative to the exponent (B, H, T), wide, beside it."""
        pieces = [self._attend_to_bins(q, p.temperature.view(-1, 1, 1), state) for q in p.q.split(_QUERIES, -1)]
        sums, tops = zip(*pieces, strict=True)
        return torch.cat(sums, 2), torch.cat(tops, 2)

    def _attend_to_bins(self, queries: Tensor, t: Tensor, state: BinnedState) -> tuple[Tensor, Tensor]:
        most = widest(queries.device)
        q, own = queries.to(most).unsqueeze(-1), self._bin(queries).unsqueeze(-1)
        index = torch.arange(self.bins, device=q.device)
        left = index.to(most) / self.bins
        half = torch.where(index == own, math.log(2), torch.inf)  # of its own bin a query takes half of either sum
        below = torch.where(index < own, (q - left - 1 / self.bins).clamp_min(0) / t, half)
        above = torch.where(index > own, (left - q).clamp_min(0) / t, half)
        up_level, down_level = state.up_level.unsqueeze(2), state.down_level.unsqueeze(2)
        origin = None
        if most != torch.float64:  # a level of thousands leaves float32 no digits for a distance
            origin = torch.maximum(up_level.amax(-1), down_level.amax(-1))
            up_level, down_level = up_level - origin.unsqueeze(-1), down_level - origin.unsqueeze(-1)
        below, above = up_level - below, down_level - above
        top = torch.maximum(below.amax(-1), above.amax(-1)).detach().clamp_min(_NOTHING[most])
        up, down = ((x - top.unsqueeze(-1)).exp().to(state.up.dtype) for x in (below, above))
        with without_autocast(q.device.type):
            sums = up @ state.up + down @ state.down
        top = wide(top)
        return sums, top if origin is None else add(top, wide(origin.expand(top.shape[:3])))

    def _bin(self, values: Tensor) -> Tensor:
        return (values.detach() * self.bins).long().clamp(0, self.bins - 1)

    def _after(self, p: Projected, e: Tensor, state: BinnedState, counts: Tensor | int, donate: bool) -> BinnedState:
        real = None
        if isinstance(counts, Tensor):
            real = torch.arange(e.shape[2], device=e.device) < counts.unsqueeze(-1)
            e = filled(e, ~real.unsqueeze(1), -torch.inf)
        bins = self._bin(p.k)
        left, t = bins.to(state.up_level.dtype) / self.bins, p.temperature.view(-1, 1)
        v = p.v.to(state.up.dtype).repeat_interleave(self.heads // self.groups, 1)
        entry = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        index = bins.unsqueeze(-1).expand_as(entry)

        def added(sums: Tensor, level: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
            exponent = add(e, -wide(distance.clamp_min(0) / t))
            largest = rounded(exponent).detach()
            if e.shape[2] == 1:  # a step of decoding changes one bin a head, and need not read the others
                before = level.gather(2, bins)
                highest = torch.maximum(before, largest).clamp_min(_NOTHING[level.dtype])
                gaps = (before - highest, difference(exponent, wide(highest)))
                kept, weight = (gap.exp().to(sums.dtype).unsqueeze(-1) for gap in gaps)
                put = torch.Tensor.scatter_ if donate else torch.scatter
                return put(sums, 2, index, sums.gather(2, index) * kept + entry * weight), put(level, 2, bins, highest)
            highest = level.scatter_reduce(2, bins, largest, "amax").clamp_min(_NOTHING[level.dtype])
            weight = difference(exponent, wide(highest.gather(2, bins))).exp().to(sums.dtype)
            kept = sums * (level - highest).exp().to(sums.dtype).unsqueeze(-1)
            return kept.scatter_add(2, index, entry * weight.unsqueeze(-1)), highest

        up, up_level = added(state.up, state.up_level, left + 1 / self.bins - p.k)
        down, down_level = added(state.down, state.down_level, p.k - left)
        return state._replace(up=up, down=down, up_level=up_level, down_level=down_level)


def bin_error(bins: int, temperature: float) -> float:
    """The largest relative error of a weight that `binned` makes: exp(a) cosh(a) - 1 with a = 1 / (2 M T)."""
    a = 1 / (2 * bins * temperature)
    return math.exp(a) * math.cosh(a) - 1


def _continued(decay: Tensor | None, total: Tensor | None) -> Tensor | None:
    return None if decay is None or total is None else add(decay, total.unsqueeze(2))
