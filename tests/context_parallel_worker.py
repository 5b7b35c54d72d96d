"""One of four processes that share rows, two by two and all four: how far each case is from one process's.

    python tests/context_parallel_worker.py RANK FOLDER mixer:tau-default,depth:tied

writes FOLDER/RANK.json: by case, of those named, the largest difference of logits or of a gradient from
one process's, and where it is.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from subjects import CASES, build, ragged, weigh
from torch import Tensor

from glissando.config import options
from glissando.data.base import Batch
from glissando.depth import Depth, DepthOptions, register_depth
from glissando.depth.base import BlockFactory
from glissando.mixers import Context
from glissando.model import LanguageModel
from glissando.training.context_parallel import RowParts, row_parts

WORLD = 4
#: computed again in the backward pass, too
RECOMPUTED = ("mixer:attention-helpers", "mixer:tau-previous", "mixer:delta-channel", "depth:tied", "depth:summed")


@options
class SummedConfig(DepthOptions):
    """No options of its own."""


class Summed(Depth):
    """x <- block(x + the sum of all x so far): a depth from outside, with a state that is no block's."""

    def __init__(self, config: SummedConfig, make_block: BlockFactory) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.block = make_block(0)

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> tuple:
        weight = next(self.parameters())
        total = weight.new_zeros(batch_size, self.block.hidden_size, device=device, dtype=dtype)
        return self.block.init_state(batch_size, device, dtype), total

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, Any]:
        inner, total = (None, 0 * x[:, 0]) if state is None else state
        real = 1 if ctx is None or ctx.mask is None else ctx.mask.unsqueeze(-1)
        sums = total.unsqueeze(1) + (0.1 * x * real).cumsum(1)
        y, inner = self.run(self.block)(x + sums, inner, ctx)
        return y, None if state is None else (inner, sums[:, -1])


SUMMED = {"vocab_size": 37, "hidden_size": 16, "depth": {"kind": "summed"}}


def model_of(case: str) -> LanguageModel:
    CASES["depth:summed"] = SUMMED
    return build(case)


def batch_for(model: LanguageModel, length: int, masked: bool) -> tuple[Batch, Tensor | None]:
    """Four rows with what the model accepts, and times."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, (4, length), generator=generator)
    accepts = model.depth.accepts
    mask = ragged(4, length, seed=length) if masked and "mask" in accepts else None
    control = None
    if "control" in accepts:
        control = torch.randn(4, len(model.config.controls), generator=generator, dtype=torch.float64)
    dt = 2 * torch.rand(4, length, generator=generator, dtype=torch.float64) if "dt" in accepts and masked else None
    return Batch(ids, ids, 0, mask, control), dt


def outcome(model: LanguageModel, logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logits * weights).sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def weights_of(model: LanguageModel, batch: Batch) -> Tensor:
    """Of every logit in the loss; 0 at padding."""
    logits = torch.zeros(*batch.ids.shape, model.config.vocab_size, dtype=torch.float64, requires_grad=True)
    weigh(logits, batch.mask).backward()
    assert logits.grad is not None
    return logits.grad


def compare(model: LanguageModel, parts: RowParts, length: int, masked: bool) -> tuple[float, str]:
    """The largest difference from one process, relative to the largest expected magnitude, at least 1, and where.

    The first of the processes computes what one would.
    """
    where, (batch, dt) = parts.neighbours, batch_for(model, length, masked)
    weights, own, part = weights_of(model, batch), parts.columns(length), parts.of(batch)
    signals = {"mask": part.mask, "control": part.control, "dt": None if dt is None else dt[:, own]}
    logits = model(part.ids, **signals, **parts.given(model, part))[0]
    mine = outcome(model, logits, weights[:, own])
    summed = torch.cat([gradient.flatten() for gradient in mine.values()])
    dist.all_reduce(summed, group=where.group)
    sizes = [gradient.numel() for gradient in mine.values()]
    got = {name: part.view_as(mine[name]) for name, part in zip(mine, summed.split(sizes), strict=True)}
    whole, expected = torch.zeros_like(weights), {}
    if not where.place:
        whole = model(batch.ids, mask=batch.mask, control=batch.control, dt=dt)[0]
        expected = outcome(model, whole, weights)
    whole = whole.detach().contiguous()
    dist.broadcast(whole, where.ranks[0], group=where.group)
    real = slice(None) if part.mask is None else part.mask
    pairs = {"logits": (logits[real], whole[:, own][real])} | {n: (got[n], expected[n]) for n in expected}
    gaps = {}
    for name, (found, theirs) in pairs.items():
        gap = (found - theirs).abs().max().item() if found.numel() else 0.0
        gaps[name] = gap / max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst


def main(rank: int, folder: Path, named: list[str]) -> None:
    torch.set_num_threads(1)
    method, timeout = f"file://{folder / 'store'}", timedelta(seconds=250)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=WORLD, timeout=timeout)
    found: dict[str, tuple[float, str]] = {}
    pairs, all_four = row_parts(2), row_parts(4)
    assert pairs is not None
    assert all_four is not None
    for case in named:
        model = model_of(case)
        found[f"{case}, 2 processes"] = compare(model, pairs, 9, masked=False)
        found[f"{case}, 4 processes, masks"] = compare(model, all_four, 14, masked=True)
        if case in RECOMPUTED:
            model.depth.gradient_checkpointing = True
            found[f"{case}, 2 processes, recomputed"] = compare(model, pairs, 9, masked=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    register_depth("summed", SummedConfig)(Summed)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
