"""A state with adaptive time constants."""

from glissando.mixers.liquid.dynamics import Dense, Diagonal, LiquidConfig
from glissando.mixers.liquid.layer import Gated, Liquid, LiquidState, Published

__all__ = ["Dense", "Diagonal", "Gated", "Liquid", "LiquidConfig", "LiquidState", "Published"]
