"""Which row comes when: random numbers and permutations that are pure functions of (seed, index).

Nothing here holds a state, so row 10**9 costs what row 0 costs and resuming is arithmetic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

# Kernels are compiled anew where this file changes: they hold its constants.
GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
#: of SplitMix64's finaliser
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUND_KEYS = [np.uint64((turn + 1) * GOLDEN & _WORD) for turn in range(6)]


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every bit depends on every bit.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def random_words(seed: int, *indices: ArrayLike) -> Words:
    """A 64-bit word for each (seed, index, index, ...); the indices broadcast; at least one dimension."""
    word = _mix(np.array([(seed + GOLDEN) & _WORD], dtype=np.uint64))
    for index in indices:
        word = _mix((word ^ np.atleast_1d(np.asarray(index)).astype(np.uint64)) + np.uint64(GOLDEN))
    return word


def random_below(bound: int, seed: int, *indices: ArrayLike) -> NDArray[np.int64]:
    """An integer in [0, bound) for each (seed, index, ...); its bias is below bound / 2**64."""
    return (random_words(seed, *indices) % np.uint64(bound)).astype(np.int64)


def shuffled(position: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """What an endless visit of range(size), reshuffled each epoch, meets at each `position` >= 0.

    Epoch e = position // size is a permutation of range(size) keyed by (seed, e): a Feistel network over the
    next power of two, walked along its cycle until it lands below `size`. Memory does not depend on size.
    """
    key = random_words(seed, position // size)
    bits = max(2, (size - 1).bit_length())
    value = _feistel((position % size).astype(np.uint64), key, bits)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], key[outside], bits)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: Words, key: Words, bits: int) -> Words:
    """A keyed bijection of words of `bits` bits: each half in turn is masked by a hash of the other."""
    shift = np.uint64(bits // 2)
    low = np.uint64((1 << bits // 2) - 1)
    high = np.uint64((1 << (bits - bits // 2)) - 1)
    left, right = value >> shift, value & low
    for left_key, right_key in zip(_ROUND_KEYS[::2], _ROUND_KEYS[1::2], strict=True):
        left = left ^ (_scrambled(right + (key ^ left_key)) & high)
        right = right ^ (_scrambled(left + (key ^ right_key)) & low)
    return (left << shift) | right


def _scrambled(word: Words) -> Words:
    """A hash cheaper than `_mix`: a network of six rounds needs no more."""
    word = word * FACTORS[0]
    return (word ^ (word >> SHIFTS[1])) * FACTORS[1] >> SHIFTS[1]
