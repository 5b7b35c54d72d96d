"""Local text files as batches of windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glissando.data.base import WHOLE, Batch, Corpus, Shard, Split, held_out_batches, shard_rows
from glissando.data.corpora import TextOptions
from glissando.data.order import random_below, shuffled
from glissando.data.textfile import TextFile, check_text, open_files
from glissando.data.tokenizers import END_OF_TEXT, ByteTokenizer, Tokenizer
from glissando.data.tokens import Piece, Tokens, token_file
from glissando.errors import DataError

_PROMPT_BYTES = 48
_PROMPT_REACH = 4096
_PIECE_BYTES = 1 << 16
_LANES = 64  # lanes at least: rows of fewer come from few places of the text, and their gradients resemble each other


class TextCorpus(Corpus):
    """Windows of `seq_len` tokens of the file at `path`, or of all files that match it as a pattern.

    Files are joined in the order of their names, with one end-of-document id between two of them, which counts as a
    byte. A window may cross from one into the next.

    A window at token o reads tokens o - 1 .. o + T - 2 and predicts tokens o .. o + T - 1; before token 0 the
    model reads the end-of-document id, so that every token can be scored.

    Training windows: at offsets drawn uniformly for each (seed, row number) if `stride` is None, else at
    multiples of `stride`, each visited once an epoch in an order shuffled by (seed, epoch). Lanes read on instead.
    Held-out text: the files at `valid_path`, or the last `valid_fraction` of the joined text (from a character's
    start on), at most its first `max_valid_bytes`. Its windows follow each other; the
    last one is padded on the right, with a mask.
    `ascii_only`: every other byte is dropped, whatever the encoding, before windows are cut.

    Raises DataError (path, position and fix) for a file that is missing, empty or not text, and for one shorter
    than a window when it shall train; ConfigError for options that make no sense.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `TextOptions`."""
        o = TextOptions(**options)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        self._stride = o.stride
        whole = _source(o.path, "data.path", o)
        self.path = Path(str(o.path)).expanduser()
        if o.valid_path is None:
            self.valid_path = self.path
            train = whole.part(0, int(len(whole) * (1 - o.valid_fraction)))
            valid = whole.part(len(train), len(whole))
        else:
            self.valid_path = Path(o.valid_path).expanduser()
            train, valid = whole, _source(o.valid_path, "data.valid_path", o)
        if o.max_valid_bytes is not None:
            valid = valid.part(0, o.max_valid_bytes)
        self._sources: dict[Split, TextSource] = {"train": train, "valid": valid}

    @cached_property
    def _train(self) -> Tokens:
        return token_file(self._sources["train"], self.tokenizer)

    @cached_property
    def _valid(self) -> Tokens:
        tokens = token_file(self._sources["valid"], self.tokenizer)
        if _size(tokens) <= 0:
            raise DataError(
                f"{self.valid_path} leaves no text to validate on; raise valid_fraction or "
                "max_valid_bytes, or give a valid_path"
            )
        return tokens

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split == "valid":
            return self._valid_batches(start, shard)
        _ = self._valid  # what is missing in it is found before training begins
        self._require_window()
        return self._train_batches(start, shard)

    def _require_window(self) -> None:
        if _size(self._train) < self.seq_len:
            raise DataError(
                f"{self.path} has {max(_size(self._train), 0)} tokens to train on, less than one window of "
                f"{self.seq_len}; lower data.seq_len or give a longer file"
            )

    @property
    def epoch_rows(self) -> int:
        """All windows at multiples of `stride`; of random windows as many as hold the text's number of tokens."""
        tokens = _size(self._train)
        if self._stride is None:
            return max(1, -(-tokens // self.seq_len))
        return max(0, tokens - self.seq_len) // self._stride + 1

    def _train_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        rows = np.array(shard_rows(self.batch_size, shard), np.int64)
        free = _size(self._train) - self.seq_len
        for step in count(start):
            numbers = step * self.batch_size + rows
            if self._stride is None:
                first = random_below(free + 1, self._seed, numbers)
            else:
                first = self._stride * shuffled(numbers, free // self._stride + 1, self._seed)
            yield self._train.batch(first, self.seq_len)

    @property
    def turns(self) -> int:
        """So many that there are `_LANES` lanes, fewer where the text has no window for each."""
        return max(1, min(-(-_LANES // self.batch_size), _size(self._train) // (self.seq_len * self.batch_size)))

    def lanes(self, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Lane r of R = turns * batch_size begins at window N r / R of the N that follow each other in the text, and
        reads on in a circle, each round from another token on; fresh where the text begins. The lanes of a batch are
        drawn from all."""
        _, rows = self._valid, np.array(shard_rows(self.batch_size, shard), np.int64)
        self._require_window()
        total, turns = self.turns * self.batch_size, self.turns
        number, spare = divmod(_size(self._train), self.seq_len)
        for step in count(start):
            lanes = shuffled(step % turns * self.batch_size + rows, total, self._seed)
            circle, place = np.divmod(step // turns + lanes * number // total, number)
            first = place * self.seq_len + random_below(spare + 1, self._seed, circle)
            yield self._train.batch(first, self.seq_len)._replace(fresh=torch.from_numpy(place == 0))

    def _valid_batches(self, start: int, shard: Shard) -> Iterator[Batch]:
        """Window k predicts tokens from k * seq_len on."""
        size, length, tokens = _size(self._valid), self.seq_len, self._valid
        return held_out_batches(
            -(-size // length), self.batch_size, start, shard,
            lambda rows: tokens.batch(rows * length, length, stop=1 + size),
        )  # fmt: skip

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Beginnings of held-out lines, of about 48 bytes."""
        starts = random_below(_size(self._valid), seed, np.arange(n))
        return [self._line_beginning(int(start)) for start in starts]

    def _line_beginning(self, start: int) -> str:
        """The first words of the first line with text after token `start`, or of the held-out text.

        A line that only ends a document, as between those of TinyStories, is nothing to go on from.
        """
        decode, ids = self.tokenizer.decode, self._valid.ids[:-1]
        for first in (start + 1, 1):
            text = decode(ids[first : first + _PROMPT_REACH].tolist()).replace("\ufffd", "")
            lines = text.replace(decode([self.tokenizer.eos_id]), "\n").split("\n")
            whole = lines if first == 1 else lines[1:] or [text.partition(" ")[2]]
            for raw in map(str.encode, whole):
                line = raw[:_PROMPT_BYTES].decode("utf-8", "ignore").strip()
                if line and line != END_OF_TEXT:
                    return line if len(raw) <= _PROMPT_BYTES else line.rpartition(" ")[0] or line
        return decode(ids[1 : _PROMPT_BYTES + 1].tolist())

    def texts(self, split: Split = "train") -> Iterator[str]:
        return (piece.text for piece in self._sources[split].pieces(raw=False))


class TextSource:
    """The bytes [start, stop) of text files, a document each, joined with a byte between each two."""

    def __init__(self, files: Sequence[TextFile], ascii_only: bool, start: int = 0, stop: int | None = None) -> None:
        self._files, self._ascii_only = files, ascii_only
        self._start = self._stop = start
        first, self._parts = 0, list[tuple[TextFile, int, int]]()
        for file in files:
            span = max(start - first, 0), file.size if stop is None else min(stop - first, file.size)
            if span[0] < span[1]:
                self._parts.append((file, *span))
                # An end between two files never stands at the beginning or at the end.
                self._start = first + span[0] if len(self._parts) == 1 else self._start
                self._stop = first + span[1]
            first += file.size + 1

    def __len__(self) -> int:
        """Bytes, with one between each two files."""
        return self._stop - self._start

    def part(self, start: int, stop: int) -> TextSource:
        """The bytes from `start` to the character that byte `stop` belongs to."""
        stop = self._character_start(stop)
        return TextSource(self._files, self._ascii_only, self._start + start, self._start + stop)

    def _character_start(self, position: int) -> int:
        if position >= len(self):
            return len(self)
        for file, start, stop in TextSource(self._files, False, self._start, self._start + position + 1)._parts[-1:]:
            with file.path.open("rb") as opened:
                opened.seek(first := max(stop - 4, start))
                near = opened.read(stop - first)
            return position + 1 - len(near) + _last_start(near)
        return position

    def key(self) -> str:
        parts = (f"{file.sha256} {start} {stop}" for file, start, stop in self._parts)
        return f"text {self._ascii_only} {' '.join(parts)}"

    def pieces(self, *, raw: bool, piece_bytes: int = _PIECE_BYTES) -> Iterator[Piece]:
        """About `piece_bytes` each, cut after a newline where there is one.

        Without `raw`, bytes that are not UTF-8 are left out, and with `ascii_only` all others than ASCII.
        Raises DataError for a file that has changed.
        """
        encoding = "ascii" if self._ascii_only else "utf-8"
        errors = "surrogateescape" if raw and not self._ascii_only else "ignore"
        for file, start, stop in self._parts:
            with file.opened() as opened:
                opened.seek(at := start)
                while at < stop:
                    data = opened.read(min(piece_bytes + 1, stop - at))
                    if len(data) > piece_bytes:
                        data = data[: data.rfind(b"\n", 0, piece_bytes) + 1 or _last_start(data)]
                        opened.seek(at + len(data))
                    yield Piece(data.decode(encoding, errors), begins=at == start)
                    at += len(data)

    def notes(self) -> list[Any]:
        return []

    def note(self, notes: list[Any]) -> None:
        pass


def _last_start(data: bytes) -> int:
    """Where the last UTF-8 character of `data` starts."""
    last = len(data) - 1
    return next((i for i in range(last, max(last - 4, -1), -1) if data[i] & 0xC0 != 0x80), last)


def _source(path: str | None, option: str, o: TextOptions) -> TextSource:
    files = open_files(path, option, "*.txt")
    return TextSource([check_text(file, is_utf8=not o.ascii_only) for file in files], o.ascii_only)


def _size(tokens: Tokens) -> int:
    """The number of tokens to predict: without the end before them and the one behind."""
    return len(tokens) - 2
