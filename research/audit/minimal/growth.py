"""Growth of the Minimal Transformer: whether it preserves the function, and whether it is cheaper."""

from __future__ import annotations

import copy
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.growth import grow
from glissando.model import LanguageModel
from research.audit.claim import Finding, Plan
from research.audit.training import logits_of, seeded
from research.published.minimal_transformer import PublishedMinimal

PRESET = "minimal-transformer"
BOUND = 1e-9
#: how far weights are moved from their start, so that nothing is exact by chance
PERTURBED = 0.15


def exact_as_published(plan: Plan) -> Finding:
    """Every way of growing that the publication names: weights mirrored, copied, or copied and divided by the number
    of copies; layers repeated, or added with weights near zero."""
    small = seeded(0, lambda: _perturbed(PublishedMinimal(overwrites=False)))
    grown = {
        "width, heads and MLP doubled, weights mirrored": _wider(small, mirror=True),
        "the same, weights copied": _wider(small),
        "the same, weights copied and divided by the number of copies": _wider(small, divide=True),
        "every layer twice": _repeated(small),
        "two more layers, their projections near zero": _near_zero(small, copy_norms=False),
        "the same, with the last layer's norms": _near_zero(small, copy_norms=True),
    }
    return _compared(small, grown)


def exact_corrected(plan: Plan) -> Finding:
    """`glissando.grow` along each axis and all of them, in float64, before any training."""
    small = seeded(0, lambda: _perturbed(LanguageModel.from_preset(PRESET)))
    grown: dict[str, nn.Module] = {
        "width, heads and MLP doubled": grow(small, width=2),
        "heads doubled": grow(small, heads=2),
        "two more layers": grow(small, layers=2),
        "all of it": grow(small, width=2, layers=2, head_size=8),
    }
    return _compared(small, grown)


def _perturbed(model: Any) -> Any:
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(PERTURBED * torch.randn_like(parameter))
    return model


def _wider(small: PublishedMinimal, *, mirror: bool = False, divide: bool = False) -> PublishedMinimal:
    """Every doubled dimension of every weight is the old one and itself again, or (`mirror`) its mirror image; with
    `divide` a matrix that reads a doubled dimension is halved, as it now sums two copies."""
    large = PublishedMinimal(8, 4, 16, overwrites=False).double().eval()
    old, new = small.state_dict(), large.state_dict()
    for name, value in new.items():
        grown = old[name]
        for dimension, size in enumerate(value.shape):
            if size != grown.shape[dimension]:
                grown = torch.cat([grown, grown.flip(dimension) if mirror else grown], dimension)
        reads = value.ndim == 2 and not name.startswith("embedding")
        value.copy_(grown / 2 if divide and reads else grown)
    return large


def _near_zero(small: PublishedMinimal, *, copy_norms: bool, scale: float = 1e-4) -> PublishedMinimal:
    """Two more layers whose attention and MLP add almost nothing: their last projections are `scale` times N(0, 1)."""
    large = copy.deepcopy(small)
    for _ in range(2):
        layer = copy.deepcopy(small.blocks[-1])
        with torch.no_grad():
            for projection in (layer.wo, layer.down):
                for parameter in projection.parameters():  # type: ignore[union-attr]
                    parameter.normal_(std=scale)
        if not copy_norms:
            layer.ln1.reset_parameters()  # type: ignore[union-attr, operator]
            layer.ln2.reset_parameters()  # type: ignore[union-attr, operator]
        large.blocks.append(layer)
    return large


def _repeated(small: PublishedMinimal) -> PublishedMinimal:
    large = copy.deepcopy(small)
    large.blocks = nn.ModuleList(copy.deepcopy(block) for block in small.blocks for _ in range(2))
    return large


@torch.no_grad()
def _compared(small: nn.Module, grown: Mapping[str, nn.Module]) -> Finding:
    ids = torch.randint(32, 127, (16, 24), generator=torch.Generator().manual_seed(0))
    before = logits_of(small, ids)
    summary, figures, checks = [], {}, {}
    for name, model in grown.items():
        after = logits_of(model, ids)
        gap, turned = float((after - before).abs().max()), _turned(before, after)
        summary.append(f"{name}: {gap:.1e}, {turned:.0%} of the likeliest characters change")
        figures[name] = {"logits": gap, "argmax": turned}
        checks[f"{name} computes the same within {BOUND:g}"] = gap < BOUND
    said = f"float64, weights of their start + {PERTURBED:g} N(0, 1); largest change of a logit (they reach "
    return Finding(f"{said}{float(before.abs().max()):.1f}): {'; '.join(summary)}", figures, checks)


