"""Discrete depth: a stack of S different blocks, x <- block_S(... block_1(x))."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from glissando.depth.base import BlockFactory, SequentialDepth
from glissando.errors import ConfigError

if TYPE_CHECKING:
    from glissando.depth import DepthConfig
    from glissando.growth import Growth


class DiscreteDepth(SequentialDepth):
    """A Transformer's depth: `layers` blocks, each applied once."""

    options = frozenset({"layers", "gated"})

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        super().__init__([make_block(i) for i in range(config.layers)], config.layers, config.gated)

    def grown_config(self, config: DepthConfig, by: Growth) -> DepthConfig:
        if by.steps:
            raise ConfigError(
                f"grow: steps {by.steps} are applications of a tied depth; this one is discrete, add layers"
            )
        new = range(config.layers, config.layers + by.layers)
        gated = [] if all(block.can_rest for block, _ in self.calls()) else list(new)
        return replace(config, layers=config.layers + by.layers, gated=[*config.gated, *gated])

    @property
    def order(self) -> list[int]:
        return list(range(len(self.blocks)))
