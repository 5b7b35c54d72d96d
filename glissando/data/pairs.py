"""Pairs `input TAB output NEWLINE`, of which only the output is scored: from a file, or by a rule."""

from __future__ import annotations

import base64
import binascii
import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, RowCorpus
from glissando.data.corpora import DataOptions, PairsOptions, ShiftOptions
from glissando.data.drawn import Draw, Source, is_held_out
from glissando.data.order import random_below, shuffled
from glissando.data.textfile import BadLine, Problems, open_files, parsed_lines, summary_of
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import ConfigError, DataError

_log = logging.getLogger(__name__)
PAD_ID = 0
NEWLINE = 10
FIRST, LAST = 32, 126  # the printable ASCII characters
PRINTABLE = LAST - FIRST + 1
_MAX_LINE = 1 << 16

# Keys of independent random streams.
_LENGTHS, _CHARACTERS, ANSWERS, _, _TRAINING, _HELD_OUT = range(6)  # 3 is that of the split


class Pair(NamedTuple):
    """A question and its answer."""

    input: str
    output: str


def shift(text: str, by: int = 1) -> str:
    """Every printable ASCII character moved `by` places, wrapping from 126 to 32; others stay."""
    return "".join(chr((ord(c) - FIRST + by) % PRINTABLE + FIRST) if FIRST <= ord(c) <= LAST else c for c in text)


class PairsCorpus(RowCorpus):
    """Rows `eos input TAB output eos`; the end token is a newline for bytes.

    Targets are IGNORED up to the tab, so that loss and n_bytes are of the output and its end alone. Rows are
    padded on the right with id 0 and masked, to the longest of the global batch.
    Raises ConfigError if `seq_len` cannot hold the longest row.
    """

    _valid: list[Pair]
    #: a finite set to train on, in an order of its own each epoch; None where inputs never end
    train_set: Sequence[Pair] | None = None

    def __init__(self, tokenizer: Tokenizer | None, options: DataOptions) -> None:
        self.tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        self.seq_len, self.batch_size, self._seed = options.seq_len, options.batch_size, options.seed

    @abstractmethod
    def held_out(self, n: int, seed: int = 0) -> list[Pair]:
        """`n` different pairs that are never trained on, for scoring by exact match."""

    @property
    def epoch_rows(self) -> int | None:
        return None if self.train_set is None else len(self.train_set)

    def _training(self, rows: np.ndarray) -> list[Pair]:
        pairs = self.train_set or []
        return [pairs[i] for i in shuffled(rows, len(pairs), self._seed)]

    def _require_room(self, length: int, which: str) -> None:
        """Raises ConfigError if a row of `length` tokens is too long: before training, not when its turn comes."""
        if length > self.seq_len:
            raise ConfigError(
                f"{which} needs {length} tokens, more than seq_len {self.seq_len}; raise data.seq_len to {length}"
            )

    def _length(self, pair: Pair) -> int:
        """Tokens of a pair's row."""
        return sum(map(len, self._row(pair))) - 1

    def _batch(self, group: Sequence[Pair], chosen: Sequence[int]) -> Batch:
        every = [self._row(pair) for pair in group]
        length, rows = max(len(prompt) + len(answer) for prompt, answer in every) - 1, [every[row] for row in chosen]

        def padded(values: Iterable[list[int]], filler: int | bool) -> torch.Tensor:
            return torch.from_numpy(np.array([row + [filler] * (length - len(row)) for row in values]))

        ids = padded(((prompt + answer)[:-1] for prompt, answer in rows), PAD_ID)
        targets = padded(([IGNORED] * (len(prompt) - 1) + answer for prompt, answer in rows), IGNORED)
        mask = padded(([True] * (len(prompt) + len(answer) - 1) for prompt, answer in rows), False)
        n_bytes = sum(len(group[row].output.encode()) + 1 for row in chosen)
        return Batch(ids, targets, n_bytes, None if mask.all() else mask)

    def _row(self, pair: Pair) -> tuple[list[int], list[int]]:
        """The input and the answer."""
        prompt = [self.tokenizer.eos_id, *self.tokenizer.encode(pair.input + "\t")]
        return prompt, [*self.tokenizer.encode(pair.output), self.tokenizer.eos_id]

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        return [f"{pair.input}\t" for pair in self.held_out(n, seed)]

    def _written(self, group: Iterable[Pair]) -> Iterable[str]:
        return (f"{pair.input}\t{pair.output}\n" for pair in group)


