"""Of a liquid mixer: its time constants."""

from __future__ import annotations

from torch import Tensor

from glissando.evaluation.looks.base import MIXER_LOOKS, MixerLook
from glissando.mixers import Context, Liquid


def _time_constants(mixer: Liquid, x: Tensor, ctx: Context) -> Tensor:
    return mixer.time_constants(x, ctx)[0].quantile(0.5, -1)


MIXER_LOOKS[Liquid] = (
    MixerLook(
        "time_constants",
        "Time constants",
        "How long a layer's modes remember: the median of tau over its modes.",
        "tokens",
        True,
        _time_constants,
    ),
)
