"""States that go on from one training row to the next.

Row r of a step's batch is in lane r, and continues from the state after row r of the step before, cut from the graph:
gradients reach back to the beginning of the row and no further (truncated back-propagation through time).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.data.base import Shard
from glissando.data.order import random_words
from glissando.sharding import copied
from glissando.state import State, detach, join_rows, leaves, map_state, select_rows


class Lanes:
    """The states of the lanes of one shard of the batch; None before the first step."""

    def __init__(self, state: State = None) -> None:
        self.state = state

    def begin(self, model: Any, rows: int, fresh: Tensor | None) -> State:
        """The state before so many rows, empty where `fresh` (rows,) is True."""
        if self.state is None or (fresh is not None and bool(fresh.all())):
            return model.init_state(rows)
        if fresh is None:
            return self.state
        empty = model.init_state(1)
        fresh = fresh.to(next(leaves(empty)).device)
        chosen = torch.where(fresh, rows, torch.arange(rows, device=fresh.device))
        return select_rows(join_rows(self.state, empty), chosen)

    def end(self, state: State) -> None:
        """Keep the state after the rows."""
        self.state = detach(state)

    def saved(self) -> list[Tensor]:
        """The tensors of the state, copied to the CPU."""
        return [copied(leaf) for leaf in leaves(self.state)]


def restored(saved: Sequence[Sequence[Tensor]], model: Any, shards: Sequence[Shard]) -> list[Lanes]:
    """The lanes of `shards`, from a checkpoint's tensors of all shards, of which there may have been another number."""
    if not any(saved):
        return [Lanes() for _ in shards]
    empty = model.init_state(1)
    states = []
    for tensors in saved:
        left = iter(tensors)
        states.append(map_state(lambda leaf, left=left: next(left).to(leaf.device), empty))
    before, now = len(states), shards[0].world
    if before == now:  # without spare slots, whose number may change the last bits of a sum
        return [Lanes(states[shard.rank]) for shard in shards]
    whole, size = join_rows(*states), len(next(leaves(states[0])))
    chosen = []
    for shard in shards:
        lane = torch.arange(shard.rank, before * size, now, device=next(leaves(empty)).device)
        chosen.append(lane % before * size + lane // before)
    return [Lanes(select_rows(whole, rows)) for rows in chosen]


def fresh_rows(batch: Any, training: Any, step: int, shard: Shard) -> Tensor:
    """(B,) bool: the batch's own fresh rows, and of the others the share that training.carry leaves, drawn for each
    (training.seed, step, lane)."""
    lanes = shard.rank + shard.world * np.arange(batch.rows)
    anew = torch.from_numpy(random_words(training.seed, step, lanes) / 2.0**64 >= training.carry)
    return anew if batch.fresh is None else batch.fresh | anew
