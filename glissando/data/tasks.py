"""Tasks that probe memory: what they have in common; the tasks themselves are in probes.py and mqar.py.

What is scored follows from what was read without a doubt: the entropy floor is 0, and accuracy is what a model can
hold. `describe` has the accuracy and bits of chance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, RowCorpus
from glissando.data.corpora import GeneratedOptions
from glissando.data.order import Words, random_below, random_words
from glissando.data.pairs import NEWLINE, PAD_ID, is_held_out
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import ConfigError

_HELD_OUT_SEED = 0  # the held-out rows are the same for every run, whatever its seed
_TRIES = 1000
_BLOCK = 256
ASCII = 128


class Draw(NamedTuple):
    """Random numbers of rows: pure functions of (seed, key, row), another try of a row having others."""

    rows: np.ndarray  # (n,) their numbers
    seed: int
    held_out: bool
    attempt: int

    def below(self, bound: int, key: int) -> np.ndarray:
        """(n,) integers in [0, bound)."""
        return random_below(bound, self.seed, key, self.held_out, self.attempt, self.rows)

    def many_below(self, bound: int, count: int, key: int) -> np.ndarray:
        """(n, count) integers in [0, bound), evenly and independently."""
        return (self.words(count, key) % np.uint64(bound)).astype(np.int64)

    def order(self, size: int, key: int) -> np.ndarray:
        """(n, size) random orders of range(size)."""
        return self.words(size, key).argsort(axis=1, kind="stable")

    def words(self, size: int, key: int) -> Words:
        """(n, size) words of 64 bits."""
        return random_words(self.seed, key, self.held_out, self.attempt, self.rows[:, None], np.arange(size))


class DrawnCorpus(RowCorpus):
    """Rows drawn by number, each on its side of a split. Training row n is a pure function of (seed, n).

    A fixed hash of a row decides once and for all, for every seed, whether it is held out (a tenth are): training
    and held-out rows cannot overlap, however few there are. Held-out rows are distinct.
    """

    entropy_floor = 0.0
    _seed: int
    _more: str  # how a person gets more different rows

    @abstractmethod
    def _draw(self, draw: Draw) -> np.ndarray:
        """(n, ...), rows as first drawn or redrawn."""

    @abstractmethod
    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        """(n,) bool by a hash of what is read."""

    @abstractmethod
    def chance(self) -> dict[str, float]:
        """Accuracy and bits per byte of the held-out answers for who knows the task but reads only earlier answers."""

    def describe(self) -> dict[str, object]:
        return super().describe() | self.chance()

    def _training(self, rows: np.ndarray) -> np.ndarray:
        return self._rows(rows, self._seed, held_out=False)

    def _rows(self, rows: np.ndarray, seed: int, *, held_out: bool) -> np.ndarray:
        """The rows numbered `rows`, each redrawn until it lies on its side of the split."""
        drawn, todo = self._draw(Draw(rows, seed, held_out, 0)), np.arange(len(rows))
        for attempt in range(1, _TRIES):
            todo = todo[self._is_held_out(drawn[todo]) != held_out]
            if not todo.size:
                return drawn
            drawn[todo] = self._draw(Draw(rows[todo], seed, held_out, attempt))
        side = "held-out" if held_out else "training"
        raise ConfigError(f"no {side} row was found: there are too few different ones; {self._more}")

    def _distinct(self, n: int) -> np.ndarray:
        """The first `n` different held-out rows."""
        found: dict[bytes, np.ndarray] = {}
        for first in range(0, 20 * (n + _BLOCK), _BLOCK):
            drawn = self._rows(np.arange(first, first + _BLOCK), _HELD_OUT_SEED, held_out=True)
            found |= {row.tobytes(): row for row in drawn}
            if len(found) >= n:
                return np.stack(list(found.values())[:n])
        raise ConfigError(f"there are fewer than {n} different rows to hold out; lower valid_rows, or {self._more}")


@dataclass(frozen=True)
class Probe:
    """What is read and what is to be answered.

    alphabet  its characters
    longest   tokens of the longest row, with the end in front of it
    draw      (n, L) uint8, the characters of rows; 0 behind the end
    answers   (n, L) uint8 from what is read, the answer after each character; 0 where nothing is scored
    chance    accuracy and bits of the answers for who knows the task but reads only earlier answers, from held-out rows
    more      how a person gets more different rows
    prompt    how many characters lead to the first answer; None: all
    text      a row for a person and for a tokenizer, from what is read and the answers
    facts     further figures for a person
    """

    alphabet: str
    longest: int
    draw: Callable[[Draw], np.ndarray]
    answers: Callable[[np.ndarray], np.ndarray]
    chance: Callable[[np.ndarray], dict[str, float]]
    more: str
    prompt: int | None = None
    text: Callable[[str, str], str] = "{}\n{}\n".format
    facts: dict[str, object] = field(default_factory=dict)


class TaskCorpus(DrawnCorpus):
    """Rows `eos c_1 ... c_L` of single characters, scored where the task has an answer after c_i.

    Targets are IGNORED elsewhere, so that loss, accuracy and n_bytes are of the answers alone. Each character is a
    token, whatever the tokenizer; the end token is a newline for bytes. Rows are padded on the right with id 0 and
    masked, to the longest of the global batch. Held-out rows are sorted by length.

    Raises ConfigError if `seq_len` cannot hold the longest row, there are fewer than `valid_rows` different rows to
    hold out, or the tokenizer has no token of its own for a character.
    """

    #: its options, and what they ask for
    options: ClassVar[type[Any]]
    probe: ClassVar[staticmethod[[Any], Probe]]

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of its options."""
        o: GeneratedOptions = self.options(**options)
        self._probe = type(self).probe(o)
        self._more = self._probe.more
        self.seq_len, self.batch_size, self._seed = o.seq_len, o.batch_size, o.seed
        if self._probe.longest > self.seq_len:
            raise ConfigError(
                f"the longest row needs {self._probe.longest} tokens, more than seq_len {self.seq_len}; raise "
                f"data.seq_len to {self._probe.longest}"
            )
        self.tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        self._ids = _ids_of(self.tokenizer, self._probe.alphabet)
        chosen = self._distinct(o.valid_rows)
        self._valid = chosen[np.argsort(lengths_of(chosen), kind="stable")]

    def _draw(self, draw: Draw) -> np.ndarray:
        return self._probe.draw(draw)

    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        return is_held_out(drawn)

    def chance(self) -> dict[str, float]:
        return self._probe.chance(self._valid)

    def describe(self) -> dict[str, object]:
        return super().describe() | self._probe.facts

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Held-out beginnings, the next character of which is an answer."""
        return [_string(row)[: self._probe.prompt] for row in self._rows(np.arange(n), seed, held_out=True)]

    def _batch(self, group: np.ndarray, mine: Sequence[int]) -> Batch:
        read = group[list(mine), : lengths_of(group).max()]
        answers = self._probe.answers(read)
        ids = behind(self.tokenizer.eos_id, self._ids[read])
        targets = behind(IGNORED, np.where(answers > 0, self._ids[answers], IGNORED))
        mask = torch.from_numpy(behind(True, read > 0))
        tensors = torch.from_numpy(ids), torch.from_numpy(targets)
        return Batch(*tensors, int((answers > 0).sum()), None if mask.all() else mask, floor_bits=0.0)

    def _written(self, group: np.ndarray) -> list[str]:
        rows = zip(group, self._probe.answers(group), strict=True)
        return [self._probe.text(_string(row), _string(answers)) for row, answers in rows]


def behind(first: int, rest: np.ndarray) -> np.ndarray:
    """(n, L) -> (n, 1 + L), `first` in front of every row."""
    return np.concatenate([np.full((len(rest), 1), first, rest.dtype), rest], axis=1)


def lengths_of(read: np.ndarray) -> np.ndarray:
    return (read > 0).sum(axis=1)


def _string(row: np.ndarray) -> str:
    """The characters of one row (L,), without the zeros."""
    return row[row > 0].tobytes().decode("ascii")


def codes(characters: str) -> np.ndarray:
    return np.frombuffer(characters.encode("ascii"), np.uint8)


def _ids_of(tokenizer: Tokenizer, alphabet: str) -> np.ndarray:
    """(128,) int64, the id of each ASCII character of `alphabet`, PAD_ID for others."""
    encoded = {character: tokenizer.encode(character) for character in alphabet}
    for character, ids in encoded.items():
        if len(ids) != 1 or list(encoded.values()).count(ids) > 1 or ids[0] == tokenizer.eos_id:
            raise ConfigError(
                f"the tokenizer encodes the character {character!r} as {ids}, but a task needs a token of its own for "
                "each character and for the end; use data.tokenizer.kind bytes"
            )
    table = np.full(ASCII, PAD_ID, np.int64)
    table[codes(alphabet)] = [encoded[character][0] for character in alphabet]
    return table
