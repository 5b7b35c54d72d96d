"""Local text files as batches of windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glissando.data.base import WHOLE, Batch, IndexedCorpus, Shard, Split
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


class TextCorpus(IndexedCorpus):
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

        def source(path: str | None, option: str) -> TextSource:
            files = (check_text(file, is_utf8=not o.ascii_only) for file in open_files(path, option))
            return TextSource([(file, 0, file.size) for file in files], o.ascii_only)

        whole = source(o.path, "data.path")
        self.path = Path(str(o.path)).expanduser()
        if o.valid_path is None:
            self.valid_path = self.path
            train, valid = whole.split(int(len(whole) * (1 - o.valid_fraction)))
        else:
            self.valid_path = Path(o.valid_path).expanduser()
            train, valid = whole, source(o.valid_path, "data.valid_path")
        if o.max_valid_bytes is not None:
            valid, _ = valid.split(o.max_valid_bytes)
        self._sources: dict[Split, TextSource] = {"train": train, "valid": valid}

    @cached_property
    def _train(self) -> Tokens:
        _ = self._valid  # what is missing in it is found before training begins
        tokens = token_file(self._sources["train"], self.tokenizer)
        if _size(tokens) < self.seq_len:
            raise DataError(
                f"{self.path} has {max(_size(tokens), 0)} tokens to train on, less than one window of {self.seq_len}; "
                "lower data.seq_len or give a longer file"
            )
        return tokens

    @cached_property
    def _valid(self) -> Tokens:
        tokens = token_file(self._sources["valid"], self.tokenizer)
        if _size(tokens) <= 0:
            raise DataError(
                f"{self.valid_path} leaves no text to validate on; raise valid_fraction or "
                "max_valid_bytes, or give a valid_path"
            )
        return tokens

    @property
    def epoch_rows(self) -> int:
        """All windows at multiples of `stride`; of random windows as many as hold the text's number of tokens."""
        tokens = _size(self._train)
        if self._stride is None:
            return -(-tokens // self.seq_len)
        return (tokens - self.seq_len) // self._stride + 1

    def _train_batch(self, step: int, rows: np.ndarray) -> Batch:
        numbers = step * self.batch_size + rows
        if self._stride is None:
            first = random_below(_size(self._train) - self.seq_len + 1, self._seed, numbers)
        else:
            first = self._stride * shuffled(numbers, self.epoch_rows, self._seed)
        return self._train.batch(first, self.seq_len)

    @property
    def turns(self) -> int:
        """So many that there are `_LANES` lanes, fewer where the text has no window for each."""
        return max(1, min(-(-_LANES // self.batch_size), _size(self._train) // (self.seq_len * self.batch_size)))

    def lanes(self, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Lane r of R = turns * batch_size begins at window N r / R of the N that follow each other in the text, and
        reads on in a circle, each round from another token on; fresh where the text begins. The lanes of a batch are
        drawn from all."""
        return self._endless(self._lane_batch, start, shard)

    def _lane_batch(self, step: int, rows: np.ndarray) -> Batch:
        total, turns = self.turns * self.batch_size, self.turns
        number, spare = divmod(_size(self._train), self.seq_len)
        lanes = shuffled(step % turns * self.batch_size + rows, total, self._seed)
        circle, place = np.divmod(step // turns + lanes * number // total, number)
        first = place * self.seq_len + random_below(spare + 1, self._seed, circle)
        return self._train.batch(first, self.seq_len)._replace(fresh=torch.from_numpy(place == 0))

    def _n_valid(self) -> int:
        return -(-_size(self._valid) // self.seq_len)

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        return self._valid.batch(rows * self.seq_len, self.seq_len, stop=1 + _size(self._valid))

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
        return (piece.text for piece in self._sources[split].pieces())


@dataclass
class TextSource:
    """Parts of text files, a document each, joined with a byte between each two.

    parts       file, its first byte and the one behind its last
    ascii_only  whether every other byte is left out
    """

    parts: list[tuple[TextFile, int, int]]
    ascii_only: bool = False

    def __len__(self) -> int:
        """Bytes, with one between each two files."""
        return max(0, sum(stop - start + 1 for _, start, stop in self.parts) - 1)

    def split(self, position: int) -> tuple[TextSource, TextSource]:
        """What is before the character that byte `position` belongs to, and the rest; a byte between two files that
        would stand at an end belongs to neither."""
        before, after = TextSource([], self.ascii_only), TextSource([], self.ascii_only)
        for file, start, stop in self.parts:
            cut = min(max(start, start + position), stop)
            if start < cut < stop:
                with file.path.open("rb") as opened:
                    opened.seek(first := max(cut - 3, start))
                    cut = first + _last_start(opened.read(cut + 1 - first))
            before.parts += [(file, start, cut)] if start < cut else []
            after.parts += [(file, cut, stop)] if cut < stop else []
            position -= stop - start + 1
        return before, after

    def key(self) -> str:
        parts = (f"{file.sha256} {start} {stop}" for file, start, stop in self.parts)
        return f"text {self.ascii_only} {' '.join(parts)}"

    def pieces(self, notes: Sequence[Any] = (), piece_bytes: int = _PIECE_BYTES) -> Iterator[Piece]:
        """About `piece_bytes` each, cut after a newline where there is one. Raises DataError for a file that has
        changed."""
        for file, start, stop in self.parts:
            with file.opened() as opened:
                opened.seek(at := start)
                # A file that was cut off ends early, which `opened` refuses then.
                while data := opened.read(min(piece_bytes + 1, stop - at)):
                    if len(data) > piece_bytes:
                        data = data[: data.rfind(b"\n", 0, piece_bytes) + 1 or _last_start(data)]
                        opened.seek(at + len(data))
                    text = data.decode("ascii" if self.ascii_only else "utf-8", "ignore")
                    yield Piece(text, begins=at == start)
                    at += len(data)


def _last_start(data: bytes) -> int:
    """Where the last UTF-8 character of `data` starts."""
    last = len(data) - 1
    return next((i for i in range(last, max(last - 4, -1), -1) if data[i] & 0xC0 != 0x80), last)


def _size(tokens: Tokens) -> int:
    """The number of tokens to predict: without the end before them and the one behind."""
    return len(tokens) - 2
