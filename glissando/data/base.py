"""What a corpus is: an endless, addressable stream of training batches and a fixed set of held-out ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glissando.data.tokenizers import Tokenizer

Split = Literal["train", "valid"]
IGNORED = -100  # the target of a position that is not scored; PyTorch's own default ignore_index


class Batch(NamedTuple):
    """One step's rows. B rows, T tokens, C control dimensions."""

    ids: Tensor  # (B, T) int64, what the model reads
    targets: Tensor  # (B, T) int64, what it must say next; IGNORED where nothing is scored
    n_bytes: int  # how many bytes of text the scored targets stand for
    mask: Tensor | None = None  # (B, T) bool, True at real tokens; None when there is no padding
    control: Tensor | None = None  # (B, C) labels
    floor_bits: float | None = None  # exact information of the scored text, where the corpus knows it


@dataclass(frozen=True)
class Shard:
    """Which rows of every global batch this process takes: rows rank, rank + world, ..."""

    rank: int = 0
    world: int = 1


class Corpus(ABC):
    """Text as batches.

    Data order is a function of (seed, step) alone: `batches("train", start=k)` yields exactly what
    `batches("train")` yields after k batches, whatever ran before, so resuming is exact. A process's batch
    is its shard's rows of the same global batch, so the union over processes does not depend on their number.
    """

    tokenizer: Tokenizer
    batch_size: int  # rows of a global batch
    seq_len: int  # T

    #: names of the control dimensions, in the order of Batch.control
    control_names: tuple[str, ...] = ()
    #: expected bits per byte of the source itself, where it is known exactly
    entropy_floor: float | None = None

    @abstractmethod
    def batches(self, split: Split, *, start: int = 0, shard: Shard = Shard()) -> Iterator[Batch]:
        """Training batches without end from batch number `start`, or the held-out ones once."""

    @abstractmethod
    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """`n` held-out beginnings for samples; deterministic in `seed`."""

    def describe(self) -> dict[str, object]:
        """What a person wants to know of it, for `glissando corpora` and the run's record."""
        return {"entropy_floor": self.entropy_floor, "control_names": list(self.control_names)}


def shard_rows(batch_size: int, shard: Shard) -> range:
    """The global row numbers of `shard`.

    Raises ValueError if the rows cannot be shared out evenly.
    """
    if batch_size % shard.world:
        raise ValueError(
            f"batch_size {batch_size} cannot be shared by {shard.world} processes; "
            f"use a multiple of {shard.world}"
        )
    return range(shard.rank, batch_size, shard.world)


def next_token_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of T + 1 tokens -> ids (B, T) and targets (B, T), the same rows one token later."""
    tokens = torch.tensor(rows, dtype=torch.int64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
