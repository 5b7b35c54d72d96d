"""Of a spectral mixer: its decay times."""

from __future__ import annotations

from torch import Tensor

from glissando.evaluation.looks.base import MIXER_LOOKS, MixerLook
from glissando.mixers import Context, Spectral


def _decay_times(mixer: Spectral, x: Tensor, ctx: Context) -> Tensor:
    return mixer.decay_times(x)[0].quantile(0.5, -1)


MIXER_LOOKS[Spectral] = (
    MixerLook(
        "decay_times",
        "Kernel decay times",
        "How long a layer's kernels remember: the median of 1 / gamma over its channels.",
        "tokens",
        True,
        _decay_times,
    ),
)