class ShiftCorpus(PairsCorpus):
    """Random printable inputs of 4 to `length` characters, and each character moved by one (see `shift`).

    New inputs are drawn for ever. A fixed hash of an input decides once and for all, for every seed, whether it is held
    out (a tenth are): training and held-out inputs cannot overlap.
    """

    #: a shifted output follows from its input without a doubt
    entropy_floor: float | None = 0.0

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `ShiftOptions`."""
        o = ShiftOptions(**options)
        super().__init__(tokenizer, o)
        self._lengths = min(4, o.length), o.length
        self._require_room(2 * o.length + 2, f"a pair of length {o.length}")  # a character is a token at most
        self._source = Source(self._draw, is_held_out, "raise data.length")
        self._valid = self.held_out(o.valid_rows)

    def _training(self, rows: np.ndarray) -> list[Pair]:
        return self._pairs(self._source.rows(rows, self._seed, held_out=False), self._seed)

    def held_out(self, n: int, seed: int = 0) -> list[Pair]:
        return self.distinct(n, seed, held_out=True)

    def distinct(self, n: int, seed: int, *, held_out: bool) -> list[Pair]:
        """The first `n` different pairs of one side of the split."""
        return self._pairs(self._source.distinct(n, seed, held_out=held_out), seed) if n else []

    def _draw(self, draw: Draw) -> np.ndarray:
        """(n, L) characters, 0 behind a text's end."""
        low, high = self._lengths
        key = (_HELD_OUT if draw.held_out else _TRAINING, draw.rows)
        lengths = low + random_below(high - low + 1, draw.seed, _LENGTHS, *key, draw.attempt)
        rows, column = draw.rows[:, None], np.arange(high)
        drawn = random_below(PRINTABLE, draw.seed, _CHARACTERS, key[0], rows, draw.attempt, column)
        return np.where(column < lengths[:, None], FIRST + drawn, 0).astype(np.uint8)

    def _pairs(self, inputs: np.ndarray, seed: int) -> list[Pair]:
        return [Pair(text, shift(text)) for text in texts_of(inputs)]


def texts_of(inputs: np.ndarray) -> list[str]:
    return [row.tobytes().rstrip(b"\0").decode("ascii") for row in inputs]


def read_pairs(path: Path) -> tuple[dict[int, Pair], Problems]:
    """Pairs of a file with one base64 text `input TAB output` a line, by the numbers of their lines.

    A line that is not base64 of UTF-8, has no tab, or whose output holds a newline or a NUL is counted in
    the problems. Blank lines are passed over.
    """
    problems = Problems(path)
    with path.open("rb") as file:
        pairs = dict(parsed_lines(file, _MAX_LINE, _parse_pair, problems))
    if problems.count:
        _log.warning("%s", problems)
    return pairs, problems


def _parse_pair(line: bytes) -> Pair:
    try:
        text = base64.b64decode(line.strip(), validate=True).decode("utf-8")
    except binascii.Error:
        raise BadLine("not base64") from None
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 at byte {error.start} once decoded") from None
    question, tab, answer = text.partition("\t")
    if not tab:
        raise BadLine("no tab between input and output")
    if "\n" in text or "\0" in text:
        raise BadLine("a newline or NUL inside, which would end the output")
    return Pair(question, answer)


class PairFileCorpus(PairsCorpus):
    """The pairs of base64 files, visited in epochs shuffled by (seed, epoch); see `read_pairs`.

    Held out: those of `valid_path`, or the last `valid_fraction` (at least one). A training pair whose input is also
    held out is left out.
    Raises DataError if no usable pair is left to train or to validate on, ConfigError for one that does not fit.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `PairsOptions`."""
        o = PairsOptions(**options)
        super().__init__(tokenizer, o)
        self._problems: list[Problems] = []
        train = self._read(o.path, "data.path")
        if o.valid_path is None:
            n_valid = max(1, int(len(train) * o.valid_fraction))
            train, self._valid = train[:-n_valid], train[-n_valid:]
        else:
            self._valid = self._read(o.valid_path, "data.valid_path")
        questions = {pair.input for pair in self._valid}
        self.train_set = [pair for pair in train if pair.input not in questions]
        if not self.train_set or not self._valid:
            what = "train" if not self.train_set else "validate"
            raise DataError(
                f"{o.path} leaves no usable pair to {what} on: {len(train)} pairs to train on, of which "
                f"{len(train) - len(self.train_set)} are also held out. {self.problems or ''}".strip()
            )

    def _read(self, path: str | None, option: str) -> list[Pair]:
        pairs: list[Pair] = []
        for file in open_files(path, option, "*.b64"):
            numbered, problems = read_pairs(file)
            length, line = max(((self._length(pair), line) for line, pair in numbered.items()), default=(0, 0))
            self._require_room(length, f"{file}: the longest pair, in line {line},")
            self._problems += [problems] if problems.count else []
            pairs += numbered.values()
        return pairs

    @property
    def problems(self) -> str | None:
        return summary_of(self._problems)

    def held_out(self, n: int, seed: int = 0) -> list[Pair]:
        """At most `n`: a file has no more than it has."""
        n = min(n, len(self._valid))
        return [self._valid[i] for i in shuffled(np.arange(n), len(self._valid), seed)]
