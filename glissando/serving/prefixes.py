"""What was read before, kept: a prompt that begins as an earlier one did is read from where they part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from glissando.state import State, state_bytes

#: the tokens that were read, and the control that they were read under
Key = tuple[tuple[int, ...], tuple[float, ...] | None]


class Known(NamedTuple):
    """After `length` tokens of a prompt."""

    length: int
    state: State  # of one row; never changed
    logits: Tensor  # (V,), what follows


class Prefixes:
    """States by what was read to reach them; those not used for longest go when they take more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._known: OrderedDict[Key, Known] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, ids: Sequence[int], control: tuple[float, ...] | None) -> Known | None:
        """The state after as many of the first tokens of `ids` as any is known for."""
        for length in sorted((n for n in self._lengths if n <= len(ids)), reverse=True):
            key = (tuple(ids[:length]), control)
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        return None

    def keep(self, ids: Sequence[int], control: tuple[float, ...] | None, state: State, logits: Tensor) -> None:
        """Remember a state of one row and what follows it; both must not be changed afterwards."""
        key, size = (tuple(ids), control), state_bytes((state, logits))
        if size > self.limit or key in self._known:
            return
        self._known[key] = Known(len(ids), state, logits)
        self._lengths[len(ids)] += 1
        self.bytes += size
        while self.bytes > self.limit:
            _, oldest = self._known.popitem(last=False)
            self._lengths -= Counter([oldest.length])  # one of none left is forgotten
            self.bytes -= state_bytes((oldest.state, oldest.logits))
