"""Pure functions without parameters, each with a plain reference beside its fast version."""

from glissando.ops.scan import scan
from glissando.ops.tau_attention import tau_attention
from glissando.ops.zero_order_hold import discretize, hippo_legs, legs_modes

__all__ = ["discretize", "hippo_legs", "legs_modes", "scan", "tau_attention"]