def _turned(before: Tensor, after: Tensor) -> float:
    return float((before.argmax(-1) != after.argmax(-1)).double().mean())


# ---------------------------------------------------------------------- is it cheaper

#: FLOPs of about one step of the final size: 128 pairs of some 20 tokens
STEP = 4e8
#: steps at the learning rates that growth leaves, which hold a model back (docs/growth.md)
RELEASE = 20
#: nats a character above what scratch ends with: a share of it would ask for ever more where the rule is learned
SLACK = 0.02


class Cost(NamedTuple):
    """FLOPs from scratch; of the grown run until it is as good, all stages and the last one; None if it never is.

    ends: the held-out losses that both end with.
    """

    scratch: float
    grown: float | None
    last_stage: float | None
    ends: tuple[float, float]


def cheaper_as_published(plan: Plan) -> Finding:
    """The FLOPs of the final size alone, as where the small model is taken as given."""
    costs = _costs(plan)
    return _described(plan, costs, [c.last_stage for c in costs], "counting the last stage alone")


def cheaper_corrected(plan: Plan) -> Finding:
    """The FLOPs of all stages until the held-out loss is what training from scratch ends with, over seeds."""
    costs = _costs(plan)
    return _described(plan, costs, [c.grown for c in costs], "counting all stages")


def _described(plan: Plan, costs: tuple[Cost, ...], spent: list[float | None], how: str) -> Finding:
    shares = [None if flops is None else flops / cost.scratch for flops, cost in zip(spent, costs, strict=True)]
    reached = [share for share in shares if share is not None]
    listed = ", ".join("never" if share is None else f"{share:.0%}" for share in shares)
    ends = ", ".join(f"{grown:.3f} and {scratch:.3f}" for scratch, grown in (cost.ends for cost in costs))
    said = (
        f"shift pairs, {_flops(plan):.1e} FLOPs each, 19,328 parameters in the end; grown and from scratch end at "
        f"{ends} nats a character, held out (seeds {', '.join(map(str, range(len(costs))))}); the grown run is as good "
        f"as scratch's end (within {SLACK:g}) after {listed} of what scratch needs for it, {how}"
    )
    middle = median(share if share is not None else float("inf") for share in shares)
    checks = {
        "cheaper in the median": middle < 1,
        "cheaper for every seed": len(reached) == len(shares) and max(reached) < 1,
    }
    return Finding(said, {"shares": shares, "flops": _flops(plan), "ends": [cost.ends for cost in costs]}, checks)


def _flops(plan: Plan) -> float:
    return 1e9 if plan.quick else STEP * (plan.steps or 1200)


@lru_cache(maxsize=2)
def _costs(plan: Plan) -> tuple[Cost, ...]:
    """For each seed; both forms of the claim read the same runs."""
    return tuple(_cost(plan, seed) for seed in plan.each_seed)


def _cost(plan: Plan, seed: int) -> Cost:
    """Trains in stages that grow, and from scratch at the final size, as research/grow_or_scratch.py does."""
    from research.grow_or_scratch import TASKS, cost, trained, validations

    task, every = TASKS["shift"], 5 if plan.quick else 50
    if plan.quick:
        task = task._replace(data={**task.data, "valid_rows": 32})
    options = Namespace(flops=_flops(plan), budget=1.0, shares=None, rate=None, every=every, release=RELEASE)
    with tempfile.TemporaryDirectory() as folder:
        scratch, grown = trained(task, seed, options, Path(folder) / "run")
        whole, stages, before = validations([scratch]), validations(grown), validations(grown[:-1])[-1][1]
    target = whole[-1][0] + SLACK
    spent, reached = cost(whole, target), cost([row for row in stages if row[1] > before], target)
    assert spent is not None
    flops = None if reached is None else reached[0]
    return Cost(spent[0], flops, None if flops is None else flops - before, (whole[-1][0], stages[-1][0]))
