"""Larger without a jump: growing a trained model without changing what it computes."""

from __future__ import annotations

from glissando.growth import attention, delta, liquid, spectral, tau  # register the rules of the built-in mixers
from glissando.growth.grow import Grown, grow, grow_by, grown_config
from glissando.growth.lifts import Grows, Lift, Reads, Table
from glissando.growth.rules import MIXER_RULES, Growth, MixerRule, output_projection

__all__ = [
    "MIXER_RULES",
    "Grown",
    "Grows",
    "Growth",
    "Lift",
    "MixerRule",
    "Reads",
    "Table",
    "attention",
    "delta",
    "grow",
    "grow_by",
    "grown_config",
    "liquid",
    "output_projection",
    "spectral",
    "tau",
]  # fmt: skip
