"""Looks by class: functions that are registered here for a class of mixers or of depths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.depth import Depth
from glissando.evaluation.layers import layer_numbers
from glissando.mixers import Context, Mixer
from glissando.model import LanguageModel
from glissando.observation.observe import show


@dataclass(frozen=True)
class Look:
    """
    name    of the look
    title   a heading
    about   what a number is, in a sentence
    unit    of the numbers; empty for none
    log     whether colours should be logarithmic
    rows    names of the rows, the first at the bottom
    values  rows x tokens
    """

    name: str
    title: str
    about: str
    unit: str
    log: bool
    rows: list[str]
    values: list[list[float]]


class MixerLook(NamedTuple):
    """The first fields of a Look, and measure(mixer, x, ctx): a number for each token (T,) of x (1, T, D)."""

    name: str
    title: str
    about: str
    unit: str
    log: bool
    measure: Callable[[Any, Tensor, Context], Tensor]


MIXER_LOOKS: dict[type[Mixer], tuple[MixerLook, ...]] = {}
#: (model, ids, control) -> its look
DEPTH_LOOKS: dict[type[Depth], Callable[[LanguageModel, Tensor, Tensor | None], Look]] = {}


@torch.no_grad()
def looks(model: LanguageModel, ids: Tensor, control: Tensor | None = None) -> list[Look]:
    """All looks of the model's mixers and depth over ids (1, T), in evaluation mode; [] for plain attention."""
    found = [_look(model, kind, look, ids, control) for kind, several in MIXER_LOOKS.items() for look in several]
    of_depth = DEPTH_LOOKS.get(type(model.depth))
    return [look for look in found if look.rows] + ([] if of_depth is None else [of_depth(model, ids, control)])


def _look(model: LanguageModel, kind: type[Mixer], look: MixerLook, ids: Tensor, control: Tensor | None) -> Look:
    """A row for each application of a mixer of this kind, in their order."""
    mixers, seen = [m for m in model.modules() if isinstance(m, kind)], list[Tensor]()
    if mixers:
        show(model, mixers, lambda mixer, x, ctx: seen.append(look.measure(mixer, x, ctx)), ids, control=control)
    rows = [f"layer {number}" for number in layer_numbers(model, kind, len(seen))]
    return Look(*look[:-1], rows, [row.cpu().double().tolist() for row in seen])
