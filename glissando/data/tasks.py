"""Tasks that probe memory: what they have in common, and recall of what was bound. Parity and tracking: automata.py.

What is scored follows from what was read without a doubt: the entropy floor is 0, and accuracy is what a model can
hold. `describe` has the accuracy and bits of chance.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from glissando.data.base import IGNORED, Batch, RowCorpus
from glissando.data.corpora import RecallOptions, TaskOptions
from glissando.data.order import random_words
from glissando.data.pairs import NEWLINE, PAD_ID, is_held_out
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.errors import ConfigError

# Keys of independent random streams.
LENGTHS, MOVES, _KEYS, _VALUES, _QUERIES = range(5)
_HELD_OUT_SEED = 0  # the held-out rows are the same for every run, whatever its seed
_TRIES = 1000
_BLOCK = 256
ASCII = 128


class DrawnCorpus(RowCorpus):
    """Rows drawn by number, each on its side of a split. Training row n is a pure function of (seed, n).

    A fixed hash of a row decides once and for all, for every seed, whether it is held out (a tenth are): training
    and held-out rows cannot overlap, however few there are. Held-out rows are distinct.
    """

    entropy_floor = 0.0
    _seed: int
    _more: str  # how a person gets more different rows

    @abstractmethod
    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        """(n, ...), the rows numbered `rows` (n,) as first drawn or redrawn."""

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
        drawn, todo = self._draw(rows, seed, held_out, 0), np.arange(len(rows))
        for attempt in range(1, _TRIES):
            todo = todo[self._is_held_out(drawn[todo]) != held_out]
            if not todo.size:
                return drawn
            drawn[todo] = self._draw(rows[todo], seed, held_out, attempt)
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


class TaskCorpus(DrawnCorpus):
    """Rows `eos c_1 ... c_L` of single characters, scored where the task has an answer after c_i.

    Targets are IGNORED elsewhere, so that loss, accuracy and n_bytes are of the answers alone. Each character is a
    token, whatever the tokenizer; the end token is a newline for bytes. Rows are padded on the right with id 0 and
    masked, to the longest of the global batch. Held-out rows are sorted by length.

    Raises ConfigError if `seq_len` cannot hold the longest row, there are fewer than `valid_rows` different rows to
    hold out, or the tokenizer has no token of its own for a character.
    """

    def __init__(self, tokenizer: Tokenizer | None, options: TaskOptions, alphabet: str, longest: int) -> None:
        self.seq_len, self.batch_size, self._seed = options.seq_len, options.batch_size, options.seed
        if longest > self.seq_len:
            raise ConfigError(
                f"the longest row needs {longest} tokens, more than seq_len {self.seq_len}; raise data.seq_len to "
                f"{longest}"
            )
        self.tokenizer = tokenizer or ByteTokenizer(NEWLINE)
        self._ids = _ids_of(self.tokenizer, alphabet)
        chosen = self._distinct(options.valid_rows)
        self._valid = chosen[np.argsort(lengths_of(chosen), kind="stable")]

    @abstractmethod
    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        """(n, L) uint8, the characters of the rows numbered `rows` (n,) as first drawn or redrawn; 0 behind the end."""

    @abstractmethod
    def _answers(self, read: np.ndarray) -> np.ndarray:
        """(n, L) uint8, the answer after each of `read` (n, L); 0 where nothing is scored."""

    @abstractmethod
    def _text(self, read: str, answers: str) -> str:
        """A row for a person and for a tokenizer; `answers` without what lies between them."""

    @abstractmethod
    def _prompt(self, read: str) -> str:
        """The beginning of a row that leads to an answer."""

    def _is_held_out(self, drawn: np.ndarray) -> np.ndarray:
        return is_held_out(drawn)

    def prompts(self, n: int, *, seed: int = 0) -> list[str]:
        """Held-out beginnings, the next character of which is an answer."""
        return [self._prompt(_string(row)) for row in self._rows(np.arange(n), seed, held_out=True)]

    def _batch(self, group: np.ndarray, mine: Sequence[int]) -> Batch:
        read = group[list(mine), : lengths_of(group).max()]
        answers = self._answers(read)
        ids = behind(self.tokenizer.eos_id, self._ids[read])
        targets = behind(IGNORED, np.where(answers > 0, self._ids[answers], IGNORED))
        mask = torch.from_numpy(behind(True, read > 0))
        tensors = torch.from_numpy(ids), torch.from_numpy(targets)
        return Batch(*tensors, int((answers > 0).sum()), None if mask.all() else mask, floor_bits=0.0)

    def _written(self, group: np.ndarray) -> list[str]:
        return [
            self._text(_string(row), _string(answers)) for row, answers in zip(group, self._answers(group), strict=True)
        ]


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


def shuffled(size: int, seed: int, *indices: object) -> np.ndarray:
    """(n, size), a random order of range(size) for each of the indices, which are (n,) or single."""
    columns = [np.atleast_1d(np.asarray(index))[:, None] for index in indices]
    return random_words(seed, *columns, np.arange(size)).argsort(axis=1, kind="stable")


def _mean_guess(ways: Sequence[int]) -> tuple[float, float]:
    """Accuracy and bits of answers drawn evenly from so many ways each."""
    return float(np.mean([1 / n for n in ways])), float(np.mean([math.log2(n) for n in ways]))


_KEY_CHARACTERS = "".join(map(chr, range(33, 80)))
_VALUE_CHARACTERS = "".join(map(chr, range(80, 127)))


class RecallCorpus(TaskCorpus):
    """Multi-query associative recall: `pairs` keys, each with its value, then `queries` of the keys once more.

        eos k_1 v_1 ... k_P v_P  q_1 a_1 ... q_Q a_Q        a_j = v_i where q_j = k_i

    Only the a_j are scored. Keys are distinct characters from ! to O, values distinct ones from P to ~ (47 each), and
    no key is queried twice. `queries` None queries every key.

    Besides chance, which may give any value not yet given, `describe` has the figures of `unbound`: a model
    that knows which values there were and which have been given, but not their keys.

    Source: Arora et al., "Zoology: Measuring and improving recall in efficient language models", 2023
    (arXiv 2312.04927), without its filler between queries.
    """

    _more = "raise pairs"

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `RecallOptions`. Raises ConfigError for more queries than pairs."""
        o = RecallOptions(**options)
        self._pairs, self._queries = o.pairs, o.pairs if o.queries is None else o.queries
        if self._queries > o.pairs:
            raise ConfigError(
                f"queries must be from 1 to pairs ({o.pairs}), since no key is queried twice; got {o.queries}; raise "
                "pairs"
            )
        longest = 2 * (o.pairs + self._queries)  # the last answer is no input
        super().__init__(tokenizer, o, _KEY_CHARACTERS + _VALUE_CHARACTERS, longest)

    def _draw(self, rows: np.ndarray, seed: int, held_out: bool, attempt: int) -> np.ndarray:
        draw = (held_out, attempt, rows)
        keys = codes(_KEY_CHARACTERS)[shuffled(len(_KEY_CHARACTERS), seed, _KEYS, *draw)[:, : self._pairs]]
        values = codes(_VALUE_CHARACTERS)[shuffled(len(_VALUE_CHARACTERS), seed, _VALUES, *draw)[:, : self._pairs]]
        bound = np.stack([keys, values], axis=2)
        queried = shuffled(self._pairs, seed, _QUERIES, *draw)[:, : self._queries]
        queried_pairs = np.take_along_axis(bound, queried[:, :, None], axis=1)
        return np.concatenate([bound, queried_pairs], axis=1).reshape(len(rows), -1)[:, :-1]

    def _answers(self, read: np.ndarray) -> np.ndarray:
        first = 2 * self._pairs
        keys, values, queried = read[:, 0:first:2], read[:, 1:first:2], read[:, first::2]
        answers = np.zeros_like(read)
        answers[:, first::2] = np.take_along_axis(
            values, (queried[:, :, None] == keys[:, None, :]).argmax(axis=2), axis=1
        )
        return answers

    def _text(self, read: str, answers: str) -> str:
        return f"{read}{answers[-1]}\n"

    def _prompt(self, read: str) -> str:
        """The pairs and the first query."""
        return read[: 2 * self._pairs + 1]

    def chance(self) -> dict[str, float]:
        accuracy, bits = _mean_guess([len(_VALUE_CHARACTERS) - answers for answers in range(self._queries)])
        unbound_accuracy, unbound_bits = _mean_guess([self._pairs - answers for answers in range(self._queries)])
        return {
            "chance_accuracy": accuracy,
            "chance_bits": bits,
            "unbound_accuracy": unbound_accuracy,
            "unbound_bits": unbound_bits,
        }

    def describe(self) -> dict[str, object]:
        return super().describe() | {"pairs": self._pairs, "queries": self._queries}
