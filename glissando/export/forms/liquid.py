"""The liquid mixer: diagonal dynamics are traced as they are, dense ones are refused."""

from __future__ import annotations

from torch import nn

from glissando.export.forms.base import Refused, register_form
from glissando.mixers.liquid_dynamics import Dense


@register_form(Dense)
def form(dynamics: nn.Module, capacity: int) -> nn.Module:
    raise Refused(
        "mixer `liquid` with mixer.dynamics `dense` cannot be exported: it needs a matrix exponential a token, which "
        "no runtime has. Train one with mixer.dynamics: diagonal"
    )
