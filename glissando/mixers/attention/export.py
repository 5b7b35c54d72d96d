"""Softmax attention whose cache has a fixed number of slots.

Without a window, token p of a text stands in slot p, and a token behind the last slot has no place: the write is out of
bounds, which a runtime on a CPU reports. With a window the slots hold its latest tokens in order, whatever the length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.mixers.attention.layer import Attention
from glissando.mixers.base import Context, placement
from glissando.mixers.slots import at_last, latest_of
from glissando.state import zeros_position


class FixedState(NamedTuple):
    k: Tensor  # (B, G, C, K)
    v: Tensor  # (B, G, C, K)
    decay: Tensor | None  # (B, H, C) float64
    total: Tensor | None  # (B, H) float64
    latest: Tensor | None  # (B, H, K)
    length: Tensor  # (B,) int64, tokens seen
    position: Tensor  # (B,) the same; float64 where the mixer is timed: the time that they took


class FixedAttention(Attention):
    """The mixer's own forward with another cache.

    timed  whether it will be given dt, so that its position is a time
    """

    timed = False

    def __init__(self, mixer: Attention, capacity: int) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(mixer))
        self.capacity = mixer.config.window or capacity

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> Any:
        state = super().init_state(batch_size, device, dtype)
        slots = state.k.new_zeros(batch_size, self.kv_heads, self.capacity, self.head_size)
        decay = None if state.decay is None else state.decay.new_zeros(batch_size, self.heads, self.capacity)
        length = zeros_position(batch_size, placement(self, device, dtype)["device"])
        position = length.double() if self.timed else length
        return FixedState(slots, slots, decay, state.total, state.latest, length, position)

    def _cached(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Any, counts: Any, ctx: Context
    ) -> Any:
        put = fixed_window(state.length, self.capacity) if self.config.window else fixed_slots(state.length)
        total, decays, past = state.total, None, None
        if decay is not None:
            decay = decay + total.unsqueeze(-1)
            total = at_last(decay, counts, total)
            decays, past = put(state.decay, decay)
        (keys, seen_keys), (values, seen_values) = put(state.k, k), put(state.v, v)
        latest = latest_of(q, counts, state.latest)
        position = state.position + ctx.elapsed(counts)
        after = FixedState(keys, values, decays, total, latest, state.length + counts, position)
        visible = self._visible(state.length, q.shape[2], seen_keys.shape[2])
        return seen_keys, seen_values, past, decay, visible, after

    def _visible(self, length: Tensor, new: Any, slots: Any) -> Tensor:
        """bool (B, 1, T, slots)."""
        query_at = (length.unsqueeze(1) + torch.arange(new, device=length.device)).unsqueeze(-1)
        slot = torch.arange(slots, device=length.device).view(1, 1, -1)
        if self.config.window is not None:
            slot = slot + (length - self.capacity).view(-1, 1, 1)
            return ((slot >= 0) & (slot <= query_at) & (slot > query_at - self.config.window)).unsqueeze(1)
        return (slot <= query_at).unsqueeze(1)


def fixed_slots(position: Tensor) -> Any:
    """put(slots (B, G, C, ...), new (B, G, T, ...)) -> the slots with `new` from `position` (B,) on, twice."""

    def put(slots: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        index = position.unsqueeze(1) + torch.arange(new.shape[2], device=position.device)
        index = index.view(-1, 1, new.shape[2], *[1] * (new.ndim - 3)).expand(new.shape)
        slots = slots.scatter(2, index, new.to(slots.dtype))
        return slots, slots

    return put


def fixed_window(position: Tensor, size: int) -> Any:
    """put(slots, new) -> the latest `size` of both, and all of both, which the new tokens see."""

    def put(slots: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([slots, new.to(slots.dtype)], 2)
        return both[:, :, -size:].clone(), both

    return put
