"""What it costs to carry a state from row to row: bits by position, beside those of rows that start empty."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from glissando.data.base import Batch
from glissando.decoding import computing
from glissando.errors import DataError
from glissando.evaluation.scoring import accepted_control, to_device, token_losses
from glissando.kernels.precise import double
from glissando.model import LanguageModel


class Carried(NamedTuple):
    """N scored tokens in the order in which they are read.

    position        (N,) tokens that were read before, from the beginning of the first row
    carried, reset  (N,) nats: with the state of the row before, and from an empty one
    size            (N,) bytes that a token stands for: its share of its batch's
    """

    position: NDArray[np.int64]
    carried: NDArray[np.float64]
    reset: NDArray[np.float64]
    size: NDArray[np.float64]

    def bits(self, first: float = 0, stop: float = math.inf) -> dict[str, Any]:
        """Bits per byte of the tokens at positions from `first` to before `stop`."""
        chosen = (first <= self.position) & (self.position < stop)
        scale = math.log(2) * max(self.size[chosen].sum(), 1e-9)
        return {
            "targets": int(chosen.sum()),
            "reset": float(self.reset[chosen].sum() / scale),
            "carried": float(self.carried[chosen].sum() / scale),
        }

    def by_position(self) -> list[dict[str, Any]]:
        """The bits in each decade of positions: below 10, below 100, ..."""
        edges = [0, *(10**power for power in range(1, len(str(int(self.position.max()))) + 1))]
        rows = [{"from": first, "below": stop, **self.bits(first, stop)} for first, stop in itertools.pairwise(edges)]
        return [row for row in rows if row["targets"]]

    def as_dict(self) -> dict[str, Any]:
        return {**self.bits(), "by_position": self.by_position()}

    def table(self) -> str:
        """Bits per byte, a line for each decade of positions."""
        lines = [("all", self.bits())]
        lines += [(f"{row['from']:,} to {row['below'] - 1:,}", row) for row in self.by_position()]
        head = f"{'bits per byte at':22} {'targets':>9} {'reset':>8} {'carried':>8} {'carried - reset':>16}"
        return "\n".join(
            [head]
            + [
                f"{name:22} {row['targets']:9,} {row['reset']:8.4f} {row['carried']:8.4f} "
                f"{row['carried'] - row['reset']:+16.4f}"
                for name, row in lines
            ]
        )


def score_carried(model: LanguageModel, batches: Iterable[Batch]) -> Carried:
    """The rows of all batches as one text, read in evaluation mode, a row a call.

    Raises DataError if there is nothing to score.
    """
    device, position = model.embedding.weight.device, 0
    state: Any = model.init_state(1)
    parts: list[tuple[NDArray[Any], ...]] = []
    with computing(model):
        for batch in batches:
            batch = to_device(batch, device)
            control, targets = accepted_control(model, batch), int((batch.targets >= 0).sum())
            for row in range(batch.rows):
                real = slice(None) if batch.mask is None else batch.mask[row]
                ids, expected = batch.ids[row, real][None], batch.targets[row, real][None]
                label = None if control is None else control[row : row + 1]
                carried, state = model(ids, state, control=label)
                reset, _ = model(ids, control=label)
                scored = (expected[0] >= 0).cpu()
                place = torch.arange(position, position + ids.shape[1])[scored]
                nats = [double(token_losses(logits, expected))[0].cpu()[scored].numpy() for logits in (carried, reset)]
                parts.append((place.numpy(), *nats, np.full(len(place), batch.n_bytes / max(targets, 1))))
                position += ids.shape[1]
    if not any(len(part[0]) for part in parts):
        raise DataError("nothing to score: the held-out text is empty")
    return Carried(*(np.concatenate(column) for column in zip(*parts, strict=True)))
