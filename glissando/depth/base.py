"""The contract of a depth: how the representation flows from the embedding to the head.

A depth is built from a factory of blocks and obeys the mixers' contract: init_state, forward(x, state, ctx).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from glissando.block import Block
from glissando.mixers import Context, Signal
from glissando.state import State

#: layer number -> a new block; the number picks the mixer where several alternate
BlockFactory = Callable[[int], Block]


class Depth(nn.Module, ABC):
    """Blocks put one after the other, or one block applied many times, or a flow."""

    @property
    @abstractmethod
    def honours(self) -> frozenset[Signal]:
        """The per-token signals that every part of this depth honours, or that the depth itself uses."""

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> (B, T, D) and the state after it; None in, None out."""
