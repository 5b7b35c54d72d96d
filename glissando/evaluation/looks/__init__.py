"""What is particular to a model, over a text, as numbers that a page can draw: one table of rows by tokens for each."""

from __future__ import annotations

from glissando.evaluation.looks import flow, liquid, spectral, tau  # register the looks of the built-in members
from glissando.evaluation.looks.base import DEPTH_LOOKS, MIXER_LOOKS, Look, MixerLook, looks

__all__ = ["DEPTH_LOOKS", "MIXER_LOOKS", "Look", "MixerLook", "flow", "liquid", "looks", "spectral", "tau"]
