"""Rows cut over processes: which part of a row this process reads, and from where it gets the state before it.

Of C processes each, the first group shares its rows, the second others, and so on. A row of T tokens is cut into C
consecutive parts whose lengths differ by one token at most, the longer ones first. The target of a part's last token is
the first token of the next part, as in the whole row.

The loss is a sum over targets. So the gradient of a weight is a sum over processes: each adds what the weight does in
its own part, the effect on later parts through the states included. See glissando.relay.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from glissando.data.base import Batch
from glissando.errors import DataError
from glissando.model import LanguageModel
from glissando.relay import Neighbours


def row_parts(size: int) -> RowParts | None:
    """The parts of rows that each `size` processes share; None where a row is one process's.

    Called by every process, once they are connected.
    """
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]  # each group by all processes
    return next(RowParts(Neighbours(ranks, group)) for ranks, group in made if dist.get_rank() in ranks)


class RowParts:
    """This process's part of every row."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours

    def columns(self, length: int) -> slice:
        """The part of a row of so many tokens. Raises DataError for a row with fewer tokens than processes."""
        place, size = self.neighbours.place, self.neighbours.size
        if length < size:
            raise DataError(
                f"a batch has rows of {length} token(s), which training.context_parallel {size} cannot cut into {size} "
                f"parts: lower it to {length} or less, or give longer rows"
            )
        share, longer = divmod(length, size)
        first = place * share + min(place, longer)
        return slice(first, first + share + (place < longer))

    def of(self, batch: Batch) -> Batch:
        """This process's part of whole rows; the bytes of all of them count with the first process."""
        own = self.columns(batch.ids.shape[1])
        before = batch.ids.new_full(batch.ids.shape[:1], own.start)
        if batch.mask is not None:
            before = batch.mask[:, : own.start].sum(1)
        mask = None if batch.mask is None else batch.mask[:, own]
        n_bytes = 0 if self.neighbours.place else batch.n_bytes
        return Batch(batch.ids[:, own], batch.targets[:, own], n_bytes, mask, batch.control, before=before)

    def given(self, model: LanguageModel, part: Batch) -> dict[str, Any]:
        """What a model is called with, beside its part of the rows: the state of nothing read, and the relay."""
        assert part.before is not None
        self.neighbours.settle()
        state = model.init_state(len(part.ids), part.ids.device)
        return {"state": state._replace(position=part.before), "relay": self.neighbours.relay()}


def own_targets(parts: RowParts | None, targets: Tensor) -> Tensor:
    """Those of targets (B, T) that this process scores."""
    return targets if parts is None else targets[:, parts.columns(targets.shape[1])]
