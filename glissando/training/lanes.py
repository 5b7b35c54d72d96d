"""States that go on from one training row to the next.

Batches take turns: row r continues from the state after row r of the batch so many turns before, cut from the graph:
gradients reach back to the beginning of the row and no further (truncated back-propagation through time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.data.base import Shard
from glissando.data.order import random_words
from glissando.sharding import copied
from glissando.state import State, detach, join_rows, leaves, map_state, select_rows


class Lanes:
    """The states of the lanes of one shard of the batch, of each turn, next one first; None before its first batch."""

    def __init__(self, states: Iterable[State]) -> None:
        self.states = deque(states)

    def begin(self, model: Any, rows: int, fresh: Tensor | None) -> State:
        """The state before so many rows, empty where `fresh` (rows,) is True."""
        state = self.states.popleft()
        if state is None or (fresh is not None and bool(fresh.all())):
            return model.init_state(rows)
        if len(first := next(leaves(state))) > rows:  # of more shards, to whom a small batch gave a row twice
            state = select_rows(state, torch.arange(rows, device=first.device))
        if fresh is None:
            return state
        empty = model.init_state(1)
        fresh = fresh.to(next(leaves(empty)).device)
        chosen = torch.where(fresh, rows, torch.arange(rows, device=fresh.device))
        return select_rows(join_rows(state, empty), chosen)

    def end(self, state: State) -> None:
        """Keep the state after the rows until their next turn."""
        self.states.append(detach(state))

    def saved(self) -> list[list[Tensor]]:
        """The tensors of each state, copied to the CPU."""
        return [[copied(leaf) for leaf in leaves(state)] for state in self.states]


def restored(saved: Sequence[Sequence[Tensor]], model: Any, shards: Sequence[Shard], turns: int) -> list[Lanes]:
    """The lanes of `shards`, from a checkpoint's tensors of all shards, of which there may have been another number."""
    empty, now = model.init_state(1), shards[0].world
    states: list[State] = []
    for tensors in saved or [[]] * (now * turns):
        left = iter(tensors)
        states.append(map_state(lambda leaf, left=left: next(left).to(leaf.device), empty) if tensors else None)
    if len(states) == now * turns:  # without spare slots, whose number may change the last bits of a sum
        return [Lanes(states[shard.rank * turns :][:turns]) for shard in shards]
    return [Lanes([_rows_of(shard, states[turn::turns]) for turn in range(turns)]) for shard in shards]


def _rows_of(shard: Shard, states: Sequence[State]) -> State:
    """The state of the rows of `shard`, from those of other shards, the first of which may have a row more."""
    if states[0] is None:
        return None
    before, first = len(states), [next(leaves(state)) for state in states]
    begin = np.cumsum([0, *map(len, first)])
    row = np.arange(shard.rank % begin[-1], begin[-1], shard.world)
    chosen = torch.from_numpy(begin[row % before] + row // before)
    return select_rows(join_rows(*states), chosen.to(first[0].device))


def fresh_rows(batch: Any, training: Any, step: int, shard: Shard) -> Tensor:
    """(B,) bool: the batch's own fresh rows, and of the others the share that training.carry leaves, drawn for each
    (training.seed, step, lane)."""
    lanes = shard.rank + shard.world * np.arange(batch.rows)
    anew = torch.from_numpy(random_words(training.seed, step, lanes) / 2.0**64 >= training.carry)
    return anew if batch.fresh is None else batch.fresh | anew
