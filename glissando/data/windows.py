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


def by_length(lengths: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """Places in `lengths`, the shortest first, in groups whose lengths add up to about `most`."""
    order = np.argsort(lengths, kind="stable")
    cost = np.cumsum(lengths[order]) // most
    return [places for places in np.split(order, np.flatnonzero(np.diff(cost)) + 1) if len(places)]


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
    def batch(self, chosen: NDArray[np.int64], epoch: int | None = None, goes_on: bool | None = None) -> B:
        """These windows side by side; epoch: of training, which may draw anew in each; goes_on: in lanes, whether all
        go on from the windows before them, or all are fresh."""

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

    # ---------------------------------------------------------------------- in lanes

    @abstractmethod
    def _follows(self) -> NDArray[np.bool_]:
        """(W,) whether a window goes on where the one before it ends."""

    @cached_property
    def _chains(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Windows that follow each other: the first of each chain, and their number; long chains are cut, so that there
        are enough for a batch."""
        most, first, count = max(1, len(self) // self.rows), list[int](), list[int]()
        for window, follows in enumerate(self._follows()):
            if follows and count[-1] < most:
                count[-1] += 1
            else:
                first.append(window)
                count.append(1)
        return np.array(first), np.array(count)

    @cached_property
    def _chain_cuts(self) -> NDArray[np.int64]:
        """Where the chains, by their number of windows and the length of the first, are cut into batches: all chains of
        a batch have as many windows."""
        first, count = self._chains
        length = self._rounded[first]
        order = np.lexsort((length, count))
        cuts = [0]
        for number, chain in enumerate(order):
            many = (number + 1 - cuts[-1]) * length[chain] > self.size * self.rows
            if number > cuts[-1] and (many or count[chain] != count[order[number - 1]]):
                cuts.append(number)
        return np.array([*cuts, len(order)])

    @cached_property
    def _chain_lengths(self) -> NDArray[np.int64]:
        """Windows of the chains of each batch of chains."""
        return np.sort(self._chains[1])[self._chain_cuts[:-1]]

    @property
    def lane_batches(self) -> int:
        """Batches of an epoch in lanes."""
        return int(self._chain_lengths.sum())

    def lanes(self, number: int, shard: Shard = WHOLE) -> B:
        """As `training`, where row r of a batch goes on where row r of the one before it ended, or all are fresh."""
        epoch, place = divmod(number, self.lane_batches)
        groups = np.argsort(random_words(self.seed, epoch, np.arange(len(self._chain_lengths))), kind="stable")
        ends = np.cumsum(self._chain_lengths[groups])
        slot = int(np.searchsorted(ends, place, side="right"))
        group, turn = groups[slot], place - int(ends[slot] - self._chain_lengths[groups[slot]])
        first, count = self._chains
        order = np.lexsort((random_words(self.seed, epoch, np.arange(len(first))), self._rounded[first], count))
        chosen = first[order[self._chain_cuts[group] : self._chain_cuts[group + 1]]]
        chosen = np.resize(chosen, max(len(chosen), shard.world))[shard.rank :: shard.world]
        return self.batch(chosen + turn, epoch, goes_on=turn > 0)

    def scoring(self, stride: int = 1) -> Iterator[B]:
        """Every window, or one of `stride`, in batches of about as many steps as in training."""
        chosen = np.arange((stride - 1) // 2, len(self), stride)
        for places in by_length(self._rounded[chosen], 8 * self.size * self.rows):
            yield self.batch(chosen[places])
