"""Axis two: how the representation flows from input to output. `register_depth` adds a depth from any file."""

from __future__ import annotations

from glissando.depth.base import DEPTHS, BlockFactory, Depth, DepthOptions, build_depth, register_depth
from glissando.depth.discrete import DiscreteConfig, DiscreteDepth, TiedConfig, TiedDepth
from glissando.depth.flow import FlowConfig, FlowDepth

__all__ = [
    "DEPTHS",
    "BlockFactory",
    "Depth",
    "DepthOptions",
    "DiscreteConfig",
    "DiscreteDepth",
    "FlowConfig",
    "FlowDepth",
    "TiedConfig",
    "TiedDepth",
    "build_depth",
    "register_depth",
]
