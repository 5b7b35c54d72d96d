"""The registry of export forms: class of a mixer or depth -> what stands in its place while a graph is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from glissando.errors import RunError
from glissando.model import LanguageModel
from glissando.state import leaves


class Refused(RunError):
    """A model that cannot be exported so; the message names the part and what to do."""


#: form(module, capacity) -> the module that is traced in its place, or the module itself
Form = Callable[[nn.Module, int], nn.Module]
#: by class; a class without one is traced as it is
FORMS: dict[type[nn.Module], Form] = {}

F = TypeVar("F", bound=Form)


def register_form(cls: type[nn.Module]) -> Callable[[F], F]:
    """@register_form(MyMixer) on a function form(mixer, capacity), which returns a module with MyMixer's init_state and
    forward, whose state has a fixed shape and whose values decide no control flow; or raises Refused.

    capacity  tokens that a state which grows is to hold
    """

    def register(form: F) -> F:
        FORMS[cls] = form
        return form

    return register


def prepared(model: LanguageModel, capacity: int) -> LanguageModel:
    """A copy of the model in which every mixer and depth has its export form, without gradients."""
    traced = copy.deepcopy(model).eval().requires_grad_(False)
    _replace(traced, capacity)
    return traced


def _replace(parent: nn.Module, capacity: int) -> None:
    for name, child in parent.named_children():
        form = next((FORMS[cls] for cls in type(child).__mro__ if cls in FORMS), None)
        new = child if form is None else form(child, capacity)
        if new is not child:
            setattr(parent, name, new)
        _replace(new, capacity)


def grows(model: LanguageModel) -> bool:
    """Whether a part of the state has a slot for each token, so that a capacity decides its size."""
    few, more = ([x.shape for x in leaves(prepared(model, capacity).init_state(1))] for capacity in (2, 3))
    return few != more
