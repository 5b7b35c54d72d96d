"""Axis one: how position t attends to positions <= t. A family is a folder here, which is imported and registers its
mixers; `register_mixer` adds one from any file, and an entry point `glissando.mixers` those of an installed package."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

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
    "build_mixer",
    "method_of",
    "register_mixer",
    "require_accepted",
]

for _module in iter_modules(__path__, f"{__name__}."):
    if _module.ispkg:
        import_module(_module.name)
