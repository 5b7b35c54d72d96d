"""What a corpus is: an endless, addressable stream of training batches and a fixed set of held-out ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.data.order import random_below
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError, unknown_name

Split = Literal["train", "valid"]
_PROMPT_TOKENS = 48
_BLOCK = 256  # rows written at once
IGNORED = -100  # the target of a position that is not scored; PyTorch's own default ignore_index


class Batch(NamedTuple):
    """One step's rows. B rows, T tokens, C control dimensions."""

    ids: Tensor  # (B, T) int64, what the model reads
    targets: Tensor  # (B, T) int64, the next token; IGNORED where nothing is scored
    n_bytes: int  # how many bytes of text the scored targets stand for
    mask: Tensor | None = None  # (B, T) bool, True at real tokens; None when there is no padding
    control: Tensor | None = None  # (B, C) labels
    floor_bits: float | None = None  # exact information of the scored text, where the corpus knows it
    fresh: Tensor | None = None  # (B,) bool, rows of a lane that do not go on where the row before ended

    @property
    def rows(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True)
class Shard:
    """Which rows of every global batch this process takes: rows rank, rank + world, ..."""

    rank: int = 0
    world: int = 1


WHOLE = Shard()


class Corpus(ABC):
    """Text as batches.

    Data order is a function of (seed, step) alone: `batches("train", start=k)` yields exactly what
    `batches("train")` yields after k batches, whatever ran before, so resuming is exact. A process's batch
    is its shard's rows of the same global batch, so the union over processes does not depend on their number.

    Held-out batches are shared out by rows as well, and every process gets the same number of batches, so
    that collectives stay in step: where the last global batch has no row for a process, it gets one row of
    it with nothing scored.
    """

    tokenizer: Tokenizer
    batch_size: int  # rows of a global batch
    seq_len: int  # T; the largest T where rows vary

    #: names of the control dimensions, in the order of Batch.control
    control_names: tuple[str, ...] = ()
    #: expected bits per byte of the source itself, where it is known exactly
    entropy_floor: float | None = None

    @property
    def epoch_rows(self) -> int | None:
        """Training rows of one pass over the text or the pairs; None of what never ends or is not counted before."""
        return None

    @property
    def turns(self) -> int:
        """Batches that take turns in `lanes`: a row goes on with the text of its row in the batch `turns` before."""
        return 1

    @property
    def has_oracle(self) -> bool:
        """Whether it can judge a text."""
        return type(self).judge is not Corpus.judge

    @property
    def problems(self) -> str | None:
        """What of the source could not be used so far, in one line for a person; None if nothing."""
        return None

    @abstractmethod
    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Training batches without end from batch number `start`, or the held-out ones once."""

    def lanes(self, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Training batches without end from batch number `start`, where row r of each goes on with the text of row r of
        the one `turns` before, unless it is `fresh`; here, where rows are whole documents, with the next ones."""
        return self.batches("train", start=start, shard=shard)

    def steps(self, start: int, shards: Sequence[Shard], in_lanes: bool = False) -> Iterator[list[Batch]]:
        """Training batches without end from batch number `start`, each as those of `shards`; in lanes or not."""
        streams = (
            self.lanes(start=start, shard=shard) if in_lanes else self.batches("train", start=start, shard=shard)
            for shard in shards
        )
        return map(list, zip(*streams, strict=True))

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """`n` held-out beginnings for samples, deterministic in `seed`; here of documents where a row has one, else of
        rows, 48 tokens at most."""
        sample = next(self.batches("valid")).ids.numpy()
        return [_beginning(sample[row], self.tokenizer) for row in random_below(len(sample), seed, np.arange(n))]

    def judge(self, text: str) -> dict[str, float | None]:
        """A text's labels as the corpus's oracle reads them, in [-1, 1]; None where it gives no evidence.

        Raises ConfigError for a corpus without an oracle.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot judge a text: it has no oracle for its labels. The built-in stories have "
            "one: --data.kind stories"
        )

    def texts(self, split: Split = "train") -> Iterator[str]:
        """The text itself in pieces, to train a tokenizer on; endless where the batches are."""
        for batch in self.batches(split):
            for row, real in zip(batch.ids, batch.mask if batch.mask is not None else batch.ids >= 0, strict=True):
                yield self.tokenizer.decode(row[real].tolist())

    def describe(self) -> dict[str, object]:
        """What `glissando corpora NAME` prints of a generated corpus; a comparison takes `chance_accuracy` from it."""
        return {"entropy_floor": self.entropy_floor, "control_names": list(self.control_names)}


def _beginning(row: np.ndarray, tokenizer: Tokenizer) -> str:
    """The beginning of the first document of a row that begins in its first part, else of the row."""
    ends = np.flatnonzero(row[: -_PROMPT_TOKENS // 2] == tokenizer.eos_id)
    ids = row[ends[0] + 1 if ends.size else 0 :][:_PROMPT_TOKENS].tolist()
    ids = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
    text = tokenizer.decode(ids).strip("\ufffd").strip()
    return text.rpartition(" ")[0] or text


def shard_rows(batch_size: int, shard: Shard) -> range:
    """The global row numbers of `shard`.

    Raises ConfigError (a ValueError) if the rows cannot be shared out evenly.
    """
    if batch_size % shard.world:
        raise ConfigError(
            f"batch_size {batch_size} cannot be divided among {shard.world} processes; use a multiple of {shard.world}"
        )
    return range(shard.rank, batch_size, shard.world)


def held_out_batches(
    n_rows: int, batch_size: int, start: int, shard: Shard, batch_of: Callable[[np.ndarray], Batch]
) -> Iterator[Batch]:
    """Each held-out batch from batch `start`, by the numbers of its rows: every row once over all shards."""
    for first in range(start * batch_size, n_rows, batch_size):
        rows = np.arange(first + shard.rank, min(first + batch_size, n_rows), shard.world)
        yield batch_of(rows) if rows.size else _unscored(batch_of(np.array([first])))


def _unscored(batch: Batch) -> Batch:
    """`batch` with nothing to score, for a process that has no row of its own in a held-out batch."""
    floor = None if batch.floor_bits is None else 0.0
    return batch._replace(targets=torch.full_like(batch.targets, IGNORED), n_bytes=0, floor_bits=floor)


def next_token_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of T + 1 tokens -> ids (B, T) and targets (B, T), the same rows one token later."""
    tokens = torch.tensor(rows, dtype=torch.int64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class IndexedCorpus(Corpus):
    """A corpus whose batches are functions of their numbers."""

    @abstractmethod
    def _train_batch(self, step: int, rows: np.ndarray) -> Batch:
        """Rows `rows` of training batch number `step`."""

    @abstractmethod
    def _n_valid(self) -> int:
        """Held-out rows."""

    @abstractmethod
    def _valid_batch(self, rows: np.ndarray) -> Batch:
        """Held-out rows, by their numbers."""

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split == "train":
            return self._endless(self._train_batch, start, shard)
        if split != "valid":
            raise unknown_name("split", split, ("train", "valid"))
        return held_out_batches(self._n_valid(), self.batch_size, start, shard, self._valid_batch)

    def _endless(self, batch: Callable[[int, np.ndarray], Batch], start: int, shard: Shard) -> Iterator[Batch]:
        rows = np.array(shard_rows(self.batch_size, shard), np.int64)
        return (batch(step, rows) for step in count(start))


class RowCorpus(IndexedCorpus):
    """A corpus whose training rows are functions of their numbers, and whose batches are made as a whole.

    `_valid` holds what the held-out rows are made from, to be sliced and counted.
    """

    _valid: Any

    @abstractmethod
    def _training(self, rows: np.ndarray) -> Any:
        """What the global training rows of these numbers are made from."""

    @abstractmethod
    def _batch(self, group: Any, chosen: Sequence[int]) -> Batch:
        """Rows `chosen` of the global batch `group`, whose longest row sets the length on every shard."""

    @abstractmethod
    def _written(self, group: Any) -> Iterable[str]:
        """Each row as text, with its answer."""

    def _train_batch(self, step: int, rows: np.ndarray) -> Batch:
        return self._batch(self._training(step * self.batch_size + np.arange(self.batch_size)), rows.tolist())

    def _n_valid(self) -> int:
        return len(self._valid)

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        first = rows[0] // self.batch_size * self.batch_size
        return self._batch(self._valid[first : first + self.batch_size], (rows - first).tolist())

    def texts(self, split: Split = "train") -> Iterator[str]:
        """Each row with its answer, endless for "train"."""
        if split == "valid":
            return iter(self._written(self._valid))
        groups = (self._training(np.arange(first, first + _BLOCK)) for first in count(0, _BLOCK))
        return (text for group in groups for text in self._written(group))
