"""Softmax attention."""

from glissando.mixers.attention.layer import Attention, AttentionConfig, AttentionState

__all__ = ["Attention", "AttentionConfig", "AttentionState"]
