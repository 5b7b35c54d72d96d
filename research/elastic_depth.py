"""One flow, many depths: is a flow that was trained with a random number of steps as good with few as with many?

    python -m research.elastic_depth --out DIR     DIR gets runs and elastic.csv, which docs have

`elastic` is the depth `flow` whose training draws the steps of each batch from `drawn`, and whose field also reads
log2 of their number n, beside tau. With `loops` a step adds alpha F whole, as looped Transformers do, not alpha F / n.

Held-out stories are read with 1, 2, 4 and 8 steps. What a token costs at best is known (research/stories/costs.py), so
that one can ask whether hard tokens need more steps: the steps that a token takes are the fewest n from which on
KL(p_8 || p_n) is at most TOLERANCE bits.

Jeddi et al. 2026 (LoopFormer), arXiv 2602.11451; Prairie et al. 2026 (Parcae), 2604.12946; Zhu et al. 2025 (Ouro),
2510.25741.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from tqdm import tqdm

import glissando
from glissando.config import options
from glissando.depth.flow import FlowConfig, FlowDepth, FlowField
from glissando.depth.solvers import integrate
from glissando.generation import tokenizer_of
from glissando.presets import load_preset
from glissando.training.config import RunConfig
from research.flow_steps import Setting, solved_with
from research.runs import configured, options_of, recorded, trained
from research.where_bits_go import Piece, kinds_of_tokens, stories, tokens

STEPS = (1, 2, 4, 8)
TOLERANCE = 0.01  # bits
STORIES = 256


@options
class ElasticConfig(FlowConfig):
    """Options of the `elastic` depth: those of a flow.

    drawn        numbers of steps from which each training batch draws one; n_steps is for all else
    loops        a step adds alpha F whole: n applications of a residual block
    consistency  weight in the loss of 1 - cos(h_n, h_N), on average over tokens: h_n is where the n drawn steps end,
                 h_N, a constant, where the largest number ends
    """

    drawn: list[PositiveInt] = field(default_factory=lambda: list(STEPS))
    loops: bool = False
    consistency: NonNegativeFloat = 0.0


class WithLoss(torch.autograd.Function):
    """h as it is; the backward pass adds the gradient of `loss` to that of what follows."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, loss: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class StepTime(nn.Sequential):
    """e(tau, n), where `steps` is n."""

    steps = 1

    def forward(self, tau: Tensor) -> Tensor:
        return super().forward(torch.cat([tau, tau.new_full((1,), math.log2(self.steps))]))


@glissando.register_depth("elastic", ElasticConfig)
class ElasticDepth(FlowDepth):
    """A flow that draws the number of its steps in training."""

    config: ElasticConfig
    time: StepTime

    def __init__(self, config: ElasticConfig, make_block: Any) -> None:
        super().__init__(config, make_block)
        size = self.field.hidden_size
        self.time = StepTime(nn.Linear(2, size), nn.SiLU(), nn.Linear(size, size))

    def solve(self, field: FlowField, h: Tensor, args: tuple[Tensor, ...]) -> Tensor:
        o = self.config
        if not self.training:
            return self.reached(self.n_steps, field, h, args)
        end = self.reached(o.drawn[int(torch.randint(len(o.drawn), ()))], field, h, args)
        if not o.consistency:
            return end
        with torch.no_grad():
            target = self.reached(max(o.drawn), field, h, args)
        apart = 1 - nn.functional.cosine_similarity(end, target, dim=-1)
        return WithLoss.apply(end, o.consistency * apart.mean())

    def reached(self, n: int, field: FlowField, h: Tensor, args: tuple[Tensor, ...]) -> Tensor:
        """Where n steps from h end."""
        self.time.steps, speed = n, n if self.config.loops else 1

        def scaled(tau: float, h: Tensor, *args: Tensor) -> Tensor:
            return speed * field(tau, h, *args)

        return integrate(scaled, h, args=args, n_steps=n, method=self.config.method)


#: options of the depth that differ from the preset's
MODELS: dict[str, dict[str, Any]] = {
    "fixed-4": {},
    "fixed-1": {"n_steps": 1},
    "drawn": {"kind": "elastic"},
    "looped": {"kind": "elastic", "loops": True, "alpha": 1.0},
    "consistent": {"kind": "elastic", "loops": True, "alpha": 1.0, "consistency": 1.0},
}


