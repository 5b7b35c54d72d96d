"""Windows of steps in batches of similar length. Batches are functions of (seed, number): resuming is arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from glissando.data.base import WHOLE, Shard
from glissando.data.order import random_words, shuffled

#: windows are put together with others whose length, rounded up to a multiple of this, is the same
_ROUNDED = 4

B = TypeVar("B")


@dataclass(frozen=True)
class BatchedWindows(ABC, Generic[B]):
    """W windows of steps.

    begin, end  (W,) steps of each window
    size        steps of a window at most
    rows        windows of that size in a batch
    seed        of the order in training
    """

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    size: int
    rows: int
    seed: int

    def __len__(self) -> int:
        return len(self.begin)

    @abstractmethod
    def batch(self, chosen: NDArray[np.int64], epoch: int | None = None) -> B:
        """These windows side by side; epoch: of training, which may draw anew in each."""

    @cached_property
    def _rounded(self) -> NDArray[np.int64]:
        return -(-(self.end - self.begin) // _ROUNDED) * _ROUNDED

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """Where the windows, by their rounded lengths, are cut into batches that are padded to about as many steps."""
        cuts, longest = [0], np.sort(self._rounded)
        for number, length in enumerate(longest):  # ascending, so that a batch is padded to its last
            if number > cuts[-1] and (number + 1 - cuts[-1]) * length > self.size * self.rows:
                cuts.append(number)
        if len(cuts) > 1 and 2 * (len(self) - cuts[-1]) < cuts[-1] - cuts[-2]:
            cuts.pop()  # a small rest joins the batch before it
        return np.array([*cuts, len(self)])

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return len(self._cuts) - 1

    def training(self, number: int, shard: Shard = WHOLE) -> B:
        """Batch `number`, counted over all epochs: every window once an epoch, beside others of its length."""
        epoch, slot = number // self.batches, int(shuffled(np.array([number]), self.batches, self.seed)[0])
        order = np.lexsort((random_words(self.seed, epoch, np.arange(len(self))), self._rounded))
        chosen = order[self._cuts[slot] : self._cuts[slot + 1]]
        chosen = np.resize(chosen, max(len(chosen), shard.world))[shard.rank :: shard.world]
        return self.batch(chosen, epoch)

    def scoring(self, stride: int = 1) -> Iterator[B]:
        """Every window, or one of `stride`, in batches of about as many steps as in training."""
        chosen = np.arange((stride - 1) // 2, len(self), stride)
        chosen = chosen[np.argsort(self._rounded[chosen], kind="stable")]
        cost = np.cumsum(self._rounded[chosen]) // (8 * self.size * self.rows)
        for cut in np.split(chosen, np.flatnonzero(np.diff(cost)) + 1):
            if len(cut):
                yield self.batch(cut)
