"""The tau mixer with a cache of a fixed number of slots: token p of a text stands in slot p."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.mixers.attention.export import fixed_slots
from glissando.mixers.base import Context
from glissando.mixers.slots import at_last, latest_of

from .attention import exponents, tau_attention
from .cache import Projected, TauCache, _continued
from .layer import Tau


class FixedTauState(NamedTuple):
    k: Tensor  # (B, H, C)
    v: Tensor  # (B, H, C, K)
    e: Tensor | None  # (B, H, C) float64
    total: Tensor | None  # (B, H) float64
    latest: Tensor | None  # (B, H)
    position: Tensor  # (B,) int64


class FixedCache(TauCache):
    """TauCache with so many slots and no more; those behind a row's own tokens are hidden by their place."""

    def __init__(self, cache: TauCache, capacity: int) -> None:
        vars(self).update(vars(cache))
        self.capacity = capacity

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Any:
        state, capacity = super().init_state(batch_size, device, dtype), self.capacity
        k, v = (
            state.k.new_zeros(batch_size, self.heads, capacity),
            state.v.new_zeros(*state.v.shape[:2], capacity, self.size),
        )
        e = None if state.e is None else k.double()
        return FixedTauState(k, v, e, state.total, state.latest, state.position)

    def attend(self, p: Projected, state: Any, counts: Any, ctx: Context) -> tuple[Tensor, Any]:
        put, e, total = fixed_slots(state.position), state.e, state.total
        (k, _), (v, _) = put(state.k, p.k), put(state.v, p.v)
        if e is not None:
            decay = _continued(p.decay, total)
            e, _ = put(e, exponents(p.k, p.importance, decay))
            total = total if decay is None else at_last(decay, counts, total)
        keys, values = k.to(p.q.dtype), v.to(p.v.dtype)
        y = tau_attention(p.q, keys, values, p.temperature, e, backend="reference", past=state.position)
        return y, FixedTauState(k, v, e, total, latest_of(p.q, counts, state.latest), state.position + counts)


def fixed_tau(mixer: Tau, capacity: int) -> Tau:
    """The mixer with a fixed cache."""
    fixed = copy.copy(mixer)
    fixed.cache = FixedCache(mixer.cache, capacity)
    return fixed
