"""Depths: a flow whose tokens halt is refused, all others are traced as they are."""

from __future__ import annotations

from torch import nn

from glissando.depth.flow import FlowDepth
from glissando.export.forms.base import Refused, register_form


@register_form(FlowDepth)
def form(depth: nn.Module, capacity: int) -> nn.Module:
    assert isinstance(depth, FlowDepth)
    if depth.config.tolerance is not None:
        raise Refused(
            f"depth `flow` with depth.tolerance {depth.config.tolerance:g} cannot be exported: which tokens halt "
            "follows from values. Export a run that was trained without one, at as many depth.n_steps as it needs"
        )
    return depth
