"""What is particular to a model, over a text, as numbers that a page can draw: one table of rows by tokens for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glissando.evaluation.observe import layer_numbers, show
from glissando.mixers import Context, Mixer, Picture
from glissando.model import LanguageModel

#: the fields of glissando.mixers.Picture as JSON has them; its rows are layers or depths, the first at the bottom
Look = dict[str, Any]


@torch.no_grad()
def looks(model: LanguageModel, ids: Tensor, control: Tensor | None = None) -> list[Look]:
    """All pictures of the model's mixers and depth over ids (1, T), in evaluation mode; [] for plain attention."""
    mixers = [m for m in model.modules() if isinstance(m, Mixer) and hasattr(m, "pictures")]
    drawn: dict[tuple[type, str], list[Picture]] = {}

    def note(mixer: Any, x: Tensor, ctx: Context) -> None:
        for picture in mixer.pictures(x, ctx):
            drawn.setdefault((type(mixer), picture.name), []).append(picture)

    if mixers:
        show(model, mixers, note, ids, control=control)
    entries = []
    for (kind, _), layers in drawn.items():
        names = [f"layer {number}" for number in layer_numbers(model, kind, len(layers))]
        entries.append(_look(layers[0], names, [picture.values for picture in layers]))
    along_depth = getattr(model.depth, "picture", None)
    if along_depth is not None:
        picture = along_depth(lambda: model(ids, control=control))
        entries.append(_look(picture, list(picture.rows), list(picture.values)))
    return entries


def _look(picture: Picture, rows: list[str], values: list[Tensor]) -> Look:
    return picture._asdict() | {"rows": rows, "values": [row.cpu().double().tolist() for row in values]}
