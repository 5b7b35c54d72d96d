"""What the mixers of a model measure of themselves, for the training log.

A class of mixers has an observer, registered here from outside the class. A column NAME is the mean over the layers
that have it, and NAME/first that of the first of them: for tau the energies of block 0's keys, from which tau is
calibrated. A block that is applied several times counts once for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.data.base import Batch
from glissando.mixers import EMPTY, Context, Liquid, Mixer, Tau
from glissando.model import LanguageModel
from glissando.observation.liquid import observe_liquid
from glissando.observation.tau import collapses, observe_tau
from glissando.ops.precise import double

#: shown a mixer's input: (mixer, x (B, T, D), context)
Watcher = Callable[[Any, Tensor, Context], None]


class Observer(NamedTuple):
    """How a class of mixers is observed.

    names     of what is measured
    first     those of which the first layer's is a column too
    measure   (mixer, x, ctx) -> a number () for each name, of a call without state
    warnings  (a row of the log) -> what is wrong with it, by kind: (category, message)
    """

    names: tuple[str, ...]
    first: tuple[str, ...]
    measure: Callable[[Any, Tensor, Context], tuple[Tensor, ...]]
    warnings: Callable[[Mapping[str, float]], dict[str, tuple[type[Warning], str]]] = lambda row: {}


_ENERGIES = ("energy_p05", "energy_p50", "energy_p95")
OBSERVERS: dict[type[Mixer], Observer] = {
    Tau: Observer(
        (*_ENERGIES, "tau", "temperature", "attention_entropy", "effective_keys", "effective_share"),
        _ENERGIES,
        observe_tau,
        collapses,
    ),
    Liquid: Observer(("tau_p05", "tau_p50", "tau_p95", "adaptation"), (), observe_liquid),
}


def observing(model: LanguageModel) -> list[Mixer]:
    """The mixers of `model` that have an observer, in the order of its layers."""
    return [m for m in model.modules() if isinstance(m, Mixer) and type(m) in OBSERVERS]


def columns(model: LanguageModel) -> list[str]:
    """The names of what `observe` returns; none for a model whose mixers have no observer."""
    observers = [OBSERVERS[type(mixer)] for mixer in observing(model)]
    names = [name for observer in observers for name in observer.names]
    return list(dict.fromkeys([*names, *(f"{name}/first" for observer in observers for name in observer.first)]))


def observed_warnings(model: LanguageModel, row: Mapping[str, float]) -> dict[str, tuple[type[Warning], str]]:
    """What the observers of the model's mixers find wrong with a row of the log, by kind."""
    observers = {OBSERVERS[type(mixer)] for mixer in observing(model)}
    return {kind: found for observer in observers for kind, found in observer.warnings(row).items()}


def observe(
    model: LanguageModel, ids: Tensor, mask: Tensor | None = None, control: Tensor | None = None
) -> dict[str, float]:
    """The `columns` of `model` on ids (B, T), by one forward in the mode that it is in.

    Neither gradients nor the random state are touched. {} without a forward for a model whose mixers have no observer.
    """
    mixers, found = observing(model), dict[str, list[Tensor]]()
    if not mixers:
        return {}

    def note(mixer: Mixer, x: Tensor, ctx: Context) -> None:
        observer = OBSERVERS[type(mixer)]
        for name, value in zip(observer.names, observer.measure(mixer, x, ctx), strict=True):
            found.setdefault(name, []).append(double(value))
            if name in observer.first:
                found.setdefault(f"{name}/first", [double(value)])

    show(model, mixers, note, ids, mask, control)
    names = columns(model)
    return dict(zip(names, torch.stack([torch.stack(found[name]).mean() for name in names]).tolist(), strict=True))


def first_row(batch: Batch, tokens: int) -> Batch:
    """At most so many tokens of the first row; what counts for the whole batch is left as it is."""
    control = None if batch.control is None else batch.control[:1]
    mask = None if batch.mask is None else batch.mask[:1, :tokens]
    return batch._replace(ids=batch.ids[:1, :tokens], targets=batch.targets[:1, :tokens], mask=mask, control=control)


@torch.no_grad()
def show(
    model: Backbone,
    mixers: list[Any],
    watcher: Watcher,
    inputs: Tensor,
    mask: Tensor | None = None,
    control: Tensor | None = None,
    dt: Tensor | None = None,
) -> None:
    """One forward of `model` in the mode that it is in, in which `watcher` is shown each of `mixers`' inputs."""
    # By calling the model, and not a part of it, because that is what gathers a sharded model's weights.
    with _watched(mixers, watcher), _same_random_state(inputs.device):
        model(inputs, mask=mask, control=control, dt=dt)


@contextlib.contextmanager
def _watched(mixers: list[Any], watcher: Watcher) -> Iterator[None]:
    def hook(mixer: Any, args: tuple, keywords: dict[str, Any]) -> None:
        watcher(mixer, *_signature(*args, **keywords))

    handles = [mixer.register_forward_pre_hook(hook, with_kwargs=True) for mixer in mixers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _signature(x: Tensor, state: Any = None, ctx: Context | None = None) -> tuple[Tensor, Context]:
    """Of Mixer.forward."""
    return x, ctx or EMPTY


def _same_random_state(device: torch.device) -> contextlib.AbstractContextManager:
    """What draws numbers inside, such as dropout, leaves no trace."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
