"""Of a flow: how fast tokens move through depth."""

from __future__ import annotations

from torch import Tensor

from glissando.depth import FlowDepth
from glissando.evaluation.looks.base import DEPTH_LOOKS, Look
from glissando.model import LanguageModel


def _speed(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look:
    """How fast a token moves through depth at each evaluation of the field."""
    rows: list[str] = []
    values: list[list[float]] = []

    def watch(depth: float, slope: Tensor) -> None:
        rows.append(f"depth {depth:.2f}")
        values.append(slope[0].norm(dim=-1).cpu().double().tolist())

    hook = model.depth.register_forward_pre_hook(lambda _, x, given: (x, given | {"watch": watch}), with_kwargs=True)
    try:
        model(ids, control=control)
    finally:
        hook.remove()
    about = "How fast a token moves through depth, |dH/dδ|. Its mean over δ is the length of the path."
    return Look("trajectory", "Speed over depth", about, "", True, rows, values)


DEPTH_LOOKS[FlowDepth] = _speed
