"""What the mixers of a model show of themselves: numbers for the training log, and pictures for a page.

A mixer has the names `observed`, and a method `observe` that returns a number for each. A column NAME is the mean over
the layers that have it, and NAME/first that of the first of them. A block that is applied several times counts once for
each.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.data.base import Batch
from glissando.kernels.precise import double
from glissando.mixers import EMPTY, Context, Mixer, Picture

#: shown a mixer's input: (mixer, x (B, T, D), context)
Watcher = Callable[[Any, Tensor, Context], None]
#: the fields of glissando.mixers.Picture as JSON has them; its rows are layers or depths, the first at the bottom
Look = dict[str, Any]


def observing(model: Backbone) -> list[Any]:
    """The mixers of `model` that observe themselves, in the order of its layers."""
    return [m for m in model.modules() if isinstance(m, Mixer) and hasattr(m, "observed")]


def columns(model: Backbone) -> list[str]:
    """The names of what `observe` returns; none for a model whose mixers do not observe themselves."""
    names = dict.fromkeys(name for mixer in observing(model) for name in mixer.observed)
    return sorted(names, key=lambda name: name.endswith("/first"))  # a stable order: theirs come last


def observed_warnings(model: Backbone, row: Mapping[str, float]) -> dict[str, tuple[type[Warning], str]]:
    """What the model's mixers find wrong with a row of the log, by kind."""
    warned: dict[str, tuple[type[Warning], str]] = {}
    for mixer in observing(model):
        if hasattr(mixer, "warnings"):
            warned |= mixer.warnings(row)
    return warned


def observe(
    model: Backbone, ids: Tensor, mask: Tensor | None = None, control: Tensor | None = None
) -> dict[str, float]:
    """The `columns` of `model` on ids (B, T), by one forward in the mode that it is in.

    Neither gradients nor the random state are touched. {} without a forward for a model whose mixers have no observer.
    """
    mixers, measured = observing(model), dict[str, list[Tensor]]()
    if not mixers:
        return {}

    def note(mixer: Any, x: Tensor, ctx: Context) -> None:
        for name, value in mixer.observe(x, ctx).items():
            measured.setdefault(name, []).append(double(value))

    show(model, mixers, note, ids, mask, control)
    names = columns(model)
    values = [
        measured[name.removesuffix("/first")][0] if name.endswith("/first") else torch.stack(measured[name]).mean()
        for name in names
    ]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))


@torch.no_grad()
def pictures_of(model: Backbone, ids: Tensor, control: Tensor | None = None) -> list[Look]:
    """What is particular to a model, over ids (1, T) in evaluation mode: pictures of its mixers and depth, tables of
    rows by tokens; [] for plain attention."""
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


def first_row(batch: Batch, tokens: int) -> Batch:
    """At most so many tokens of the first row; what counts for the whole batch is left as it is."""
    control = None if batch.control is None else batch.control[:1]
    mask = None if batch.mask is None else batch.mask[:1, :tokens]
    return batch._replace(ids=batch.ids[:1, :tokens], targets=batch.targets[:1, :tokens], mask=mask, control=control)


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

    def hook(mixer: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        def watch(x: Tensor, state: Any = None, ctx: Context | None = None) -> None:
            watcher(mixer, x, ctx or EMPTY)

        watch(*args, **keywords)

    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(mixer.register_forward_pre_hook(hook, with_kwargs=True))
        # What draws numbers inside, such as dropout, leaves no trace.
        stack.enter_context(torch.random.fork_rng([inputs.device] if inputs.is_cuda else []))
        # By calling the model, and not a part of it, because that is what gathers a sharded model's weights.
        model(inputs, mask=mask, control=control, dt=dt)
