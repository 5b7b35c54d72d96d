"""Rows that are drawn by number, each on its side of a split: training row n is a pure function of (seed, n).

A fixed hash of a row decides once and for all, for every seed, whether it is held out (a tenth are): training and
held-out rows cannot overlap, however few there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from glissando.data.order import FACTORS, GOLDEN, SHIFTS, Words, random_below, random_words
from glissando.errors import ConfigError
from glissando.kernels.compiled import kernel

_TRIES = 1000
_BLOCK = 256
_SPLIT = 3  # the key of the hash
_STEP = np.uint64(GOLDEN)


class Draw(NamedTuple):
    """Random numbers of rows: pure functions of (seed, key, row), another try of a row having others."""

    rows: NDArray[np.int64]  # (n,) their numbers
    seed: int
    held_out: bool
    attempt: int = 0

    def below(self, bound: int, key: int) -> NDArray[np.int64]:
        """(n,) integers in [0, bound)."""
        return random_below(bound, self.seed, key, self.held_out, self.attempt, self.rows)

    def many_below(self, bound: int, count: int, key: int) -> NDArray[np.int64]:
        """(n, count) integers in [0, bound), evenly and independently."""
        return (self.words(count, key) % np.uint64(bound)).astype(np.int64)

    def order(self, size: int, key: int) -> NDArray[np.int64]:
        """(n, size) random orders of range(size)."""
        return self.words(size, key).argsort(axis=1, kind="stable")

    def words(self, size: int, key: int) -> Words:
        """(n, size) words of 64 bits."""
        return random_words(self.seed, key, self.held_out, self.attempt, self.rows[:, None], np.arange(size))


def hashed(characters: NDArray[np.uint8], key: int) -> Words:
    """(n,) hashes of strings (n, L) padded with zeros, the same whatever L is:

        h_0 = r(key, 0),    h_{t+1} = r(key, h_t, c_t) if c_t > 0, else h_t

    with r(...) = `random_words`, of which it is the compiled form.
    """
    state = random_words(key, np.zeros(len(characters), np.int64))
    with np.errstate(over="ignore"):  # products wrap around, of which NumPy warns where nothing is compiled
        _fold(np.ascontiguousarray(characters), random_words(key)[0], state)
    return state


@kernel
def _fold(characters, keyed, state):
    """From h_0 in `state` to the hash of each row, in place; `keyed` is r(key)."""
    first, second, last = SHIFTS
    one, other = FACTORS
    for row in range(characters.shape[0]):
        word = state[row]
        for at in range(characters.shape[1]):
            character = np.uint64(characters[row, at])
            if character > 0:
                word = (keyed ^ word) + _STEP
                word = (word ^ (word >> first)) * one
                word = (word ^ (word >> second)) * other
                word = ((word ^ (word >> last)) ^ character) + _STEP
                word = (word ^ (word >> first)) * one
                word = (word ^ (word >> second)) * other
                word = word ^ (word >> last)
        state[row] = word


def is_held_out(characters: np.ndarray) -> NDArray[np.bool_]:
    """(n,) bool of what is read (n, L), uint8 padded with zeros: a fixed hash decides."""
    return hashed(characters, _SPLIT) % np.uint64(10) == 0


class Source(NamedTuple):
    """How rows are drawn: `draw` gives (n, ...), `side` (n,) whether each is held out; `more` is how a person gets
    more different rows."""

    draw: Callable[[Draw], np.ndarray]
    side: Callable[[np.ndarray], NDArray[np.bool_]]
    more: str

    def rows(self, numbers: NDArray[np.int64], seed: int, *, held_out: bool) -> np.ndarray:
        """The rows of these numbers, each redrawn until it lies on its side of the split.

        Raises ConfigError where it never does.
        """
        drawn, todo = self.draw(Draw(numbers, seed, held_out)), np.arange(len(numbers))
        for attempt in range(1, _TRIES):
            todo = todo[self.side(drawn[todo]) != held_out]
            if not todo.size:
                return drawn
            drawn[todo] = self.draw(Draw(numbers[todo], seed, held_out, attempt))
        side = "held-out" if held_out else "training"
        raise ConfigError(f"no {side} row was found: there are too few different ones; {self.more}")

    def distinct(self, n: int, seed: int, *, held_out: bool) -> np.ndarray:
        """The first `n` different rows of one side. Raises ConfigError if there are fewer."""
        different: dict[bytes, np.ndarray] = {}
        for first in range(0, 20 * (n + _BLOCK), _BLOCK):
            drawn = self.rows(np.arange(first, first + _BLOCK), seed, held_out=held_out)
            different |= {row.tobytes(): row for row in drawn}
            if len(different) >= n:
                return np.stack(list(different.values())[:n])
        raise ConfigError(
            f"there are fewer than {n} different rows on a side of the split; lower valid_rows, or {self.more}"
        )
