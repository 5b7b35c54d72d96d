"""What is learned: batches, a loss, a score and a sample. The loop knows nothing else of data and model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glissando.config import to_dict
from glissando.data.base import WHOLE, Shard, Split
from glissando.runs import Run
from glissando.training.lanes import Lanes


class Loss(NamedTuple):
    """A sum over scored targets and their number, so that parts, processes and steps average rightly.

    also    further sums for `Task.row`: tensors on the model's device, and numbers
    state   the model's state after the batch; None where none was given
    """

    total: Tensor
    weight: int
    also: Mapping[str, Any] = {}
    state: Any = None


@dataclass
class Sums:
    """Losses and their weights added up. What is computed on a device stays there, so that nothing waits for it."""

    loss: Any = 0.0
    targets: int = 0
    flops: float = 0.0
    also: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        self.loss, self.targets, self.flops = (
            self.loss + other.loss, self.targets + other.targets, self.flops + other.flops,
        )  # fmt: skip
        self.also = self.also | {name: self.also.get(name, 0.0) + value for name, value in other.also.items()}

    @property
    def mean(self) -> float:
        return self.loss / max(self.targets, 1)


class Task(ABC):
    """Data and what a model is to do with them.

    nominal   about the number of targets of a step: any fixed number would do, this one keeps gradients near their size
    columns   names of what `row` and `score` add to metrics.csv
    notes     what a person should know before training, a line each
    """

    nominal: int
    columns: tuple[str, ...] = ()
    notes: Sequence[str] = ()
    #: whether a finished run's own weights are always those of the best validation
    keeps_best = False
    #: whether a model is validated before the first step too, because it may be the best
    scores_start = False
    #: whether rows of training continue from the state after an earlier row, see glissando.training.lanes
    carries = False

    @property
    def epoch_rows(self) -> int | None:
        """Training rows of one pass over the data; None where they have no known end."""
        return None

    @property
    def turns(self) -> int:
        """Batches that take turns: a row continues from its row in the batch `turns` before."""
        return 1

    @abstractmethod
    def new_model(self, saved: bool = False) -> Any:
        """The model to train; `saved`: weights will be loaded into it, so that its own need no start."""

    @abstractmethod
    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Any]:
        """Training batches without end from batch number `step`, or the held-out ones once."""

    def steps(self, step: int, shards: Sequence[Shard]) -> Iterator[list[Any]]:
        """Training batches without end from batch number `step`, each as those of `shards`."""
        return map(list, zip(*(self.batches("train", step, shard) for shard in shards), strict=True))

    @abstractmethod
    def loss(self, model: Any, batch: Any, state: Any = None, logged: bool = False) -> Loss:
        """The loss of a batch, from `state` on; `logged`: with what `row` needs of a step that is logged."""

    def flops(self, model: Any, batch: Any) -> float:
        """Operations of training on the batch; NaN where they are not known."""
        return math.nan

    def row(self, sums: Sums) -> dict[str, Any]:
        """Values of `columns` for what was trained on since the last row."""
        return {}

    @abstractmethod
    def score(self, model: Any, device: torch.device, stride: int = 1, shard: Shard = WHOLE) -> dict[str, float]:
        """Held-out figures, the same on every process: `valid_loss`, which is to fall, and values of `columns`.

        stride  one of so many held-out batches is scored
        shard   this process's number and how many there are
        """

    def sample(self, model: Any) -> str | None:
        """What the model makes, for samples.txt; called by every process. None: this task shows nothing."""
        return None

    def hooks(self) -> list[Any]:
        """Hooks that belong to the task."""
        return []

    @abstractmethod
    def describe(self, batch: Any) -> str:
        """The data and the shapes of a batch, in words."""

    def write(self, run: Run) -> None:
        """Write what a run of this task has beside configuration and weights; nothing by default."""
        return

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        """What summary.json says of validations."""
        return {"best_step": best_step}

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        """The summary of a finished training for a person, and how to go on from the run `name`."""
        return [f"run: {name}   (best validation: step {summary['best_step']})"]


class TaskConfig(ABC):
    """All of a run of a task: what config.yaml holds, resolved. A subclass under `options` has `data`, `model` and
    `training`, and makes the task.

    kind         of config.yaml; `resume(path, kind=CLASS)` opens such a run
    command      what continues a run, with --resume
    other_texts  for errors: what may be given in the place of a text that has changed; None: --data.path
    """

    kind: ClassVar[str | None]
    command: ClassVar[str]
    other_texts: ClassVar[str | None] = None
    #: only a language model starts from another run, or goes on growing
    start_from: ClassVar[str | None] = None
    grown: ClassVar[dict[str, list[float]]] = {}

    def check(self, processes: int) -> None:
        """Raise ConfigError for options that make no sense together, with this number of processes."""
        return

    @abstractmethod
    def task(self, resumed: Run | None = None) -> Task:
        """Open the data; those of a run that is `resumed` must be what they were."""

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values."""
        return {"kind": self.kind, **to_dict(self)}


class Objective(nn.Module):
    """scale * the sum of a task's loss over a batch, and `sums` of what was scored.

    A sum and not a mean: who ends the step knows the targets of all its parts and processes, and divides. A mean of
    means would weigh the targets of a short batch more.
    """

    def __init__(self, model: Any, task: Task, scale: float = 1.0) -> None:
        super().__init__()
        self.task, self.scale, self.sums = task, scale, Sums()
        self.model: Any = model

    def forward(
        self, batch: Any, logged: bool = False, lanes: Lanes | None = None, fresh: Tensor | None = None
    ) -> Tensor:
        """lanes: of the batch's rows; an object, so that nothing on the way here converts or copies their states.
        fresh: (B,) bool, rows that begin anew."""
        before = None if lanes is None else lanes.begin(self.model, batch.rows, fresh)
        loss = self.task.loss(self.model, batch, before, logged)
        if not isinstance(loss, Loss):
            raise TypeError(
                f"{type(self.task).__name__}.loss returned a {type(loss).__name__}: return a "
                "glissando.training.task.Loss(total, weight), the sum over scored targets and their number"
            )
        if lanes is not None:
            lanes.end(loss.state)
        self.sums.add(Sums(loss.total.detach(), loss.weight, self.task.flops(self.model, batch), dict(loss.also)))
        return loss.total * self.scale
