"""Documents as an endless, unshuffled stream of batches, some of which may be routed to validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from glissando.data.base import WHOLE, Batch, Corpus, Shard, Split, shard_rows, unscored
from glissando.data.corpora import DataOptions
from glissando.data.documents import Source
from glissando.data.marks import Marks
from glissando.data.order import random_below
from glissando.data.packing import Block, Mark, Rows
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import DataError

_PROMPT_TOKENS = 48


class DocumentCorpus(Corpus):
    """The documents of a source in its order, whatever the seed.

    Without `control_names` documents are joined by the end token and packed: row r of the stream reads tokens
    r T .. r T + T - 1 of `eos doc eos doc ... eos`. With them a row is one document, `eos doc eos`, with its labels,
    cut or padded to T.

    n_bytes counts a document's UTF-8 bytes, and one for its end.
    Every process reads the whole stream and takes its shard's rows of each batch.
    """

    #: what to do where there is too little text
    _advice = "Lower batch_size or seq_len."

    def __init__(self, options: DataOptions, tokenizer: Tokenizer | None, control_names: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size = options.seq_len, options.batch_size
        self.control_names = control_names
        self._rows = Rows(self.tokenizer, options.batch_size, options.seq_len, bool(control_names))

    def _read(self, name: str, train: Source, valid: Source | None, marks: str, route_every: int, routed: int) -> None:
        """Set the source and try it.

        name         of the source, in errors
        valid        what validates; None: the first `routed` of the batches that the last of every `route_every` is
        marks        what decides on the documents that `train` reads, to find batches again
        Raises DataError where there is too little to train or validate on.
        """
        self._name, self._train, self._valid = name, train, train if valid is None else valid
        self._route_every, self._n_valid = route_every if valid is None else 0, routed
        self._marks = Marks(f"{marks} {self.tokenizer.fingerprint} {self.seq_len} {self.batch_size}")
        self._require(self._train_blocks(0), "train")
        self._sample = self._require(self._valid_blocks(), "validate")

    def _require(self, blocks: Iterator[Block], purpose: str) -> Block:
        block = next(blocks, None)
        if block is None:
            every = f" (every {self._route_every}th is held out)" if self._route_every else ""
            raise DataError(
                f"{self._name} contains too little to {purpose} on: not one batch of "
                f"{self.batch_size} rows of {self.seq_len} tokens{every}. "
                f"{self._advice} {self.problems or ''}".strip()
            )
        return block

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split == "valid":
            return self._valid_batches(start, shard)
        return (batch for (batch,) in self.steps(start, [shard]))

    def steps(self, start: int, shards: Sequence[Shard]) -> Iterator[list[Batch]]:
        """As of every corpus; the source is read once for all shards."""
        rows = [np.array(shard_rows(self.batch_size, shard)) for shard in shards]
        return ([block.batch(mine) for mine in rows] for block in self._endless(start))

    def _endless(self, number: int) -> Iterator[Block]:
        """Training blocks from the number-th on, epoch after epoch."""
        while True:
            for block in self._train_blocks(number):
                yield block
                number += 1
            # The end of the source: `number` is an epoch's count of batches, or lay beyond it from the start.
            per_epoch = self._per_epoch()
            if not per_epoch or number < per_epoch:
                raise DataError(f"{self._name} has become shorter while it was read; start again")
            number %= per_epoch

    def _train_blocks(self, number: int) -> Iterator[Block]:
        """One epoch's training blocks from the number-th on; empty if it has no more."""
        every = self._route_every
        first = number + number // (every - 1) if every else number
        return (block for block in self._epoch(first) if not self._is_routed(block.mark.block))

    def _epoch(self, first: int) -> Iterator[Block]:
        """All blocks of the source from block `first` on."""
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
