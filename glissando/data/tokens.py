"""Token files: a text is converted once, and every row is then cut out of it by arithmetic."""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from glissando.cache_directory import cache_dir
from glissando.data.base import IGNORED, Batch
from glissando.data.tokenizers import Tokenizer
from glissando.storage import kept

# Part of every key: raised when the way a text is cut into pieces, or what a file holds, changes.
_FORMAT = 4
_PIECES_AT_ONCE, _CHARACTERS_AT_ONCE = 32, 1 << 21
_FAR = np.iinfo(np.int64).max


class Piece(NamedTuple):
    """A part of a document that is tokenised by itself."""

    text: str
    begins: bool = True  # whether it is the first of its document
    labels: list[float] | None = None


class Source(Protocol):
    """Documents in their order."""

    def key(self) -> str:
        """What decides on the documents."""

    def pieces(self, notes: list[Any]) -> Iterator[Piece]:
        """The documents' pieces; what reading them finds out is added to `notes`, as JSON."""


class Tokens(NamedTuple):
    """N tokens of D documents, `eos document eos document ... eos`.

    ids     (N,) the tokens
    ends    (D + 1,) the places of the end tokens that are not part of a document
    bytes   (D + 1,) the UTF-8 bytes before each of them; an end counts as one
    labels  (D, C) float32; C is 0 without labels
    notes   what reading the documents found out
    """

    tokenizer: Tokenizer
    ids: np.ndarray
    ends: np.ndarray
    bytes: np.ndarray
    labels: np.ndarray
    notes: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def batch(
        self,
        first: np.ndarray,
        length: int,
        *,
        stop: int | np.ndarray = _FAR,
        labels: np.ndarray | None = None,
    ) -> Batch:
        """Rows that read the tokens from each of `first` on and are scored on those before `stop`."""
        stop = np.minimum(stop, len(self))
        places = first[:, None] + np.arange(length + 1)
        inside = places < np.broadcast_to(stop, first.shape)[:, None]
        tokens = self.ids[np.minimum(places, len(self) - 1)].astype(np.int64)
        for table in (self.ids, self.ends, self.bytes):
            if isinstance(table, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
                # Pages that were read would count as this process's memory, up to all of the file; they stay cached.
                table._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        real = inside[:, 1:]
        ids, targets = np.where(inside, tokens, self.tokenizer.eos_id)[:, :-1], np.where(real, tokens[:, 1:], IGNORED)
        span = first + 1, np.minimum(first + 1 + length, stop)
        return Batch(
            torch.from_numpy(np.ascontiguousarray(ids)),
            torch.from_numpy(targets),
            self.n_bytes(targets[real], *span),
            None if real.all() else torch.from_numpy(real),
            None if labels is None else torch.from_numpy(labels),
        )

    def n_bytes(self, targets: np.ndarray, first: np.ndarray, stop: np.ndarray) -> int:
        """Bytes that `targets` stand for, which are the tokens in [first, stop) of every row.

        Exact where an id's bytes are known (bytes, byte-level BPE); otherwise the n tokens of a document share its b
        bytes: token i of them counts floor((i + 1) b / n) - floor(i b / n), which is exact over the whole document.
        """
        lengths = self.tokenizer.byte_lengths
        if lengths is None:
            return int((self._bytes_before(stop) - self._bytes_before(first)).sum())
        # An end between two documents counts as one byte, whatever its token is called.
        n_ends = np.searchsorted(self.ends, stop) - np.searchsorted(self.ends, first)
        return int(lengths[targets].sum() - n_ends.sum() * (lengths[self.tokenizer.eos_id] - 1))

    def _bytes_before(self, places: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.ends, places, side="right") - 1  # the last end at or before each place
        behind = np.minimum(at + 1, len(self.ends) - 1)
        inside, n_tokens = places - self.ends[at] - 1, np.maximum(self.ends[behind] - self.ends[at] - 1, 1)
        size = self.bytes[behind] - self.bytes[at] - 1
        return self.bytes[at] + np.where(inside < 0, 0, 1 + inside * size // n_tokens)


def tokenise(pieces: Iterable[Piece], tokenizer: Tokenizer, write: Any) -> tuple[array[int], array[int], array[float]]:
    """Gives each piece's tokens to `write`; returns the ends, the bytes before them and the labels of `Tokens`."""
    ends, before, labels, length, n_bytes = array("q"), array("q"), array("f"), 0, 0
    eos = np.array([tokenizer.eos_id])
    for group in _groups(pieces):
        for piece, ids in zip(group, tokenizer.encode_batch([piece.text for piece in group]), strict=True):
            if piece.begins:
                ends.append(length)
                before.append(n_bytes)
                labels.extend(piece.labels or ())
                write(eos)
            write(ids)
            length += piece.begins + len(ids)
            n_bytes += piece.begins + len(piece.text.encode())
    ends.append(length)
    before.append(n_bytes)
    write(eos)
    return ends, before, labels


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are tokenised at once: few enough for memory, so many that a tokenizer's threads have work."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if len(group) == _PIECES_AT_ONCE or size > _CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def in_memory(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Tokens:
    """The tokens of documents that are few."""
    ids: list[np.ndarray] = []
    ends, before, _ = tokenise(pieces, tokenizer, ids.append)
    return Tokens(tokenizer, np.concatenate(ids), np.array(ends), np.array(before), np.empty((len(ends) - 1, 0)))


def token_file(source: Source, tokenizer: Tokenizer) -> Tokens:
    """The tokens of `source`, memory-mapped from files in the cache directory that are made once per content and
    tokenizer. Raises as `kept`."""
    dtype = np.dtype(np.uint8 if tokenizer.vocab_size <= 1 << 8 else np.uint16)
    dtype = dtype if tokenizer.vocab_size <= 1 << 16 else np.dtype(np.uint32)

    def convert(folder: Path) -> None:
        notes: list[Any] = []
        with (folder / "ids").open("wb") as file:
            tables: tuple[array[Any], ...] = tokenise(
                source.pieces(notes), tokenizer, lambda ids: file.write(np.ascontiguousarray(ids, dtype).data)
            )
        for name, table in zip(("ends", "bytes", "labels"), tables, strict=True):
            (folder / name).write_bytes(table)
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")

    key = hashlib.sha256(f"{_FORMAT} {source.key()} {tokenizer.fingerprint}".encode()).hexdigest()
    folder = kept(cache_dir("tokens") / key, convert)
    notes = json.loads((folder / "notes.json").read_bytes())
    ids, ends, before, labels = (
        np.memmap(folder / name, kind, "r") if (folder / name).stat().st_size else np.empty(0, kind)
        for name, kind in (("ids", dtype), ("ends", np.int64), ("bytes", np.int64), ("labels", np.float32))
    )
    return Tokens(tokenizer, ids, ends, before, labels.reshape(len(ends) - 1, -1 if len(labels) else 0), notes)
