"""Four calibrations of the Tauformer's tau, with and without a gradient for it, and three questions of its author.

    python -m research.calibrations --out DIR     DIR gets the trainings, calibrations.csv and stopping.csv

    fixed     tau = 1, never calibrated
    start     tau = the median energy of the first layer's keys, before the first step
    periodic  the same again every 25 steps
    drift     the same again where the median is more than 5 % from tau and the loss on held-out text has fallen in the
              last 25 steps: energy drift, gated by the progress of training

Each with tau as a number that no gradient changes, as published, and as a parameter of the model, one for all layers.
The model is `tauformer` with two layers of 64, four heads and a temperature that is learned from 0.2, trained for 300
steps of 4 x 128 bytes of built-in stories by AdamW at 4e-3, with a cosine.

1. Which calibration is best?                 held-out nats a byte; differences from `start`, over seeds and windows
2. Lower loss, lower tau?                     dL/dlog tau on held-out text, its sign, and where a learned tau goes
3. Does the spread of the energies announce   training on three stories alone, where the held-out loss has a minimum:
   the best stopping point?                   how far from it the steps of the largest and least spread are

The spread is (p95 - p5) / median of the energies of the first layer's keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from glissando.model import LanguageModel
from glissando.storage import write_atomic
from research.audit.claim import Plan
from research.audit.tau.training import Size, key_energies, tau_mixers
from research.audit.training import Learning, cosine, held_out, learn, losses, read_bytes, seeded
from research.intervals import Gap, gap_of, mean_of
from research.runs import options_of

RATE, START = 4e-3, 0.2
WAYS = ("fixed", "start", "periodic", "drift")
EVERY, DRIFTED, FEW = 25, 0.05, 3


def size_of(plan: Plan) -> Size:
    return Size(32, 2, 1, 2, 32, plan.steps or 12) if plan.quick else Size(64, 4, 2, 4, 128, plan.steps or 300)


def new_model(size: Size) -> LanguageModel:
    mixer = {"kind": "tau", "heads": size.heads, "head_size": size.width // size.heads, "temperature": START}
    options: dict[str, Any] = {"hidden_size": size.width, "mixer": mixer, "depth": {"layers": size.layers}}
    return LanguageModel.from_preset("tauformer", vocab_size=256, **options)


def share(model: LanguageModel, tau: float, learned: bool) -> Tensor:
    """One tensor as tau of all tau layers, a parameter if it is `learned`."""
    shared: Tensor = nn.Parameter(torch.tensor(tau)) if learned else torch.tensor(tau)
    for mixer in tau_mixers(model):
        del mixer.tau
        setattr(mixer, "tau", shared) if learned else mixer.register_buffer("tau", shared)
    return shared


class Watch:
    """Every EVERY steps: calibrates, and records tau, dL/dtau, the energies and the held-out loss."""

    def __init__(self, model: LanguageModel, way: str, learned: bool, plan: Plan) -> None:
        self.model, self.way, self.size = model, way, size_of(plan)
        text, size = read_bytes(plan), self.size
        ids = text.choosing[: 8 * (size.length + 1)]
        self.rows = ids[: len(ids) // (size.length + 1) * (size.length + 1)].view(-1, size.length + 1)
        self.tau = share(model, 1.0 if way == "fixed" else float(self.energies().median()), learned)
        self.lines: list[dict[str, float]] = []

    def energies(self) -> Tensor:
        return key_energies(self.model, self.rows[:, :-1]).flatten()

    def __call__(self, step: int) -> None:
        if step % EVERY:
            return
        self.record(step)
        median = self.lines[-1]["median"]
        if self.way == "periodic" or (self.way == "drift" and self.drifted(median)):
            with torch.no_grad():
                self.tau.fill_(median)

    def drifted(self, median: float) -> bool:
        improves = len(self.lines) > 1 and self.lines[-1]["loss"] < self.lines[-2]["loss"]
        return improves and abs(median / self.tau.item() - 1) > DRIFTED

    def record(self, step: int) -> None:
        is_parameter = self.tau.requires_grad
        self.tau.requires_grad_(True)
        loss = losses(self.model, self.rows).mean()
        (slope,) = torch.autograd.grad(loss, self.tau)
        self.tau.requires_grad_(is_parameter)
        low, median, high = torch.quantile(self.energies(), torch.tensor([0.05, 0.5, 0.95])).tolist()
        self.lines.append({
            "step": step, "loss": float(loss.detach()), "tau": float(self.tau.detach()), "slope": float(slope),
            "median": median, "spread": (high - low) / median,
        })  # fmt: skip


class Training(NamedTuple):
    """What was recorded of a training, and the held-out nats of each window."""

    log: pd.DataFrame
    nats: Tensor


def trained(
    way: str, learned: bool, seed: int, plan: Plan, few: int | None = None, out: Path | None = None
) -> Training:
    """Train on the text, or on its first `few` stories; a training that is in `out` is read."""
    file = out and out / f"{way}{'-learned' if learned else ''}{'' if few is None else f'-{few}'}-{seed}.json"
    if file is not None and file.is_file():
        saved = json.loads(file.read_text())
        return Training(pd.DataFrame(saved["log"]), torch.tensor(saved["nats"]))
    text, size = read_bytes(plan), size_of(plan)
    ids = text.train if few is None else text.train[: int((text.train == ord("\n")).nonzero()[few - 1]) + 1]
    model = seeded(seed, partial(new_model, size))
    watch = Watch(model, way, learned, plan)
    learn(model, ids, Learning(size.batch, size.length, size.steps, RATE, seed, cosine, betas=(0.9, 0.99)), watch)
    watch.record(size.steps)
    nats = held_out(model, text.reported, size.length, 4 if plan.quick else 64).nats
    if file is not None:
        write_atomic(file, json.dumps({"log": watch.lines, "nats": nats.tolist()}).encode())
    return Training(pd.DataFrame(watch.lines), nats)


def calibrations(plan: Plan, out: Path | None) -> pd.DataFrame:
    """A row for each calibration, with and without a gradient: means over the plan's seeds, halves of intervals."""
    runs = {
        (way, learned): [trained(way, learned, seed, plan, out=out) for seed in plan.each_seed]
        for learned in (False, True)
        for way in WAYS
    }
    nats = {key: torch.stack([run.nats for run in found]) for key, found in runs.items()}
    rows = []
    for (way, learned), found in runs.items():
        figures = {
            "above_start": gap_of(nats[way, learned] - nats["start", False]),
            "tau_change": over([run.log.tau.iloc[-1] / run.log.tau.iloc[0] - 1 for run in found]),
            "median_change": over([run.log["median"].iloc[-1] / run.log["median"].iloc[0] - 1 for run in found]),
            # The first quarter, in which the loss is that of single bytes, is left out.
            "slope": over([(run.log.slope * run.log.tau)[len(run.log) // 4 :].mean() for run in found]),
            "share_positive": over([(run.log.slope > 0)[len(run.log) // 4 :].mean() for run in found]),
        }
        row = {"calibration": way, "learned": learned, "nats": float(nats[way, learned].mean())}
        row |= {name: gap.value for name, gap in figures.items()}
        rows.append(row | {f"{name}_half": gap.half for name, gap in figures.items()})
    return pd.DataFrame(rows)


def over(values: Sequence[float]) -> Gap:
    return mean_of(torch.tensor([float(value) for value in values]))


def stopping(plan: Plan, out: Path | None) -> pd.DataFrame:
    """A row for each seed: the step of the least held-out loss, and what stopping at the spread's extrema costs."""
    rows = []
    for seed in plan.each_seed:
        log = trained("start", False, seed, plan, FEW, out).log.iloc[1:]  # before the first step nothing is learned
        best = log.loss.idxmin()
        row: dict[str, Any] = {"seed": seed, "best_step": log.step[best], "loss": log.loss[best]}
        for name, at in (("largest", log.spread.idxmax()), ("least", log.spread.idxmin()), ("last", log.index[-1])):
            row |= {f"{name}_step": log.step[at], f"{name}_costs": log.loss[at] - log.loss[best]}
        rows.append(row | {"rank": float(log.loss.rank().corr(log.spread.rank()))})
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, help="trainings and tables; a training that is there is read")
    parser.add_argument("--steps", type=int, help="steps of each training (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--quick", action="store_true", help="one layer of 32, twelve steps, one seed")
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = Plan(quick=o.quick, steps=o.steps, seeds=1 if o.quick else o.seeds)
    if o.out is not None:
        o.out.mkdir(parents=True, exist_ok=True)
    for name, measure in (("stopping", stopping), ("calibrations", calibrations)):
        measured = measure(plan, o.out)
        print(measured.round(4).to_string(index=False), flush=True)
        if o.out is not None:
            measured.round(5).to_csv(o.out / f"{name}.csv", index=False)


if __name__ == "__main__":
    main()
