"""A state with adaptive time constants."""

from glissando.mixers.liquid.dynamics import Dense, Diagonal, LiquidConfig
from glissando.mixers.liquid.layer import Gated, Liquid, LiquidState, Published
from glissando.mixers.liquid.zero_order_hold import discretize, hippo_legs, legs_modes

__all__ = [
    "Dense",
    "Diagonal",
    "Gated",
    "Liquid",
    "LiquidConfig",
    "LiquidState",
    "Published",
    "discretize",
    "hippo_legs",
    "legs_modes",
]
