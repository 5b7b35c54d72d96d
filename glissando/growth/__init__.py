"""Larger without a jump: growing a trained model without changing what it computes."""

from glissando.growth.grow import Grown, grow, grow_by, grown_config
from glissando.widening import Growth

__all__ = ["Grown", "Growth", "grow", "grow_by", "grown_config"]
