"""Axis one: how position t attends to positions <= t. One folder a family; `register_mixer` adds a mixer from any
file."""

from __future__ import annotations

from glissando.mixers.attention import Attention, AttentionConfig
from glissando.mixers.base import (
    EMPTY,
    MIXERS,
    Context,
    ContextError,
    Memo,
    Mixer,
    Picture,
    Signal,
    build_mixer,
    method_of,
    register_mixer,
    require_accepted,
)
from glissando.mixers.delta import Delta, DeltaConfig
from glissando.mixers.liquid import Liquid, LiquidConfig
from glissando.mixers.spectral import Spectral, SpectralConfig
from glissando.mixers.tau import Tau, TauConfig

__all__ = [
    "EMPTY",
    "MIXERS",
    "Attention",
    "AttentionConfig",
    "Context",
    "ContextError",
    "Delta",
    "DeltaConfig",
    "Liquid",
    "LiquidConfig",
    "Memo",
    "Mixer",
    "Picture",
    "Signal",
    "Spectral",
    "SpectralConfig",
    "Tau",
    "TauConfig",
    "build_mixer",
    "method_of",
    "register_mixer",
    "require_accepted",
]
