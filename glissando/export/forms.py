"""A model whose mixers and depth have their export form: what stands in their place while a graph is traced.

A module whose forward cannot be traced has a method `export_form(capacity)`, which returns a module with its init_state
and forward, whose state has a fixed shape and whose values decide no control flow, or raises Refused. `capacity` is how
many tokens a state which grows is to hold.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from glissando.backbone import Backbone
from glissando.state import leaves

_Model = TypeVar("_Model", bound=Backbone)


def prepared(model: _Model, capacity: int) -> _Model:
    """A copy of the model in which every mixer and depth has its export form, without gradients."""
    traced = copy.deepcopy(model).eval().requires_grad_(False)
    _replace(traced, capacity)
    return traced


def _replace(parent: nn.Module, capacity: int) -> None:
    for name, child in parent.named_children():
        form = getattr(child, "export_form", None)
        new = child if form is None else form(capacity)
        if new is not child:
            setattr(parent, name, new)
        _replace(new, capacity)


def grows(model: Backbone) -> bool:
    """Whether a part of the state has a slot for each token, so that a capacity decides its size."""
    few, more = ([x.shape for x in leaves(prepared(model, capacity).init_state(1))] for capacity in (2, 3))
    return few != more
