"""The contract of a depth: how the representation flows from the embedding to the head.

A depth is built from a factory of blocks and obeys the mixers' contract: init_state, forward(x, state, ctx).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glissando.block import Block
from glissando.mixers import EMPTY, Context, Signal
from glissando.state import State

#: layer number -> a new block; the number picks the mixer where several alternate
BlockFactory = Callable[[int], Block]


class Depth(nn.Module, ABC):
    """Blocks put one after the other, or one block applied many times, or a flow."""

    #: the fields of DepthConfig that it reads; others must be left at their defaults
    options: frozenset[str] = frozenset({"layers"})

    @property
    @abstractmethod
    def honours(self) -> frozenset[Signal]:
        """The per-token signals that every part of this depth honours, or that the depth itself uses."""

    @abstractmethod
    def calls(self) -> list[tuple[Block, int]]:
        """Each block, and how often it is applied on the way forward."""

    @property
    @abstractmethod
    def n_residuals(self) -> int:
        """How many branches are added to the representation on its way: initialisation scales them by it."""

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> (B, T, D) and the state after it; None in, None out."""


class SequentialDepth(Depth):
    """Applications of blocks one after the other. State: a tuple with one state for each application."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.gradient_checkpointing = False

    @property
    @abstractmethod
    def order(self) -> list[int]:
        """The block of each application."""

    def enter(self, x: Tensor, step: int) -> Tensor:
        """What application `step` is given."""
        return x

    @property
    def honours(self) -> frozenset[Signal]:
        return reduce(frozenset.__and__, [block.honours for block in self.blocks])  # type: ignore[misc]

    def calls(self) -> list[tuple[Block, int]]:
        return [(block, self.order.count(i)) for i, block in enumerate(self.blocks)]  # type: ignore[misc]

    @property
    def n_residuals(self) -> int:
        return sum(self.blocks[i].n_residuals for i in self.order)  # type: ignore[misc]

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        return tuple(self.blocks[i].init_state(batch_size, device, dtype) for i in self.order)  # type: ignore[operator]

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, tuple | None]:
        ctx = ctx or EMPTY
        if state is None:
            for step, i in enumerate(self.order):
                x = self._train_step(self.blocks[i], x, step, ctx)
            return x, None
        after = []
        for (step, i), before in zip(enumerate(self.order), state, strict=True):
            x, new = self.blocks[i](self.enter(x, step), before, ctx)
            after.append(new)
        return x, tuple(after)

    def _train_step(self, block: nn.Module, x: Tensor, step: int, ctx: Context) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(lambda h: block(self.enter(h, step), None, ctx)[0], x, use_reentrant=False)
        return block(self.enter(x, step), None, ctx)[0]
