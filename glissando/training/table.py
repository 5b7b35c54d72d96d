"""What trainings on tables share, of series and of events: their configuration and their task."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import count
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field

from glissando.checkpoints import best_checkpoint
from glissando.config import from_dict, options, recorded, to_dict
from glissando.data.base import WHOLE, Shard, Split
from glissando.errors import ConfigError, DivergenceError
from glissando.runs import Run
from glissando.training.config import TrainingConfig, require_parts
from glissando.training.task import Task, TaskConfig

#: the epochs of a run without a budget
_EPOCHS = 30.0


@options
class TableRunConfig(TaskConfig):
    """All of a run on a table: what config.yaml holds, resolved. A subclass narrows the types, and names its kind.

    model     options of the model; sizes follow from the table
    encoding  what the table's columns mean
    imports   the Python files that registered what the run is made of (--import on the command line)
    """

    data: Any
    preset: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    encoding: Any = recorded(default=None)
    imports: list[Annotated[str, Field(strict=True)]] = field(default_factory=list)

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            cls.command = f"{cls.kind} train"
            cls.other_texts = (
                "the table of the run with --{option} FILE, train anew into another directory, or measure the run on "
                f"all of a file: glissando {cls.kind} evaluate RUN --file FILE"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Reads plain nested values. Raises ConfigError for what is no configuration of this kind."""
        return from_dict(cls, {"data": {}, **values})

    def check(self, processes: int) -> None:
        """Set the budget where none is given: 30 epochs. Raise ConfigError for what cannot be trained so."""
        t = self.training
        if not t.budgets:
            t.epochs = _EPOCHS
        text_only = {"flops": t.flops, "neutral_kl": t.neutral_kl}
        if unused := [name for name, value in text_only.items() if value]:
            raise ConfigError(f"training.{unused[0]} is an option of language models only: leave it out")
        require_parts(t, self.data.batch_size, processes)

    def task(self, resumed: Run | None = None) -> TableTask:
        """Read the table."""
        return self.task_of()

    @abstractmethod
    def task_of(self, *sources: Any) -> TableTask:
        """Read frames in the place of the files."""


class TableTask(Task):
    """A model of the windows of a table.

    config    whose encoding becomes that of the table
    prepared  the windows `train` and `valid`, the `encoding`, and `lines` for the user
    outputs   numbers that are scored of a step
    """

    keeps_best = True
    #: the model's answer to a batch, and the class of the model
    _call: Callable[[Any, Any], Any]
    _model: ClassVar[Any]

    def __init__(self, config: Any, prepared: Any, outputs: int = 1) -> None:
        self.config, self.prepared, self.encoding = config, prepared, prepared.encoding
        self.notes: Sequence[str] = prepared.lines
        self.carries = config.training.carry > 0
        self.nominal = max(1, prepared.train.size * prepared.train.rows * outputs)
        config.encoding = prepared.encoding

    @property
    def epoch_rows(self) -> int:
        train = self.prepared.train
        return (train.lane_batches if self.carries else train.batches) * self.config.data.batch_size

    @abstractmethod
    def _built(self) -> Any:
        """A new model of the table's sizes and scales."""

    def _begin(self, model: Any) -> None:
        """Set what a new model is to have before the first step beside its weights."""

    def new_model(self, saved: bool = False) -> Any:
        """With the table's sizes and scales; its options become the configuration's."""
        model = self._built()
        self.config.model = to_dict(model.config)
        if self.config.training.precision == "64-true":
            model.double()
        if not saved:
            self._begin(model)
        with torch.no_grad():  # what does not fit together is found before anything is made
            self._call(model, self.prepared.train.batch(np.arange(1)))
        return model

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Any]:
        """Every window once an epoch, in an order that is a function of data.seed and the epoch; with training.carry in
        lanes."""
        if split == "valid":
            return self.prepared.valid.scoring()
        train = self.prepared.train
        return ((train.lanes if self.carries else train.training)(number, shard) for number in count(step))

    def score(self, model: Any, device: torch.device, stride: int = 1, shard: Shard = WHOLE) -> dict[str, float]:
        """Every process scores all windows, which are few."""
        was = model.training
        model.eval()
        try:
            row = self._scored(model, stride)
        finally:
            model.train(was)
        if not math.isfinite(row["valid_loss"]):
            raise DivergenceError(
                f"the held-out loss is {row['valid_loss']}, and the last checkpoint is kept: train again with a lower "
                "training.optimizer.learning_rate"
            )
        return row

    @abstractmethod
    def _scored(self, model: Any, stride: int) -> dict[str, float]:
        """The figures of a model in evaluation mode."""

    def describe(self, batch: Any) -> str:
        train = self.prepared.train
        return (
            f"{self._about()}; {len(train):,} windows of at most {int((train.end - train.begin).max())} steps to "
            f"train, {len(self.prepared.valid):,} held out"
        )

    @abstractmethod
    def _about(self) -> str:
        """What is predicted, and from what."""

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        """The figures of the best validation's weights on all that is held out."""
        path = best_checkpoint(run.path)
        if path is None or best_step < 0:
            return {"best": None}
        return {"best": {"step": best_step, **self._measured(self._model.load(path), run)}}

    @abstractmethod
    def _measured(self, model: Any, run: Run) -> dict[str, Any]:
        """The figures of a trained model on all that is held out."""

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        best = summary["best"]
        if best is None or not summary["finished"]:
            return []
        return [
            *self._results(best),
            f"{summary['steps']} steps, {summary['seconds']:.0f} s; the run's own weights are those of the best "
            f"validation, step {best['step']}",
            f"run: {name}   (try: glissando {self.config.kind} evaluate {name})",
        ]

    @abstractmethod
    def _results(self, best: Mapping[str, Any]) -> list[str]:
        """The figures of a finished training, as lines for a person."""


def with_sizes(options: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model with the sizes of its table. Raises ConfigError for an option that differs from them."""
    for name, size in sizes.items():
        if options.get(name, size) != size:
            raise ConfigError(f"model.{name} is {options[name]}, and the table has {size}: leave it out")
    return {**options, **sizes}
