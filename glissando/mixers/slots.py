"""Keys: those that are queries of the token before, and a cache of slots behind each row's start, which grow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.kernels.loop import delayed
from glissando.mixers.base import last_real


def shifted(q: Tensor, latest: Tensor | None) -> Tensor:
    """Keys from queries (B, H, T, ...): each that of the token before, at the first `latest` (B, H, ...) or 0."""
    before = torch.zeros_like(q[:, :, :1]) if latest is None else latest.to(q.dtype).unsqueeze(2)
    return delayed(before, q, 2)


def at_last(x: Tensor, counts: Tensor | int, before: Tensor) -> Tensor:
    """x (B, H, T, ...) at each row's last real token; `before` (B, H, ...) in a row that has none."""
    return last_real(x.transpose(1, 2), counts, before)


def latest_of(q: Tensor, counts: Tensor | int, before: Tensor | None) -> Tensor | None:
    """What `shifted` will take for the token that follows; None where keys are not shifted."""
    return None if before is None else at_last(q, counts, before)


def cut(slots: Tensor, capacity: int) -> Tensor:
    """The first `capacity` slots of (B, G, slots, ...), copied: a view would keep the others alive."""
    return slots[:, :, :capacity].clone()


def append(slots: Tensor, new: Tensor, start: Tensor, end: int, uniform: bool, donate: bool) -> Tensor:
    """`new` (B, G, T, K) or (B, G, T) written behind each row's `start` slots; in place, with spare slots, if donated.

    The cache keeps its own type, which need not be that of what is computed.
    """
    if slots.ndim == 3:
        return append(slots.unsqueeze(-1), new.unsqueeze(-1), start, end, uniform, donate).squeeze(-1)
    new = new.to(slots.dtype)
    begin = end - new.shape[2]
    if not donate and uniform:
        return torch.cat([slots[:, :, :begin], new], 2)
    capacity = slots.shape[2]
    if capacity < end:
        # Doubling makes the copies of a growing cache cost O(1) a token.
        slots = F.pad(slots, (0, 0, 0, (max(end, 64, 2 * capacity) if donate else end) - capacity))
    if uniform:
        slots[:, :, begin:end] = new
        return slots
    index = start.unsqueeze(1) + torch.arange(new.shape[2], device=start.device)
    index = index.view(index.shape[0], 1, -1, 1).expand(-1, new.shape[1], -1, new.shape[3])
    return slots.scatter_(2, index, new) if donate else slots.scatter(2, index, new)
