"""What was read before, kept: a prompt that begins as an earlier one did is read from where they part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glissando.state import State, state_bytes

#: the tokens that were read, the control that they were read under, and whose they are
_Key = tuple[bytes, tuple[float, ...] | None, int | None]


class Known(NamedTuple):
    """After `length` tokens of a prompt."""

    length: int
    state: State  # of one row; never changed
    logits: Tensor  # (V,), what follows

    @property
    def size(self) -> int:
        """Bytes, with those of the tokens and some hundred for the entry."""
        return state_bytes((self.state, self.logits)) + 4 * self.length + 256


class Prefixes:
    """States by what was read to reach them, and for whom: nobody learns from the time it takes what others sent.

    Those not used for longest go when they take more than `limit` bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._known: OrderedDict[_Key, Known] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, ids: Sequence[int], control: tuple[float, ...] | None, owner: int | None = None) -> Known | None:
        """The state after as many of the first tokens of `ids` as any of the owner's is known for."""
        raw = np.asarray(ids, np.int32).tobytes()
        for length in sorted((n for n in self._lengths if n <= len(ids)), reverse=True):
            key = raw[: 4 * length], control, owner
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
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
        known, key = Known(len(ids), state, logits), (np.asarray(ids, np.int32).tobytes(), control, owner)
        if known.size <= self.limit and key not in self._known:
            self._known[key] = known
            self._lengths[known.length] += 1
            self.bytes += known.size
            self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Keep no more than `limit` bytes."""
        while self._known and self.bytes > limit:
            known = self._known.popitem(last=False)[1]
            self.bytes -= known.size
            self._lengths -= Counter([known.length])
