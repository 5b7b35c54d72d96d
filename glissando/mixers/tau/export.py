"""The tau mixer with a cache of a fixed number of slots: token p of a text stands in slot p."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from glissando.mixers.attention.export import fixed_slots
from glissando.mixers.base import Context
from glissando.mixers.slots import at_last, latest_of

from .attention import exponents, tau_attention
from .layer import Projected, Tau


class FixedTauState(NamedTuple):
    k: Tensor  # (B, H, C)
    v: Tensor  # (B, H, C, K)
    e: Tensor | None  # (B, H, C) float64
    total: Tensor | None  # (B, H) float64
    latest: Tensor | None  # (B, H)
    position: Tensor  # (B,) int64


class FixedTau(Tau):
    """The mixer's own forward with so many slots and no more; those behind a row's tokens are hidden by their place."""

    def __init__(self, mixer: Tau, capacity: int) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(mixer))
        self.capacity = capacity

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> Any:
        state, shape = super().init_state(batch_size, device, dtype), (batch_size, self.heads, self.capacity)
        k, v = state.k.new_zeros(shape), state.v.new_zeros(*shape, self.head_size)
        return FixedTauState(k, v, None if state.e is None else k.double(), state.total, state.latest, state.position)

    def _attend(self, p: Projected, state: Any, counts: Any, ctx: Context) -> tuple[Tensor, Any]:
        put, e, total = fixed_slots(state.position), state.e, state.total
        (k, _), (v, _) = put(state.k, p.k), put(state.v, p.v)
        if e is not None:
            decay = None if p.decay is None else p.decay + total.unsqueeze(2)
            e, _ = put(e, exponents(p.k, p.importance, decay))
            total = None if decay is None else at_last(decay, counts, total)
        keys, values = k.to(p.q.dtype), v.to(p.v.dtype)
        y = tau_attention(p.q, keys, values, p.temperature, e, backend="reference", past=state.position)
        return y, FixedTauState(k, v, e, total, latest_of(p.q, counts, state.latest), state.position + counts)
