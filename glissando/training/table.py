"""What the configurations of runs on tables share, of series and of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, ClassVar, Self

from glissando.config import from_dict, to_dict
from glissando.data.base import Shard
from glissando.data.windows import BatchedWindows
from glissando.errors import ConfigError
from glissando.training.config import TrainingConfig, require_parts
from glissando.training.lanes import fresh_rows

#: the epochs of a run without a budget
_EPOCHS = 30.0


class TableRunConfig:
    """A subclass is a dataclass of options with `data` and `training`, and names its kind and its command."""

    data: Any
    training: TrainingConfig

    kind: ClassVar[str | None]
    command: ClassVar[str]
    other_texts: ClassVar[str | None]
    start_from: ClassVar[str | None] = None
    grown: ClassVar[dict[str, list[float]]] = {}

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            cls.command = f"{cls.kind} train"
            cls.other_texts = (
                "the table of the run with --{option} FILE, train anew into another directory, or measure the run on "
                f"all of a file: glissando {cls.kind} evaluate RUN --file FILE"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Of plain nested values. Raises ConfigError for what is no configuration of this kind."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values."""
        return {"kind": self.kind, **to_dict(self)}


def epoch_batches(train: BatchedWindows[Any], training: TrainingConfig) -> int:
    """Batches in which every window comes once."""
    return train.lane_batches if training.carry else train.batches


def table_batches(train: BatchedWindows[Any], training: TrainingConfig, step: int, shard: Shard) -> Iterator[Any]:
    """Training batches without end from number `step`; with training.carry in lanes."""
    for number in count(step):
        if training.carry:
            batch = train.lanes(number, shard)
            batch.fresh = fresh_rows(batch, training, number, shard)
            yield batch
        else:
            yield train.training(number, shard)
