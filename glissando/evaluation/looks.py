"""What is particular to a model, over a text, as numbers that a page can draw: one table of rows by tokens for each.

Adding one is its function and its line in `LOOKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glissando.depth.flow import FlowDepth
from glissando.evaluation.layers import layer_numbers
from glissando.mixers import Context
from glissando.mixers.liquid import Liquid
from glissando.mixers.spectral import Spectral
from glissando.mixers.tau import Tau, attention_entropy
from glissando.model import LanguageModel
from glissando.training.observe import show

#: (mixer, x, context) -> a number for each token (T,)
See = Callable[[Any, Tensor, Context], Tensor]
#: of a picture, the lowest first: its label and its numbers (T,)
Rows = list[tuple[str, Tensor]]


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


def looks(model: LanguageModel, ids: Tensor, control: Tensor | None = None) -> list[Look]:
    """Everything there is to be seen of the model over ids (1, T), in evaluation mode; [] for plain attention."""
    with torch.no_grad():
        found = [look(model, ids, control) for look in LOOKS]
    return [look for look in found if look is not None]


def _watch(model: LanguageModel, kind: type, ids: Tensor, control: Tensor | None, see: See) -> Rows:
    """("layer N", see (T,)) of each mixer of a kind, in the order of their calls; [] if there is none."""
    mixers, seen = [m for m in model.modules() if isinstance(m, kind)], list[Tensor]()
    if mixers:
        show(model, mixers, lambda mixer, x, ctx: seen.append(see(mixer, x, ctx)), ids, control=control)
    numbers = layer_numbers(model, kind, len(seen))
    return [(f"layer {number}", values) for number, values in zip(numbers, seen, strict=True)]


def time_constants(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look | None:
    """Of liquid mixers: the median of tau over a layer's modes."""
    values = _watch(model, Liquid, ids, control, lambda m, x, ctx: m.time_constants(x, ctx)[0].quantile(0.5, -1))
    about = "How long a layer's modes remember: the median of tau over its modes."
    return _look("time_constants", "Time constants", about, "tokens", True, values)


def effective_keys(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look | None:
    """Of tau mixers: exp(entropy) of the attention, the mean over heads."""

    def see(mixer: Tau, x: Tensor, ctx: Context) -> Tensor:
        queries = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return attention_entropy(mixer.lambdas(x), queries)[0].exp().mean(0)

    about = "Among how many earlier tokens a layer's attention is spread: exp of its entropy, the mean over heads."
    return _look("effective_keys", "Effective keys", about, "tokens", True, _watch(model, Tau, ids, control, see))


def lambdas(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look | None:
    """Of tau mixers: the one number by which a key is found, the mean over heads."""

    about = "The one number by which a key is found, E / (E + tau) in [0, 1): the mean over heads."
    values = _watch(model, Tau, ids, control, lambda m, x, ctx: m.lambdas(x).k[0].mean(0))
    return _look("lambda", "Lambda of the keys", about, "", False, values)


def decay_times(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look | None:
    """Of spectral mixers: the median of 1 / gamma over a layer's channels."""
    values = _watch(model, Spectral, ids, control, lambda m, x, ctx: m.decay_times(x)[0].quantile(0.5, -1))
    about = "How long a layer's kernels remember: the median of 1 / gamma over its channels."
    return _look("decay_times", "Kernel decay times", about, "tokens", True, values)


def trajectory(model: LanguageModel, ids: Tensor, control: Tensor | None) -> Look | None:
    """Of a flow: how fast a token moves at each evaluation of the field, so how long its way over depth is."""
    flow = model.depth
    if not isinstance(flow, FlowDepth):
        return None
    seen: list[tuple[float, Tensor]] = []
    flow.watcher = lambda tau, slope: seen.append((tau, slope[0].norm(dim=-1)))
    try:
        model(ids, control=control)
    finally:
        flow.watcher = None
    about = "How fast a token moves through depth, |dH/dtau|: its mean over tau is the length of the way."
    rows = [(f"tau {tau:.2f}", speed) for tau, speed in seen]
    return _look("trajectory", "Speed over depth", about, "", True, rows)


def _look(name: str, title: str, about: str, unit: str, log: bool, rows: Rows) -> Look | None:
    table = [row.double().cpu().tolist() for _, row in rows]
    return Look(name, title, about, unit, log, [label for label, _ in rows], table) if rows else None


LOOKS: tuple[Callable[[LanguageModel, Tensor, Tensor | None], Look | None], ...] = (
    time_constants, effective_keys, lambdas, decay_times, trajectory,
)  # fmt: skip
