"""The tau mixer's computation."""

from glissando.ops.tau_attention import tau_attention

__all__ = ["tau_attention"]
