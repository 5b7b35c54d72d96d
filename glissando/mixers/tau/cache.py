"""The cache of the tau mixer: v and lambda_k of all tokens seen, and e = g - C where there is an importance or a gate.

Bytes of a layer and row at context L, in float32:  4 L (H K + H), and 8 L H for e, beside 8 L H K for the cache of
softmax attention; 4 H bytes more for the latest lambdas with `keys: previous`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.kernels.precise import wide
from glissando.mixers.base import Context, require_parts
from glissando.mixers.slots import append, at_last, cut, latest_of
from glissando.state import zeros_position

from .attention import exponents, tau_attention


class Projected(NamedTuple):
    """What attention is computed from. B rows, T tokens, H heads."""

    q: Tensor  # lambda^q (B, H, T)
    k: Tensor  # lambda^k (B, H, T)
    v: Tensor  # (B, H, T, K)
    temperature: Tensor  # (H,)
    importance: Tensor | None  # g (B, H, T)
    decay: Tensor | None  # C (B, H, T) in the widest type, from the first token of the call


class TauState(NamedTuple):
    """Slots [0, length) are real; those behind them are spare and never read."""

    k: Tensor  # lambda_k (B, H, slots), at least float32
    v: Tensor  # (B, H, slots, K)
    e: Tensor | None  # (B, H, slots) in the widest type
    total: Tensor | None  # (B, H) the same: C at the latest token
    latest: Tensor | None  # (B, H), at least float32: lambda^q of the latest token, the next one's key; 0 before any
    length: Tensor  # (B,) int64: tokens seen
    position: Tensor  # (B,) the same; with dt the time that they took

    @property
    def filled(self) -> Tensor:
        return self.length

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def with_capacity(self, capacity: int) -> TauState:
        e = None if self.e is None else cut(self.e, capacity)
        return self._replace(k=cut(self.k, capacity), v=cut(self.v, capacity), e=e)


class TauCache:
    """Keys and values of all tokens seen; `shifts`: keys are earlier queries."""

    def __init__(self, heads: int, size: int, has_importance: bool, has_decay: bool, shifts: bool) -> None:
        self.heads, self.size = heads, size
        self.has_e, self.has_decay, self.shifts = has_importance or has_decay, has_decay, shifts

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> TauState:
        exact = torch.promote_types(dtype, torch.float32)
        k = torch.zeros(batch_size, self.heads, 0, device=device, dtype=exact)
        v = torch.zeros(batch_size, self.heads, 0, self.size, device=device, dtype=dtype)
        total = wide(k.new_zeros(batch_size, self.heads)) if self.has_decay else None
        latest = k.new_zeros(batch_size, self.heads) if self.shifts else None
        position = zeros_position(batch_size, device)
        return TauState(k, v, wide(k) if self.has_e else None, total, latest, position, position)

    def attend(self, p: Projected, state: Any, counts: Tensor | int, ctx: Context) -> tuple[Tensor, TauState]:
        require_parts(state, e=self.has_e, total=self.has_decay, latest=self.shifts)
        lengths = state.length.tolist()
        end = max(lengths, default=0) + p.q.shape[2]
        uniform = len(set(lengths)) <= 1

        def grown(slots: Tensor, latest: Tensor) -> Tensor:
            return append(slots, latest, state.length, end, uniform, ctx.donate)

        keys, values, e, total = grown(state.k, p.k), grown(state.v, p.v), state.e, state.total
        if e is not None:
            decay = _continued(p.decay, total)
            e = grown(e, exponents(p.k, p.importance, decay))
            total = total if decay is None or total is None else at_last(decay, counts, total)
        # A step of decoding reads what it sees; cutting the rest off would copy all of the cache.
        end = keys.shape[2] if p.q.shape[2] == 1 else end
        seen = keys[:, :, :end].to(p.q.dtype)
        near = None if e is None else e[:, :, :end]
        y = tau_attention(p.q, seen, values[:, :, :end].to(p.v.dtype), p.temperature, near, past=state.length)
        latest = latest_of(p.q, counts, state.latest)
        length, position = state.length + counts, state.position + ctx.elapsed(counts)
        return y, TauState(keys, values, e, total, latest, length, position)


def _continued(decay: Tensor | None, total: Tensor | None) -> Tensor | None:
    return None if decay is None or total is None else decay + total.unsqueeze(2)
