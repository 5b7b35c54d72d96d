"""A flow solved otherwise than it was trained, and how far that ends from the exact solution.

    distance of n steps = |H_n(1) - H*(1)| / |H*(1) - H(0)|,    H* by REFERENCE

H(0) is the flow's input and H(1) its output. The distance is relative to how far the flow moves its input, because a
flow that hardly moves it makes every solver look exact beside |H(1)|.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.backbone import for_saved_weights
from glissando.data.base import IGNORED, Batch, Corpus
from glissando.depth.flow import FlowDepth
from glissando.evaluation.scoring import accepted_control
from glissando.model import LanguageModel
from glissando.progress import track

_PATH = 128  # tokens whose way through the flow is followed


class Setting(NamedTuple):
    """How a flow is solved."""

    method: str
    n_steps: int


REFERENCE = Setting("rk4", 32)


def solved_with(model: LanguageModel, setting: Setting) -> LanguageModel:
    """The same weights, not copied, under another setting, in evaluation mode."""
    depth = replace(model.config.depth, n_steps=setting.n_steps, method=setting.method)
    with torch.device("meta"):
        variant = LanguageModel(replace(for_saved_weights(model.config), depth=depth), model.tokenizer)
    variant.load_state_dict(model.state_dict(), assign=True)
    return variant.eval()


def sample(corpus: Corpus, n_bytes: int) -> list[Batch]:
    """Held-out batches spread evenly over the corpus, of about `n_bytes`; of a single larger one, its first rows."""
    sizes = [batch.n_bytes for batch in corpus.batches("valid")]
    every = max(1, math.ceil(sum(sizes) / n_bytes))
    chosen = [batch for i, batch in enumerate(corpus.batches("valid")) if i % every == min(every, len(sizes)) // 2]
    largest = max(1, n_bytes // max(len(chosen), 1))
    return [_rows(b, max(1, len(b.ids) * largest // b.n_bytes)) if b.n_bytes > 2 * largest else b for b in chosen]


def _rows(batch: Batch, n: int) -> Batch:
    """The first n rows; their bytes are their targets' share of the batch's."""
    if n >= len(batch.ids):
        return batch
    scored = batch.targets != IGNORED
    n_bytes = round(batch.n_bytes * int(scored[:n].sum()) / max(int(scored.sum()), 1))
    tensors = {name: value[:n] for name, value in batch._asdict().items() if isinstance(value, Tensor)}
    return batch._replace(**tensors, n_bytes=n_bytes, floor_bits=None)


def one_text(batch: Batch) -> Batch:
    """The first row without its padding."""
    row = _rows(batch, 1)
    n = row.ids.shape[1] if row.mask is None else int(row.mask.sum())
    return row._replace(ids=row.ids[:, :n], targets=row.targets[:, :n], mask=None)


def distances(model: LanguageModel, chosen: list[Setting], batch: Batch) -> dict[Setting, float]:
    """|H_n(1) - H*(1)| / |H*(1) - H(0)| over one row, in float64; NaN if the flow does not move at all."""
    start, end = flow_ends(solved_with(model, REFERENCE), batch)
    moved = (end - start).norm()
    ends = track(chosen, "distances from the reference", unit="settings")
    away = {setting: (flow_ends(solved_with(model, setting), batch)[1] - end).norm() for setting in ends}
    return {setting: float(gap / moved) if moved > 0 else math.nan for setting, gap in away.items()}


@torch.no_grad()
def flow_ends(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """H(0) and H(1) of a batch, in float64. The model, one of `solved_with`, is made float64 by it."""
    model = model.double()
    depth, seen = model.depth, {}
    assert isinstance(depth, FlowDepth)

    def keep(name: str, index: int) -> Callable[..., None]:
        def hook(_: Any, inputs: Any, result: Any = None) -> None:
            seen[name] = (inputs if result is None else result)[index]

        return hook

    # The flow starts from the last block before it; without one from the depth's input.
    hooks = [
        depth.before[-1].register_forward_hook(keep("start", 0))
        if len(depth.before)
        else depth.register_forward_pre_hook(keep("start", 0)),
        depth.end.register_forward_pre_hook(keep("end", 0)),
    ]
    control = accepted_control(model, batch)
    try:
        model(batch.ids[:, :_PATH], control=None if control is None else control.double())
    finally:
        for hook in hooks:
            hook.remove()
    return seen["start"], seen["end"]
