"""Activation addition: a model without dials is steered by a constant added to its representation.

    v = mean of a over the positions of texts with label > 0  -  the same over texts with label < 0
    a <- a + s u v      at every position, at one place in the depth

a is the activation (D numbers) at that place, s the strength, u the setting. The difference of means is that of
contrastive activation addition (Rimsky et al. 2023, arXiv 2312.06681); adding it at every position of one layer is
Turner et al. 2023, arXiv 2308.10248.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.data.base import IGNORED
from glissando.depth.flow import FlowDepth
from glissando.evaluation.rows import Row, batches_of
from glissando.evaluation.scoring import to_device
from glissando.evaluation.steering import Cost, Trial
from glissando.generation import tokenizer_of
from glissando.kernels.precise import double
from glissando.model import LanguageModel


class Place(NamedTuple):
    """A boundary in the depth: what goes into `module`, or what comes out of it."""

    module: nn.Module
    at_input: bool = False


def places(model: LanguageModel) -> dict[str, Place]:
    """The boundaries by name, in the order of the depth.

    before.k  behind the k-th block before the flow, the last of which is what the flow starts from
    flow      behind the flow
    after.k   behind the k-th block after it

    A flow without blocks before it, and a depth of another kind, start from `input`; another depth ends at `output`. In
    a model with depth.shortcuts what is added at `input` also enters x_0, which every block reads.
    """
    depth = model.depth
    if not isinstance(depth, FlowDepth):
        return {"input": Place(depth, at_input=True), "output": Place(depth)}
    found = {f"before.{k}": Place(block) for k, block in enumerate(depth.before)} or {"input": Place(depth, True)}
    found["flow"] = Place(depth.end, at_input=True)
    return found | {f"after.{k}": Place(block) for k, block in enumerate(depth.after)}


@contextmanager
def changed(place: Place, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, `change` is applied to the activation (B, T, D) at `place` of every call; afterwards it is undone."""

    def change_input(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(given[0]), *given[1:])

    def change_output(module: nn.Module, given: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(out[0]), *out[1:])

    module = place.module
    hook = (
        module.register_forward_pre_hook(change_input)
        if place.at_input
        else module.register_forward_hook(change_output)
    )
    try:
        yield
    finally:
        hook.remove()


def mean_differences(model: LanguageModel, texts: Mapping[int, Sequence[Sequence[int]]]) -> dict[str, Tensor]:
    """v at every place of `model`, (D,) each, in float64; the end mark that each text is read after counts as well.

    model  in evaluation mode
    texts  ids of texts, those with the label above 0 under 1 and those below 0 under -1
    """
    plus, minus = means(model, texts[1]), means(model, texts[-1])
    return {name: plus[name] - minus[name] for name in plus}


@torch.no_grad()
def means(model: LanguageModel, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The mean activation (D,) over the positions of the texts, in float64, at every place."""
    eos = tokenizer_of(model).eos_id
    rows = [Row([eos, *ids], [IGNORED] * (len(ids) + 1), 0.0) for ids in texts]
    totals: dict[str, Tensor] = {}
    for batch in batches_of(rows):
        batch = to_device(batch, model.embedding.weight.device)
        seen: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, place in places(model).items():
                stack.enter_context(changed(place, _noting(seen, name)))
            model.features(batch.ids, mask=batch.mask)
        for name, x in seen.items():
            total = double(x[batch.mask]).sum(0)
            totals[name] = totals[name] + total if name in totals else total
    count = sum(len(row.ids) for row in rows)
    return {name: total / count for name, total in totals.items()}


def _noting(seen: dict[str, Tensor], name: str) -> Callable[[Tensor], Tensor]:
    def note(x: Tensor) -> Tensor:
        seen[name] = x
        return x

    return note


class Addition:
    """The steering that adds s u v to the activation of `base` at the place of this name."""

    def __init__(self, base: LanguageModel, name: str, vector: Tensor, strength: float) -> None:
        self.base, self.name, self.vector, self.strength = base, name, vector, strength

    @property
    def way(self) -> str:
        return f"addition: {self.name}, s = {self.strength:.3g}"

    def write(self, trial: Trial, u: float) -> list[str]:
        """The trial's prompts continued at u."""
        with self.turned(u):
            return trial.write(self.base)

    def read(self, trial: Trial, u: float) -> Cost:
        """The cost of the trial's held-out rows at u."""
        with self.turned(u):
            return trial.read(self.base)

    @contextmanager
    def turned(self, u: float) -> Iterator[None]:
        """Within, the base computes with s u v added: whole texts and streams alike."""
        like = self.base.embedding.weight
        offset = (self.strength * u * self.vector).to(like.device, like.dtype)
        with changed(places(self.base)[self.name], lambda x: x + offset.to(x.dtype)):
            yield
