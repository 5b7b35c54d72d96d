"""A mixer of your own, in a file outside the package: an exponential moving average, one decay a channel.

    h_t = a h_{t-1} + (1 - a) x_t,   y = W h,   a = sigmoid(log-odds), learned

Importing this file registers it as `average`; then its options are options of every command:

    glissando train --import examples/add_a_mixer.py --preset transformer-nano --model.mixer average \\
        --model.mixer.decay 0.8 --training.steps 200 --out runs/average

Run as a program, the file checks the laws of the contract on the mixer, trains it with the command line, writes with
the run, and compares it with transformer-nano under one budget:

    python examples/add_a_mixer.py --quick
"""

from __future__ import annotations

import argparse
import math
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

import glissando
from glissando.config import options
from glissando.mixers import Context, Mixer


@options
class AverageConfig:
    """Options of the `average` mixer.

    decay  a starts here in every channel, between 0 and 1
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9


class AverageState(NamedTuple):
    h: Tensor  # (B, D): the whole past in D numbers


@glissando.register_mixer("average", AverageConfig)
class Average(Mixer):
    """See the file's docstring for the equation."""

    def __init__(self, hidden_size: int, config: AverageConfig | None = None, **options: Any) -> None:
        super().__init__()
        self.config = config or AverageConfig(**options)
        self.log_odds = nn.Parameter(torch.empty(hidden_size))
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        a = self.config.decay
        nn.init.constant_(self.log_odds, math.log(a / (1 - a)))

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> AverageState:
        return AverageState(self.log_odds.new_zeros(batch_size, len(self.log_odds), device=device, dtype=dtype))

    def forward(
        self, x: Tensor, state: AverageState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, AverageState | None]:
        mask = self.context(ctx).mask
        decay = self.log_odds.sigmoid()
        h = torch.zeros_like(x[:, 0]) if state is None else state.h.to(x.dtype)
        outputs = []
        for t in range(x.shape[1]):
            after = decay * h + (1 - decay) * x[:, t]
            h = after if mask is None else torch.where(mask[:, t, None], after, h)  # padding changes no state
            outputs.append(h)
        return self.out(torch.stack(outputs, 1)), None if state is None else AverageState(h.to(state.h.dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, and nothing else")
    parser.add_argument("--out", help="directory for the runs; a temporary one if absent")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        show(folder, given.quick)


def show(folder: Path, quick: bool) -> None:
    from glissando.testing import check_mixer

    check_mixer(Average, AverageConfig(decay=0.8))
    print("the mixer obeys the laws: shapes, split law, batch law, state, parameters")

    toy = "--model.hidden_size 16 --model.depth.layers 2 --data.valid_rows 4 --data.seq_len 64 --data.batch_size 2"
    sizes, budget = (toy, "steps=4") if quick else ("--data.batch_size 8", "steps=300")
    run, file = folder / "average", shlex.quote(__file__)
    command(
        f"train --import {file} --preset transformer-nano --model.mixer average --model.mixer.decay 0.8 {sizes} "
        f"--training.{budget.replace('=', ' ')} --out {run}"
    )
    command(f"generate {run} --import {file} --max_tokens 20")

    model = folder / "average.yaml"
    model.write_text("preset: transformer-nano\nmodel: {mixer: {kind: average, decay: 0.8}}\n")
    contexts = "16" if quick else "256,1024"
    command(
        f"compare transformer-nano {model} --import {file} --allow_unequal {sizes} --budget {budget} "
        f"--contexts {contexts} --out {folder / 'compared'}"
    )


def command(line: str) -> None:
    from glissando.cli import main

    print(f"$ glissando {line}", flush=True)
    if main(shlex.split(line)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