def configuration(name: str, seed: int, changes: dict[str, Any]) -> RunConfig:
    preset = load_preset("hybrid-ode-nano")
    values: dict[str, Any] = {
        "model": {"depth": preset["model"]["depth"] | MODELS[name]},
        "data": {
            "labelled": False, "batch_size": 4, "seq_len": 256, "valid_rows": 128, "seed": seed,
            "tokenizer": {"kind": "bpe", "vocab_size": 1024},
        },
        "training": {"tokens": 667_000, "precision": "32-true", "sample_every": 10**6, "seed": seed},
    }  # fmt: skip
    return configured(preset, values, changes)


@torch.no_grad()
def read(model: glissando.LanguageModel, pieces: Sequence[Piece]) -> pd.DataFrame:
    """A row for each token of some stories: its story and kind, its `cost` at best and at each number of steps (bits),
    KL(p_8 || p_1), and the steps that it takes."""
    tokenizer, method = tokenizer_of(model), model.config.depth.method
    models = [solved_with(model, Setting(method, n)) for n in STEPS]
    parts = []
    for number, (before, data, kinds, costs) in enumerate(tqdm(pieces, desc="read", leave=False, disable=None)):
        ids, sizes = tokens(tokenizer, before, data)
        ends = list(accumulate(sizes))
        logs = [variant(torch.tensor([ids[:-1]]))[0][0].double().log_softmax(-1) / math.log(2) for variant in models]
        apart = [(logs[-1].exp() * (logs[-1] - log)).sum(-1) for log in logs]
        part = pd.DataFrame({
            "story": number,
            "kind": kinds_of_tokens(kinds, sizes),
            "cost": [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)],
            "bytes": sizes,
            "moved": apart[0].numpy(),
            "steps": STEPS[0],
        })  # fmt: skip
        for n, more, log, moved in zip(STEPS, (*STEPS[1:], STEPS[-1]), logs, apart, strict=True):
            part[f"bits_{n}"] = -log[torch.arange(len(sizes)), torch.tensor(ids[1:])].numpy()
            part.loc[(moved > TOLERANCE).numpy(), "steps"] = more
        parts.append(part)
    return pd.concat(parts)


def ranked(x: pd.Series, y: pd.Series) -> float:
    """Spearman's correlation; NaN where one does not vary."""
    a, b = x.rank(), y.rank()
    return float(a.corr(b)) if a.nunique() > 1 and b.nunique() > 1 else math.nan


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for all tokens, for those of each range of `cost`, and for each kind: how many, their steps on average,
    bits per byte of the whole text, at best and at each number of steps, and the rank correlation of what the steps
    change with what the token costs at best, and with what the model pays above it."""
    edges = np.array([-math.inf, 1e-9, 1, 3, math.inf])
    names = ["certain", "up to 1 bit", "1 to 3 bits", "above 3 bits"]
    ranges = pd.cut(table.cost, edges, labels=names)
    groups = [("all", table), *table.groupby(ranges, observed=True), *table.groupby("kind")]
    total, bits = table.bytes.sum(), [f"bits_{n}" for n in STEPS]
    rows = [
        {"group": name, "tokens": len(part), "steps": part.steps.mean(), "floor": part.cost.sum() / total}
        | {column: part[column].sum() / total for column in bits}
        | {"rank_cost": ranked(part.moved, part.cost), "rank_excess": ranked(part.moved, part[bits[-1]] - part.cost)}
        for name, part in groups
    ]
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="runs; one that is there is gone on with, or read (default: a temporary directory)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="(default: 0 1 2)")
    add("--quick", action="store_true", help="a step on a story in bytes, and two stories")
    o = parser.parse_args(arguments)
    out = o.out or Path(tempfile.mkdtemp())
    short = {"tokenizer": {"kind": "bytes"}, "batch_size": 1, "valid_rows": 1}
    changes: dict[str, Any] = {"training": {"tokens": 64}, "data": short} if o.quick else {}
    torch.set_num_threads(1)
    pieces = list(stories(2 if o.quick else STORIES))
    for seed in o.seeds:
        for model in o.models:
            made = trained(configuration(model, seed, changes), out / f"{model}-{seed}")
            new = summary(read(made, pieces)).round(5)
            new.insert(0, "model", model)
            new.insert(1, "seed", seed)
            print(new.to_string(index=False))
            recorded(out / "elastic.csv", new, ["model", "seed"])


if __name__ == "__main__":
    main()
