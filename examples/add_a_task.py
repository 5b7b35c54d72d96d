"""A task of your own, in a file outside the package: a model of numbers learns to add.

    x_t ~ N(0, 1),   target y_t = x_1 + ... + x_t,   loss = sum of (y - target)^2

A task states its batches, its loss, its score and what a person sees. The training loop does the rest: budgets,
schedules, checkpoints, exact resumption and several processes. Run as a program, the file trains and continues:

    python examples/add_a_task.py --out runs/sums

`examples/add_a_command.py` makes the same task a command of the program.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from glissando.config import from_dict, options
from glissando.data.base import WHOLE, Shard, Split
from glissando.depth import DEPTHS, DiscreteConfig
from glissando.runs import Run
from glissando.series import SeriesConfig, SeriesModel
from glissando.training.config import TrainingConfig
from glissando.training.fit import resume, train, trained
from glissando.training.task import Loss, Task, TaskConfig


@options
class SumsData:
    """The batches.

    length         T
    valid_batches  number of held-out batches
    """

    batch_size: int = 16
    length: int = 8
    valid_batches: int = 2


@options
class SumsModel(SeriesConfig):
    """A model from one number a step to one number."""

    inputs: int = 1
    outputs: int = 1
    hidden_size: int = 8
    depth: DEPTHS.section() = field(default_factory=lambda: DiscreteConfig(layers=1))  # type: ignore[valid-type]


@options
class SumsConfig(TaskConfig):
    """All of a run of this task: what config.yaml holds, beside `kind`."""

    data: SumsData = field(default_factory=SumsData)
    model: SumsModel = field(default_factory=SumsModel)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    kind: ClassVar[str] = "sums"
    command: ClassVar[str] = "sums"  # for the advice on how to continue a run that was stopped

    def task(self, resumed: Run | None = None) -> Sums:
        return Sums(self)


class Sums(Task):
    """See the file's docstring for the equation."""

    def __init__(self, config: SumsConfig) -> None:
        self.config = config
        self.nominal = config.data.batch_size * config.data.length

    def new_model(self, saved: bool = False) -> SeriesModel:
        return SeriesModel(self.config.model)

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Tensor]:
        data = self.config.data
        while split == "train" or step < data.valid_batches:
            # A batch follows from its number alone, so that a training that goes on meets the same ones.
            generator = torch.Generator().manual_seed(step + 10**6 * (split == "valid"))
            x = torch.randn(data.batch_size, data.length, 1, generator=generator)
            yield x[shard.rank :: shard.world]
            step += 1

    def loss(self, model: SeriesModel, batch: Tensor, state: Any = None, logged: bool = False) -> Loss:
        batch = batch.to(next(model.parameters()).device)
        y, state = model(batch, state)
        return Loss((y - batch.cumsum(1)).square().sum(), batch.numel(), state=state)

    @torch.no_grad()
    def score(
        self, model: SeriesModel, device: torch.device, stride: int = 1, shard: Shard = WHOLE
    ) -> dict[str, float]:
        losses = [self.loss(model, batch) for batch in self.batches("valid")]
        return {"valid_loss": float(sum(each.total for each in losses) / sum(each.weight for each in losses))}

    @torch.no_grad()
    def sample(self, model: SeriesModel) -> str:
        y, _ = model(torch.tensor([[[1.0], [2.0], [3.0]]], device=next(model.parameters()).device))
        return f"1 + 2 + 3 = {float(y[0, -1, 0]):.1f}"

    def describe(self, batch: Tensor) -> str:
        return f"running sums {tuple(batch.shape)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, and nothing else")
    parser.add_argument("--out", help="run directory; a temporary one by default")
    arguments = parser.parse_args()
    budget = {"steps": 20, "optimizer": {"learning_rate": 0.03}} if arguments.quick else {"steps": 1000}
    with tempfile.TemporaryDirectory() as folder:
        run = train(from_dict(SumsConfig, {"training": budget}), arguments.out or Path(folder) / "run")
        resume(run.path, kind=SumsConfig)  # finished: nothing is left to train
        model = trained(run.path, SumsConfig)
        y, _ = model(torch.tensor([[[1.0], [2.0], [3.0]]]))
        print(f"1, 2, 3 -> {', '.join(f'{each:.1f}' for each in y[0, :, 0].tolist())}")


if __name__ == "__main__":
    main()
