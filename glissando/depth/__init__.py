"""Axis two: how the representation flows from input to output.

Adding a depth is two edits: its file, and one line in `DEPTHS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from glissando.depth.base import BlockFactory, Depth
from glissando.depth.discrete import DiscreteDepth
from glissando.errors import unknown_name

DEPTHS: dict[str, type[Depth]] = {"discrete": DiscreteDepth}


@dataclass
class DepthConfig:
    """kind of depth (see DEPTHS) and the number of layers."""

    kind: str = "discrete"
    layers: int = 4


def build_depth(config: DepthConfig, make_block: BlockFactory) -> Depth:
    """The depth `config.kind`, its blocks made by `make_block`.

    Raises UnknownNameError for a kind that is not registered.
    """
    if config.kind not in DEPTHS:
        raise unknown_name("depth", config.kind, DEPTHS)
    return DEPTHS[config.kind](config, make_block)


__all__ = ["DEPTHS", "BlockFactory", "Depth", "DepthConfig", "build_depth"]
