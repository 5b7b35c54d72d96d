"""What the tau mixer remembers of the tokens it has seen: all of them, or their sums in bins along lambda.

`exact` keeps v and lambda_k, and e = g - C where there is an importance or a gate. Bytes of a layer and row at context
L, in float32:  4 L (G K + H), and 8 L H for e, beside 8 L H K for the cache of softmax attention.

`binned` cuts lambda in [0, 1) into M bins and keeps two sums a bin, whatever the context:

    up_b   = sum_{k in b} exp(e_k - (right_b - k) / T) [v_k, 1]
    down_b = sum_{k in b} exp(e_k - (k - left_b) / T) [v_k, 1]

A query hears the bins below its own through exp(-(q - right_b) / T) up_b, and those above through down_b: exactly. Its
own bin it hears through (up_b + down_b) / 2, as if every key stood half a bin away; that weight is off by a factor of
at most exp(1 / (2 M T)) cosh(1 / (2 M T)), 1 % at T = 0.05 and 1024 bins. What comes in one call is heard exactly.
Bytes in float32: 8 H M (K + 1), less than the exact cache from about 2 M tokens on (where G = H). Both are relative
to a maximum, `level`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from glissando.mixers.slots import append, at_last
from glissando.ops.tau_attention import attend, exponents
from glissando.state import zeros_position

if TYPE_CHECKING:
    from glissando.mixers.tau import Tau


class Heard(NamedTuple):
    """What attention is computed from. B rows, T tokens, H heads, G heads of values."""

    q: Tensor  # lambda^q (B, H, T)
    k: Tensor  # lambda^k (B, H, T)
    v: Tensor  # (B, G, T, K)
    temperature: Tensor  # (H,)
    importance: Tensor | None  # g (B, H, T)
    decay: Tensor | None  # C (B, H, T) float64, from the first token of the call


class ExactState(NamedTuple):
    """Slots [0, length) are real; what lies behind them is room to grow and never read."""

    k: Tensor  # lambda_k (B, H, slots), at least float32
    v: Tensor  # (B, G, slots, K)
    e: Tensor | None  # (B, H, slots) float64
    total: Tensor | None  # (B, H) float64: C at the latest token
    latest: Tensor | None  # (B, H), at least float32: lambda^q of the latest token, the next one's key; 0 before any
    position: Tensor  # (B,) int64: tokens seen


class BinnedState(NamedTuple):
    up: Tensor  # (B, H, M, K + 1), at least float32
    down: Tensor  # (B, H, M, K + 1)
    level: Tensor  # (B, H) float64: the largest e so far, to which the sums are relative
    total: Tensor | None  # (B, H) float64: C at the latest token
    latest: Tensor | None  # (B, H) as in ExactState
    position: Tensor  # (B,) int64


TauState = ExactState | BinnedState


#: 1 % of a weight at T = 0.05
_BINS = 1024
#: queries that look at all bins at once
_QUERIES = 256


class ExactCache:
    def __init__(self, mixer: Tau) -> None:
        c = mixer.config
        self.heads, self.groups, self.size = mixer.heads, mixer.value_heads, mixer.head_size
        self.has_e, self.has_decay = c.importance or c.forget_gate, c.forget_gate
        self.shifts = c.keys == "previous"

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> ExactState:
        exact = torch.promote_types(dtype, torch.float32)
        k = torch.zeros(batch_size, self.heads, 0, device=device, dtype=exact)
        v = torch.zeros(batch_size, self.groups, 0, self.size, device=device, dtype=dtype)
        total = k.new_zeros(batch_size, self.heads, dtype=torch.float64) if self.has_decay else None
        latest = k.new_zeros(batch_size, self.heads) if self.shifts else None
        return ExactState(k, v, k.double() if self.has_e else None, total, latest, zeros_position(batch_size, device))

    def hear(self, heard: Heard, state: Any, counts: Tensor | int, donate: bool) -> tuple[Tensor, ExactState]:
        lengths = state.position.tolist()
        end = max(lengths, default=0) + heard.q.shape[2]
        uniform = len(set(lengths)) <= 1

        def grown(slots: Tensor, latest: Tensor) -> Tensor:
            if slots.ndim == 3:
                return grown(slots.unsqueeze(-1), latest.unsqueeze(-1)).squeeze(-1)
            return append(slots, latest, state.position, end, uniform, donate)

        keys, values, e, total = grown(state.k, heard.k), grown(state.v, heard.v), state.e, state.total
        if e is not None:
            decay = _continued(heard.decay, total)
            e = grown(e, exponents(heard.k, heard.importance, decay))
            total = total if decay is None or total is None else at_last(decay, counts, total)
        # A step of decoding reads what it sees; cutting the rest off would copy all of the cache.
        end = keys.shape[2] if heard.q.shape[2] == 1 else end
        seen = keys[:, :, :end]
        near = exponents(seen, None, None) if e is None else e[..., :end]
        y, _ = attend(heard.q, seen, values[:, :, :end], heard.temperature, near, past=state.position)
        latest = None if state.latest is None else at_last(heard.q, counts, state.latest).to(state.latest.dtype)
        return y, ExactState(keys, values, e, total, latest, state.position + counts)


class BinnedCache:
    def __init__(self, mixer: Tau) -> None:
        c = mixer.config
        self.heads, self.groups, self.size, self.bins = mixer.heads, mixer.value_heads, mixer.head_size, c.bins or _BINS
        self.has_decay, self.shifts = c.forget_gate, c.keys == "previous"

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> BinnedState:
        exact = torch.promote_types(dtype, torch.float32)
        up = torch.zeros(batch_size, self.heads, self.bins, self.size + 1, device=device, dtype=exact)
        level = torch.full((batch_size, self.heads), -torch.inf, device=device, dtype=torch.float64)
        total = torch.zeros_like(level) if self.has_decay else None
        latest = up.new_zeros(batch_size, self.heads) if self.shifts else None
        return BinnedState(up, up.clone(), level, total, latest, zeros_position(batch_size, device))

    def hear(self, heard: Heard, state: Any, counts: Tensor | int, donate: bool) -> tuple[Tensor, BinnedState]:
        decay = _continued(heard.decay, state.total)
        e = exponents(heard.k, heard.importance, decay)
        own, lse = attend(heard.q, heard.k, heard.v, heard.temperature, e)
        sums, top = self._past(heard, state)
        # Both are sums relative to an exponent: the larger of the two becomes the common one.
        highest = torch.maximum(top, lse).detach()
        ratio = (lse - highest).exp().to(sums.dtype).unsqueeze(-1)
        sums = sums * (top - highest).exp().to(sums.dtype).unsqueeze(-1)
        y = (own.to(sums.dtype) * ratio + sums[..., :-1]) / (ratio + sums[..., -1:])
        total = None if decay is None else at_last(decay, counts, state.total)
        latest = None if state.latest is None else at_last(heard.q, counts, state.latest).to(state.latest.dtype)
        after = self._after(heard, e, state, counts)._replace(total=total, latest=latest)
        return y.to(own.dtype), after._replace(position=state.position + counts)

    def _past(self, heard: Heard, state: BinnedState) -> tuple[Tensor, Tensor]:
        """sum of weight [v, 1] over the bins (B, H, T, K + 1), and the exponent (B, H, T) that it is relative to."""
        temperature = heard.temperature.to(state.up.dtype).view(-1, 1, 1)
        pieces = [self._hear_bins(q, temperature, state) for q in heard.q.split(_QUERIES, -1)]
        return torch.cat(pieces, 2), state.level.unsqueeze(-1).expand(heard.q.shape)

    def _hear_bins(self, queries: Tensor, t: Tensor, state: BinnedState) -> Tensor:
        q, own = queries.to(state.up.dtype).unsqueeze(-1), self._bin(queries).unsqueeze(-1)
        index = torch.arange(self.bins, device=q.device)
        left = index.to(q.dtype) / self.bins
        below = torch.where(index < own, ((left + 1 / self.bins - q).clamp_max(0) / t).exp(), 0)
        above = torch.where(index > own, ((q - left).clamp_max(0) / t).exp(), 0)
        below, above = torch.where(index == own, 0.5, below), torch.where(index == own, 0.5, above)
        return below @ state.up + above @ state.down

    def _bin(self, values: Tensor) -> Tensor:
        return (values.detach() * self.bins).long().clamp(0, self.bins - 1)

    def _after(self, heard: Heard, e: Tensor, state: BinnedState, counts: Tensor | int) -> BinnedState:
        real = None
        if not isinstance(counts, int):
            real = torch.arange(e.shape[2], device=e.device) < counts.unsqueeze(-1)
            e = e.masked_fill(~real.unsqueeze(1), -torch.inf)
        level = torch.maximum(state.level, e.detach().amax(-1))
        keep = torch.where(level > -torch.inf, (state.level - level).exp(), 0).to(state.up.dtype)[..., None, None]
        bins = self._bin(heard.k)
        k, t = heard.k.to(state.up.dtype), heard.temperature.to(state.up.dtype).view(-1, 1)
        left = bins.to(k.dtype) / self.bins
        weight = torch.where(e > -torch.inf, (e - level.unsqueeze(-1)).exp(), 0).to(k.dtype)
        v = heard.v.to(k.dtype).repeat_interleave(self.heads // self.groups, 1)
        entry = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        index = bins.unsqueeze(-1).expand_as(entry)

        def added(sums: Tensor, distance: Tensor) -> Tensor:
            new = entry * (weight * (-distance.clamp_min(0) / t).exp()).unsqueeze(-1)
            return (sums * keep).scatter_add(2, index, new)

        up, down = added(state.up, left + 1 / self.bins - k), added(state.down, k - left)
        return state._replace(up=up, down=down, level=level)


def bin_error(bins: int, temperature: float) -> float:
    """The largest relative error of a weight that `binned` makes: exp(a) cosh(a) - 1 with a = 1 / (2 M T)."""
    a = 1 / (2 * bins * temperature)
    return math.exp(a) * math.cosh(a) - 1


def _continued(decay: Tensor | None, total: Tensor | None) -> Tensor | None:
    return None if decay is None or total is None else decay + total.unsqueeze(-1)
