"""Local text files as batches of windows, read from the disk as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glissando.data.base import IGNORED, WHOLE, Batch, Corpus, Shard, Split, held_out_rows, shard_rows, unscored
from glissando.data.cache import token_file
from glissando.data.corpora import TextOptions
from glissando.data.joined import Joined
from glissando.data.order import random_below, shuffled
from glissando.data.textfile import EncodingErrors, FileArray, character_start, check_text, open_files
from glissando.data.tokenizers import END_OF_TEXT, ByteTokenizer, Tokenizer
from glissando.errors import ConfigError, DataError

_SPACE = 32
_PROMPT_BYTES = 48
_PROMPT_REACH = 4096


class TextCorpus(Corpus):
    """Windows of `seq_len` tokens of the file at `path`, or of all files that match it as a pattern.

    Files are joined in the order of their names, with one end-of-document id between two of them, which counts as a
    byte. A window may cross from one into the next.

    A window at token o reads tokens o - 1 .. o + T - 2 and predicts tokens o .. o + T - 1; before token 0 the
    model reads the end-of-document id, so that every token can be scored.

    Training windows: at offsets drawn uniformly for each (seed, row number) if `stride` is None, else at
    multiples of `stride`, each visited once an epoch in an order shuffled by (seed, epoch).
    Held-out text: the files at `valid_path`, or the last `valid_fraction` of the joined text (from a character's
    start on), at most its first `max_valid_bytes`. Its windows start `eval_stride` tokens apart
    (default: seq_len); each token is scored once, after at least seq_len - eval_stride tokens of context
    but for those of the first window. The last window is padded on the right, with a mask.
    `ascii_only`: every other byte is dropped; a training window of bytes that is left short is filled up
    with spaces that are not scored.
    `encoding_errors`: "strict" refuses a file that is not UTF-8; "ignore" trains a byte tokenizer on the
    bytes as they are and leaves them out for any other tokenizer.

    n_bytes is exact where an id's bytes are known (bytes, byte-level BPE). Otherwise token i of N counts
    floor((i + 1) R) - floor(i R) bytes, R being the text's exact bytes per token: exact over the whole text.

    Raises DataError (path, position and fix) for a file that is missing, empty or not text, and for one shorter
    than a window when it shall train; ConfigError for options that make no sense.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `TextOptions`."""
        o = TextOptions(**options)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        self._stride, self._eval_stride = o.stride, o.eval_stride or o.seq_len
        if self._eval_stride > o.seq_len:
            raise ConfigError(f"eval_stride {o.eval_stride} is above seq_len {o.seq_len}: some text would be skipped")
        self._ascii_only = o.ascii_only
        whole = self._joined(o.path, "data.path", o.encoding_errors)
        self.path = Path(str(o.path)).expanduser()
        if o.valid_path is None:
            self.valid_path = self.path
            split = character_start(whole, int(len(whole) * (1 - o.valid_fraction)))
            self._train_bytes, self._valid_bytes = whole.part(0, split), whole.part(split)
        else:
            self.valid_path = Path(o.valid_path).expanduser()
            self._train_bytes = whole
            self._valid_bytes = self._joined(o.valid_path, "data.valid_path", o.encoding_errors)
        if o.max_valid_bytes is not None:
            self._valid_bytes = self._valid_bytes.part(0, character_start(self._valid_bytes, o.max_valid_bytes))
        self._train = _Tokens(self._train_bytes, self.tokenizer, o.ascii_only, filter_bytes=False)
        self._valid = _Tokens(self._valid_bytes, self.tokenizer, o.ascii_only, filter_bytes=True)
        if not len(self._valid.ids):
            raise DataError(
                f"{self.valid_path} leaves no text to validate on; raise valid_fraction or "
                "max_valid_bytes, or give a valid_path"
            )

    def _joined(self, path: str | None, option: str, errors: EncodingErrors) -> Joined:
        files = open_files(path, option, "*.txt")
        # A NUL byte is refused in texts, so that the end of a file is no part of one.
        end = self.tokenizer.eos_id if isinstance(self.tokenizer, ByteTokenizer) else 0
        return Joined([FileArray(each, digest=check_text(each, errors)) for each in files], end)

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split == "valid":
            return self._valid_batches(start, shard)
        if len(self._train.ids) < self.seq_len:
            raise DataError(
                f"{self.path} has {len(self._train.ids)} tokens to train on, less than one window of "
                f"{self.seq_len}; lower data.seq_len or give a longer file"
            )
        return self._train_batches(start, shard)

    @property
    def epoch_rows(self) -> int:
        """All windows at multiples of `stride`; of random windows as many as hold the text's number of tokens."""
        tokens = len(self._train.ids)
        if self._stride is None:
            return max(1, -(-tokens // self.seq_len))
        return max(0, tokens - self.seq_len) // self._stride + 1

    def _train_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        rows = np.array(shard_rows(self.batch_size, shard), np.int64)
        for step in count(start):
            yield self._train_batch(self._offsets(step * self.batch_size + rows))

    def _offsets(self, rows: np.ndarray) -> np.ndarray:
        """(B,) first target of each global row."""
        free = len(self._train.ids) - self.seq_len
        if self._stride is None:
            return random_below(free + 1, self._seed, rows)
        return self._stride * shuffled(rows, free // self._stride + 1, self._seed)

    def _train_batch(self, offsets: np.ndarray) -> Batch:
        tokens = self._train.windows(offsets, self.seq_len)
        if self._ascii_only and self._train.are_bytes:
            return _ascii_batch(tokens)
        targets = tokens[:, 1:]
        n_bytes = self._train.n_bytes(targets, offsets, offsets + self.seq_len)
        return Batch(_tensor(tokens[:, :-1]), _tensor(targets), n_bytes)

    def _valid_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        beyond = max(0, len(self._valid.ids) - self.seq_len)
        n_windows = 1 + -(-beyond // self._eval_stride)
        for rows, scored in held_out_rows(n_windows, self.batch_size, start, shard):
            batch = self._valid_batch(rows)
            yield batch if scored else unscored(batch)

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        """Window k predicts tokens from k * eval_stride on, and is scored on those of no window before it."""
        length = len(self._valid.ids)
        first = rows * self._eval_stride
        end = np.minimum(first + self.seq_len, length)
        scored_from = np.where(rows == 0, 0, first - self._eval_stride + self.seq_len)
        position = first[:, None] + np.arange(self.seq_len)
        real = position < end[:, None]
        tokens = self._valid.windows(first, self.seq_len)
        scored = real & (position >= scored_from[:, None])
        targets = np.where(scored, tokens[:, 1:], IGNORED)
        n_bytes = self._valid.n_bytes(targets[scored], scored_from, end)
        mask = None if real.all() else torch.from_numpy(real)
        return Batch(_tensor(tokens[:, :-1]), _tensor(targets), n_bytes, mask)

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Beginnings of held-out lines, of about 48 bytes."""
        starts = random_below(len(self._valid_bytes), seed, np.arange(n))
        return [self._line_beginning(int(start)) for start in starts]

    def _line_beginning(self, start: int) -> str:
        """The first words of the first line with text after byte `start`, or of the held-out text.

        A line that only ends a document, as between those of TinyStories, is nothing to go on from.
        """
        for origin in (start, 0):
            near = self._valid_bytes[origin : origin + _PROMPT_REACH].tobytes()
            lines = near.replace(b"\0", b"\n").split(b"\n")[1 if origin else 0 :]
            for raw in lines:
                line = raw[:_PROMPT_BYTES].decode("ascii" if self._ascii_only else "utf-8", "ignore").strip()
                if line and line != END_OF_TEXT:
                    return line if len(raw) <= _PROMPT_BYTES else line.rpartition(" ")[0] or line
        return self.tokenizer.decode(self._valid.ids[:_PROMPT_BYTES].tolist())

    def texts(self, split: Split = "train") -> Iterator[str]:
        text = self._train_bytes if split == "train" else self._valid_bytes
        return text.pieces(ascii_only=self._ascii_only)

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "path": str(self.path),
            "valid_path": str(self.valid_path),
            "train_bytes": len(self._train_bytes),
            "valid_bytes": len(self._valid_bytes),
            "train_tokens": len(self._train.ids),
            "valid_tokens": len(self._valid.ids),
        }


class _Tokens:
    """A text's tokens (N,), in a file, with what each stands for in bytes."""

    def __init__(self, data: Joined, tokenizer: Tokenizer, ascii_only: bool, *, filter_bytes: bool) -> None:
        self.are_bytes = isinstance(tokenizer, ByteTokenizer)
        self._eos_id = tokenizer.eos_id
        self._lengths = None if self.are_bytes else tokenizer.byte_lengths
        self._total_bytes = 0
        if not self.are_bytes and self._lengths is None:
            # Without lengths of their own, tokens share the bytes of the text that they are of evenly.
            texts = data.pieces(ascii_only=ascii_only)
            self._total_bytes = sum(len(text.encode()) for text in texts) + len(data.parts) - 1
        self.ids: FileArray | Joined = data
        self._ends = np.empty(0, np.int64)
        if not self.are_bytes or (ascii_only and filter_bytes):
            self.ids, self._ends = token_file(data, tokenizer, ascii_only=ascii_only)

    def windows(self, first: np.ndarray, length: int) -> np.ndarray:
        """(B, length + 1) int64: tokens first - 1 .. first + length - 1; the end id outside the text."""
        begins = np.maximum(first - 1, 0)
        found = self.ids.rows(begins, length + 1)
        tokens = np.full((len(first), length + 1), self._eos_id, np.int64)
        for row, shift, ids in zip(tokens, begins - first + 1, found, strict=True):
            row[shift : shift + len(ids)] = ids[: len(row) - shift]
        return tokens

    def n_bytes(self, targets: np.ndarray, first: np.ndarray, end: np.ndarray) -> int:
        """Bytes of `targets`, which are the tokens in [first, end) of every row."""
        if self.are_bytes:
            return targets.size
        if self._lengths is not None:
            # An end between two files counts as one byte, whatever its token is called.
            n_ends = np.searchsorted(self._ends, end) - np.searchsorted(self._ends, first)
            return int(self._lengths[targets].sum() - n_ends.sum() * (self._lengths[self._eos_id] - 1))
        before = [int(i) * self._total_bytes // len(self.ids) for i in (*first, *end)]
        return sum(before[len(first) :]) - sum(before[: len(first)])


def _ascii_batch(windows: np.ndarray) -> Batch:
    """Windows (B, T + 1) of bytes with all but ASCII dropped, filled up with spaces that are not scored."""
    keep = windows < 128
    if keep.all():
        return Batch(_tensor(windows[:, :-1]), _tensor(windows[:, 1:]), windows[:, 1:].size)
    # A stable sort of the drop flags moves what is kept to the front, in order.
    order = np.argsort(~keep, axis=1, kind="stable")
    kept = np.arange(windows.shape[1]) < keep.sum(axis=1, keepdims=True)
    windows = np.where(kept, np.take_along_axis(windows, order, axis=1), _SPACE)
    scored = kept[:, 1:]
    return Batch(_tensor(windows[:, :-1]), _tensor(np.where(scored, windows[:, 1:], IGNORED)), int(scored.sum()))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
