"""Documents as blocks of rows: packed one after another, or one a row with its labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch
from glissando.data.documents import Document, Place, Source
from glissando.data.tokenizers import ByteTokenizer, Tokenizer

_AT_ONCE, _CHARACTERS_AT_ONCE = 16, 1 << 18


class Mark(NamedTuple):
    """Where block number `block` begins: at token `token` of the document at `place` (0: its leading eos)."""

    block: int = 0
    place: Place = Place()
    token: int = 0


class Block(NamedTuple):
    """The rows of one global batch, before they are shared out."""

    mark: Mark
    tokens: np.ndarray  # (B, T + 1)
    target_bytes: np.ndarray  # (B, T) bytes each target stands for
    scored: np.ndarray  # (B, T) bool, False at padding
    control: np.ndarray | None = None  # (B, C)

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows `rows` as a process's batch."""
        tokens, scored = self.tokens[rows].astype(np.int64), self.scored[rows]
        targets = np.where(scored, tokens[:, 1:], IGNORED)
        return Batch(
            torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            torch.from_numpy(targets),
            int(self.target_bytes[rows][scored].sum()),
            None if scored.all() else torch.from_numpy(scored),
            None if self.control is None else torch.from_numpy(self.control[rows]),
        )


class Rows(NamedTuple):
    """The shape of a block and what fills it."""

    tokenizer: Tokenizer
    batch_size: int
    seq_len: int
    labelled: bool

    def blocks(self, documents: Source, mark: Mark, *, keep_rest: bool) -> Iterator[Block]:
        """Blocks from `mark` on; the last one, if it is not full, only with `keep_rest`, and then padded."""
        make = self._labelled_blocks if self.labelled else self._packed_blocks
        return make(documents, mark, keep_rest)

    def _packed_blocks(self, documents: Source, mark: Mark, keep_rest: bool) -> Iterator[Block]:
        """Block j holds tokens j B T .. (j + 1) B T of the stream `eos doc eos doc ... eos`."""
        needed = self.batch_size * self.seq_len
        number, used = mark.block, mark.token
        held: deque[_Tokens] = deque()
        available = -used
        for piece in self._pieces(documents, mark.place):
            held.append(piece)
            available += len(piece.ids)
            while available > needed:
                yield self._packed(Mark(number, held[0].place, used), held, used, needed + 1)
                number, used, available = number + 1, used + needed, available - needed
                while used >= len(held[0].ids):
                    used -= len(held.popleft().ids)
        if keep_rest and available > 1:
            yield self._packed(Mark(number, held[0].place, used), held, used, available)

    def _pieces(self, documents: Source, place: Place) -> Iterator[_Tokens]:
        """The stream in pieces: `eos doc` for every document, and one eos at the end."""
        # Bytes gain nothing from more than one.
        at_once = 1 if isinstance(self.tokenizer, ByteTokenizer) else _AT_ONCE
        for group in _groups(documents.read(place), at_once):
            yield from self._tokens(group)
        yield _Tokens(place, np.array([self.tokenizer.eos_id], np.int32), np.ones(1, np.int32))

    def _tokens(self, documents: list[Document]) -> list[_Tokens]:
        """Of each, `eos doc` and the bytes each token stands for; an end counts as one byte, whatever it is called."""
        encoded = self.tokenizer.encode_batch([document.text for document in documents])
        return [self._measured(*each) for each in zip(documents, encoded, strict=True)]

    def _measured(self, document: Document, ids: np.ndarray) -> _Tokens:
        lengths = self.tokenizer.byte_lengths
        if lengths is not None:
            sizes = lengths[ids].astype(np.int32)
        else:
            # Shared evenly and exactly: floor((i + 1) b / n) - floor(i b / n).
            total, n = len(document.text.encode()), max(1, len(ids))
            sizes = np.diff(np.arange(len(ids) + 1, dtype=np.int64) * total // n).astype(np.int32)
        end, one = np.array([self.tokenizer.eos_id], np.int32), np.ones(1, np.int32)
        return _Tokens(document.place, np.concatenate([end, ids.astype(np.int32)]), np.concatenate([one, sizes]))

    def _packed(self, mark: Mark, held: deque[_Tokens], used: int, n: int) -> Block:
        """The `n` tokens from token `used` of `held` on as rows; the last is padded if it is not full."""
        # Cut before they are joined: a document may be many times as long as a block.
        first, *others = held
        ids = np.concatenate([first.ids[used : used + n], *(piece.ids for piece in others)])[:n]
        sizes = np.concatenate([first.sizes[used : used + n], *(piece.sizes for piece in others)])[:n]
        n_rows = -(-(n - 1) // self.seq_len)
        padded = n_rows * self.seq_len + 1
        ids = np.pad(ids, (0, padded - n), constant_values=self.tokenizer.eos_id)
        sizes = np.pad(sizes, (0, padded - n))
        index = np.arange(n_rows)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return Block(mark, ids[index], sizes[index[:, 1:]], index[:, 1:] < n)

    def _labelled_blocks(self, documents: Source, mark: Mark, keep_rest: bool) -> Iterator[Block]:
        source = documents.read(mark.place)
        number = mark.block
        while group := list(islice(source, self.batch_size)):
            if len(group) == self.batch_size or keep_rest:
                yield self._labelled(Mark(number, group[0].place), group)
            number += 1

    def _labelled(self, mark: Mark, group: list[Document]) -> Block:
        """Each row `eos doc eos`, cut or padded to T + 1 tokens."""
        width = self.seq_len + 1
        ids = np.full((len(group), width), self.tokenizer.eos_id, np.int64)
        sizes = np.zeros((len(group), width), np.int64)
        lengths = np.zeros(len(group), np.int64)
        for row, piece in enumerate(self._tokens(group)):
            length = min(len(piece.ids), width)
            ids[row, :length], sizes[row, :length] = piece.ids[:length], piece.sizes[:length]
            sizes[row, length : length + 1] = 1  # the closing eos, where it fits
            lengths[row] = min(length + 1, width)
        scored = np.arange(1, width) < lengths[:, None]
        control = np.array([document.control for document in group], np.float32)
        return Block(mark, ids, sizes[:, 1:], scored, control)


class _Tokens(NamedTuple):
    place: Place
    ids: np.ndarray  # (n,)
    sizes: np.ndarray  # (n,) bytes


def _groups(documents: Iterator[Document], at_once: int) -> Iterator[list[Document]]:
    """Documents that are tokenised at once: few enough to be held, so many that a tokenizer's threads have work."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if len(group) == at_once or size > _CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group
