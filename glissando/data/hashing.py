"""A hash of strings, the same on every machine: it decides which rows are held out."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glissando.data.order import FACTORS, GOLDEN, SHIFTS, Words, random_words
from glissando.kernels.compiled import kernel, require_backend

_STEP = np.uint64(GOLDEN)


def hashed(characters: NDArray[np.uint8], key: int, backend: Literal["auto", "reference"] = "auto") -> Words:
    """(n,) hashes of strings (n, L) padded with zeros, the same whatever L is:

        h_0 = r(key, 0),    h_{t+1} = r(key, h_t, c_t) if c_t > 0, else h_t

    with r(...) = `random_words`. `auto` is a compiled loop, `reference` goes column by column through NumPy.

    Raises UnknownNameError for another backend, ValueError for characters of another type than uint8.
    """
    require_backend("hash", backend, ("auto", "reference"))
    if characters.dtype != np.uint8:
        raise ValueError(f"hash: characters must be uint8, got {characters.dtype}")
    state = random_words(key, np.zeros(len(characters), np.int64))
    if backend == "auto":
        with np.errstate(over="ignore"):  # products wrap around, of which NumPy warns where nothing is compiled
            _fold(np.ascontiguousarray(characters), random_words(key)[0], state)
        return state
    for column in characters.T:
        state = np.where(column > 0, random_words(key, state, column), state)
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
