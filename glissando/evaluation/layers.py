"""Which layers a picture's rows are."""

from __future__ import annotations

import re

from glissando.backbone import Backbone


def layer_numbers(model: Backbone, kind: type, count: int) -> list[int]:
    """The layer, from 1, of each of the `count` applications of a kind of mixer in one forward, in their order.

    In a stack a mixer's layer is its place among all blocks: where kinds alternate, those of one are not 1, 2, 3.
    Elsewhere, where a block is applied more than once or as a flow, applications are counted.
    """
    places = [
        int(match[1]) + 1
        for name, module in model.named_modules()
        if isinstance(module, kind) and (match := re.match(r"depth\.blocks\.(\d+)\.", name))
    ]
    return places if len(places) == count else list(range(1, count + 1))
