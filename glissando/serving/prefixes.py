"""What was read before, kept: a prompt that begins as an earlier one did is read from where they part."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from glissando.state import State, state_bytes

#: how many tokens were read, their hash, the control that they were read under, and whose they are
_Key = tuple[int, int, tuple[float, ...] | None, int | None]
_PRIME = 2**61 - 1
#: bytes that a token of a kept text takes
_TOKEN_BYTES = 36


class Known(NamedTuple):
    """After these tokens of a prompt."""

    ids: tuple[int, ...]
    state: State  # of one row; never changed
    logits: Tensor  # (V,), what follows

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> int:
        """Bytes; beside a small state the tokens themselves are most of it."""
        return state_bytes((self.state, self.logits)) + _TOKEN_BYTES * len(self.ids)


class Prefixes:
    """States by what was read to reach them, and for whom: nobody learns from the time it takes what others sent.

    Those not used for longest go when they take more than `limit` bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._known: OrderedDict[_Key, Known] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._base = 2**32 + secrets.randbelow(2**60)  # so that no client can make texts of one hash

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, ids: Sequence[int], control: tuple[float, ...] | None, owner: int | None = None) -> Known | None:
        """The state after as many of the first tokens of `ids` as any of the owner's is known for."""
        hashes = self._hashes(ids)
        for length in sorted((n for n in self._lengths if n <= len(ids)), reverse=True):
            key = (length, hashes[length - 1], control, owner)
            known = self._known.get(key)
            if known is not None and known.ids == tuple(ids[:length]):
                self._known.move_to_end(key)
                return known
        return None

    def keep(
        self,
        ids: Sequence[int],
        control: tuple[float, ...] | None,
        state: State,
        logits: Tensor,
        owner: int | None = None,
    ) -> None:
        """Remember a state of one row and what follows it; both must not be changed afterwards."""
        known = Known(tuple(ids), state, logits)
        if known.size > self.limit:
            return
        key = (len(ids), self._hashes(ids)[-1], control, owner)
        if key in self._known:
            return
        self._known[key] = known
        self._lengths[known.length] += 1
        self.bytes += known.size
        self.shrink(self.limit)

    def shrink(self, limit: int) -> int:
        """Keep no more than `limit` bytes; the bytes that this frees."""
        before = self.bytes
        while self._known and self.bytes > limit:
            known = self._known.popitem(last=False)[1]
            self.bytes -= known.size
            self._lengths -= Counter([known.length])
        return before - self.bytes

    def _hashes(self, ids: Sequence[int]) -> list[int]:
        """A hash of the first n of `ids` for every n, in one go: hashing every prefix anew is quadratic."""
        return list(accumulate(ids, lambda value, token: (value * self._base + token + 1) % _PRIME, initial=1))[1:]
