"""Pure functions without parameters, each with a plain reference beside its fast version."""

from glissando.ops.block_scan import block_scan
from glissando.ops.scan import scan
from glissando.ops.tau_attention import tau_attention
from glissando.ops.zero_order_hold import discretize, hippo_legs, legs_modes, undiscretize

__all__ = ["block_scan", "discretize", "hippo_legs", "legs_modes", "scan", "tau_attention", "undiscretize"]
