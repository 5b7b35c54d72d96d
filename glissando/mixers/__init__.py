"""Axis one: how position t hears positions <= t.

Adding a mixer is two edits: its file, and its line in `MixerConfigs`, which pairs its name, options and class.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from glissando.errors import unknown_name
from glissando.mixers.attention import Attention, AttentionConfig
from glissando.mixers.base import EMPTY, Context, ContextError, Memo, Mixer, Signal, refuse_unhonoured
from glissando.mixers.liquid import Liquid, LiquidConfig
from glissando.mixers.spectral import Spectral, SpectralConfig
from glissando.mixers.tau import Tau, TauConfig


def mixer(cls: type[Mixer], config: type) -> Any:
    """A registry line: the field's name is the mixer's name."""
    return field(default_factory=config, metadata={"class": cls})


@dataclass
class MixerConfigs:
    """Options of every mixer, each under its name; a model reads those of the mixers it uses."""

    attention: AttentionConfig = mixer(Attention, AttentionConfig)  # noqa: RUF009
    liquid: LiquidConfig = mixer(Liquid, LiquidConfig)  # noqa: RUF009
    spectral: SpectralConfig = mixer(Spectral, SpectralConfig)  # noqa: RUF009
    tau: TauConfig = mixer(Tau, TauConfig)  # noqa: RUF009

    def weights_follow(self) -> None:
        """Weights are loaded next: files that only a new model reads are not looked for."""
        for options in (getattr(self, f.name) for f in fields(self)):
            if hasattr(options, "weights_follow"):
                options.weights_follow()


MIXERS: dict[str, type[Mixer]] = {f.name: f.metadata["class"] for f in fields(MixerConfigs)}


def build_mixer(name: str, configs: MixerConfigs, hidden_size: int) -> Mixer:
    """The mixer `name` with its options.

    Raises UnknownNameError for a name that is not registered.
    """
    if name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    return MIXERS[name](getattr(configs, name), hidden_size)


__all__ = [
    "EMPTY",
    "MIXERS",
    "Context",
    "ContextError",
    "Memo",
    "Mixer",
    "MixerConfigs",
    "Signal",
    "build_mixer",
    "refuse_unhonoured",
]
