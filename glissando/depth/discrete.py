"""Discrete depth: a stack of S different blocks, x <- block_S(... block_1(x))."""

from __future__ import annotations

from typing import Any

from glissando.depth.base import BlockFactory, SequentialDepth
from glissando.errors import ConfigError


class DiscreteDepth(SequentialDepth):
    """A Transformer's depth: `layers` blocks, each applied once."""

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        super().__init__([make_block(i) for i in range(config.layers)])

    @property
    def order(self) -> list[int]:
        return list(range(len(self.blocks)))
