"""A JSONL file as an endless, unshuffled stream of batches, some of which are routed to validation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from glissando.data.base import WHOLE, Batch, Corpus, Shard, Split, shard_rows, unscored
from glissando.data.corpora import JsonlOptions
from glissando.data.documents import Documents
from glissando.data.marks import Marks
from glissando.data.order import random_below
from glissando.data.packing import Block, Mark, Rows
from glissando.data.problems import summary_of
from glissando.data.textfile import open_file
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import DataError

_PROMPT_TOKENS = 48


class JsonlCorpus(Corpus):
    """One JSON object a line, its text in the field `text_field`, in the order of the file.

    Without `control_names` documents are joined by the end token and packed: row r of the stream reads tokens
    r T .. r T + T - 1 of `eos doc eos doc ... eos`. With them a row is one document, `eos doc eos`, with the
    labels of its `control_field` (a list in the order of the names, or an object by name), cut or padded
    to T.

    Of every `route_every` batches the last goes to validation and is never trained on; the first
    `valid_batches` of those are the held-out set. With `valid_path` all of `path` trains, and all of that
    file validates. At its end the stream starts again at the top, just as before: what is left over below a
    whole batch is dropped, so that the same batches are held out in every epoch.

    `strict`: a line that cannot be used raises DataError; otherwise it is counted in `problems`.
    n_bytes counts a document's UTF-8 bytes, and one for its end.
    Raises DataError if the file cannot be read or contains too little to train or validate on.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `JsonlOptions`. The order is the file's, whatever the seed."""
        o = JsonlOptions(**options)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size = o.seq_len, o.batch_size
        self.control_names = tuple(o.control_names)
        self._route_every = 0 if o.valid_path else o.route_every
        self._n_valid = o.valid_batches
        fields = (o.text_field, o.control_field, self.control_names, o.strict, o.max_line_bytes)
        self._train = Documents(open_file(o.path, "data.path"), *fields)
        self._valid = Documents(open_file(o.valid_path, "data.valid_path"), *fields) if o.valid_path else self._train
        self._rows = Rows(self.tokenizer, o.batch_size, o.seq_len, bool(self.control_names))
        layout = f"{self.tokenizer.fingerprint} {fields} {o.seq_len} {o.batch_size}"
        self._marks = Marks(self._train.path, layout)
        self._require(self._train_blocks(0), "train")
        self._sample = self._require(self._valid_blocks(), "validate")

    def _require(self, blocks: Iterator[Block], purpose: str) -> Block:
        block = next(blocks, None)
        if block is None:
            every = f" (every {self._route_every}th is held out)" if self._route_every else ""
            raise DataError(
                f"{self._train.path} contains too little to {purpose} on: not one batch of "
                f"{self.batch_size} rows of {self.seq_len} tokens{every}. "
                f"Lower batch_size, seq_len or route_every, or give a valid_path. {self.problems or ''}".strip()
            )
        return block

    @property
    def problems(self) -> str | None:
        """The unusable lines met so far."""
        files = [self._train] if self._valid is self._train else [self._train, self._valid]
        return summary_of(file.problems for file in files)

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        return self._train_batches(start, shard) if split == "train" else self._valid_batches(start, shard)

    def _train_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        rows = np.array(shard_rows(self.batch_size, shard))
        number = start
        while True:
            for block in self._train_blocks(number):
                yield block.batch(rows)
                number += 1
            # The end of the file: `number` is an epoch's count of batches, or lay beyond it from the start.
            per_epoch = self._per_epoch()
            if not per_epoch or number < per_epoch:
                raise DataError(f"{self._train.path} has become shorter while it was read; start again")
            number %= per_epoch

    def _train_blocks(self, number: int) -> Iterator[Block]:
        """One epoch's training blocks from the number-th on; empty if it has no more."""
        every = self._route_every
        first = number + number // (every - 1) if every else number
        return (block for block in self._epoch(first) if not self._is_routed(block.mark.block))

    def _epoch(self, first: int) -> Iterator[Block]:
        """All blocks of the file from block `first` on."""
        mark = self._marks.before(first)
        following = mark.block
        for block in self._rows.blocks(self._train, mark, keep_rest=False):
            self._marks.passed(block.mark)
            following = block.mark.block + 1
            if block.mark.block >= first:
                yield block
        self._marks.ended(following)

    def _per_epoch(self) -> int:
        total = self._marks.n_blocks or 0
        return total - (total // self._route_every if self._route_every else 0)

    def _is_routed(self, block: int) -> bool:
        return bool(self._route_every) and block % self._route_every == self._route_every - 1

    def _valid_blocks(self) -> Iterator[Block]:
        if self._valid is not self._train:
            return self._rows.blocks(self._valid, Mark(), keep_rest=True)
        routed = (block for block in self._epoch(0) if self._is_routed(block.mark.block))
        return islice(routed, self._n_valid)

    def _valid_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        for block in islice(self._valid_blocks(), start, None):
            rows = np.arange(shard.rank, len(block.tokens), shard.world)
            yield block.batch(rows) if rows.size else unscored(block.batch(np.array([0])))

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Beginnings of held-out documents where a row has one, else of held-out rows; 48 tokens at most."""
        rows = random_below(len(self._sample.tokens), seed, np.arange(n))
        return [self._beginning(self._sample.tokens[row]) for row in rows]

    def _beginning(self, row: np.ndarray) -> str:
        ends = np.flatnonzero(row[: -_PROMPT_TOKENS // 2] == self.tokenizer.eos_id)
        tokens = row[ends[0] + 1 :] if ends.size else row
        ids = [int(i) for i in tokens[:_PROMPT_TOKENS]]
        if self.tokenizer.eos_id in ids:
            ids = ids[: ids.index(self.tokenizer.eos_id)]
        text = self.tokenizer.decode(ids).strip("\ufffd").strip()
        return text.rpartition(" ")[0] or text

    def texts(self, split: Split = "train") -> Iterator[str]:
        """One epoch's text."""
        for block in self._train_blocks(0) if split == "train" else self._valid_blocks():
            for row, scored in zip(block.tokens, block.scored, strict=True):
                yield self.tokenizer.decode([int(i) for i in row[1:][scored] if i != self.tokenizer.eos_id])

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "path": str(self._train.path),
            "valid_path": str(self._valid.path),
            "held_out": f"batch {self._route_every} of every {self._route_every}"
            if self._route_every
            else "valid_path",
            "problems": self.problems,
        }
