"""Discrete depth: a stack of S different blocks, x <- block_S(... block_1(x))."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glissando.depth.base import BlockFactory, Depth
from glissando.errors import ConfigError
from glissando.mixers import EMPTY, Context, Signal


class DiscreteDepth(Depth):
    """A Transformer's depth. State: a tuple with each block's own."""

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        super().__init__()
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        self.blocks = nn.ModuleList(make_block(i) for i in range(config.layers))
        self.gradient_checkpointing = False

    @property
    def honours(self) -> frozenset[Signal]:
        return reduce(frozenset.__and__, [block.honours for block in self.blocks])  # type: ignore[misc]

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        return tuple(block.init_state(batch_size, device, dtype) for block in self.blocks)  # type: ignore[operator]

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, tuple | None]:
        ctx = ctx or EMPTY
        if state is None:
            for block in self.blocks:
                x = self._train_step(block, x, ctx)
            return x, None
        after = []
        for block, before in zip(self.blocks, state, strict=True):
            x, new = block(x, before, ctx)
            after.append(new)
        return x, tuple(after)

    def _train_step(self, block: nn.Module, x: Tensor, ctx: Context) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(lambda h: block(h, None, ctx)[0], x, use_reentrant=False)
        return block(x, None, ctx)[0]
