"""A continuous-time associative memory."""

from glissando.mixers.delta.layer import Delta, DeltaConfig, DeltaState

__all__ = ["Delta", "DeltaConfig", "DeltaState"]
