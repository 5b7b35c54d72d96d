"""Bits per byte, perplexity and accuracy of a model on held-out batches.

    bits per byte = sum of -log2 p(target) / bytes of text the targets stand for

Intervals are 95 % and bootstrapped over rows, which are the independent pieces of text, not over tokens. A row's
bytes are its targets' share of its batch's bytes, which is exact for a byte tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.data.base import IGNORED, Batch
from glissando.decoding import computing
from glissando.errors import DataError
from glissando.kernels.precise import double
from glissando.model import LanguageModel
from glissando.sharding import all_gathered, is_sharded

_LOGITS = 1 << 27  # at most so many are held at once: 512 MiB in float32


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) in nats, (B, T), float32 at least; 0 where the target is IGNORED."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(targets)


def divergence(expected: Tensor, got: Tensor, targets: Tensor) -> Tensor:
    """sum_t KL(softmax(expected_t) || softmax(got_t)), nats, over the scored targets (B, T); logits (B, T, V)."""
    exact = torch.promote_types(got.dtype, torch.float32)
    p, q = expected.to(exact).log_softmax(-1), got.to(exact).log_softmax(-1)
    return ((p.exp() * (p - q)).sum(-1) * (targets != IGNORED)).sum()


@dataclass
class Score:
    """Sums over scored targets, kept by row so that intervals can be drawn."""

    nats: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    row_bytes: list[float] = field(default_factory=list)
    n_bytes: int = 0
    floor_bits: float | None = None

    def add(self, batch: Batch, logits: Tensor | Iterable[Tensor]) -> None:
        """Take in one batch and its logits (B, T, V), whole or in parts of consecutive rows."""
        row = 0
        for part in [logits] if isinstance(logits, Tensor) else logits:
            expected = batch.targets[row : row + len(part)].to(part.device)
            self.nats += double(token_losses(part, expected)).sum(1).tolist()
            self.correct += (part.argmax(-1) == expected).sum(1).tolist()
            row += len(part)
        targets = (batch.targets != IGNORED).sum(1).tolist()
        self.targets += targets
        self.row_bytes += [batch.n_bytes * n / max(sum(targets), 1) for n in targets]
        self.n_bytes += batch.n_bytes
        if batch.floor_bits is not None:
            self.floor_bits = (self.floor_bits or 0.0) + batch.floor_bits

    @property
    def loss(self) -> float:
        """Nats per target."""
        return sum(self.nats) / self.n_targets

    @property
    def n_targets(self) -> int:
        return sum(self.targets)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return sum(self.nats) / math.log(2) / self.n_bytes

    @property
    def floor(self) -> float | None:
        """Bits per byte of the very text that was scored, where its probability is known."""
        return None if self.floor_bits is None else self.floor_bits / self.n_bytes

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / self.n_targets

    def merge(self, other: Score) -> None:
        """Take in what another process has scored."""
        self.nats += other.nats
        self.targets += other.targets
        self.correct += other.correct
        self.row_bytes += other.row_bytes
        self.n_bytes += other.n_bytes
        if other.floor_bits is not None:
            self.floor_bits = (self.floor_bits or 0.0) + other.floor_bits

    def intervals(self, resamples: int = 2000, seed: int = 0) -> dict[str, tuple[float, float]]:
        """95 % intervals of bits_per_byte and accuracy, rows drawn with replacement; none from a single row.

        The accuracy's is at least as wide as Wilson's, which is honest where a bootstrap has no width: at 0 and at 1.
        """
        rows = np.asarray(self.targets) > 0
        if rows.sum() < 2:
            return {}
        columns = (self.nats, self.targets, self.correct, self.row_bytes)
        nats, targets, correct, row_bytes = (np.asarray(column, float)[rows] for column in columns)
        counts = np.random.default_rng(seed).multinomial(len(nats), np.full(len(nats), 1 / len(nats)), size=resamples)
        low, high = np.quantile((counts @ nats) / (counts @ row_bytes) / math.log(2), [0.025, 0.975]).tolist()
        hits = np.quantile((counts @ correct) / (counts @ targets), [0.025, 0.975]).tolist()
        least = wilson(sum(self.correct), self.n_targets)
        return {"bits_per_byte": (low, high), "accuracy": (min(hits[0], least[0]), max(hits[1], least[1]))}

    def as_dict(self) -> dict[str, object]:
        """What `glissando evaluate` prints."""
        named: dict[str, object] = {
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity,
            "loss_nats": self.loss,
            "accuracy": self.accuracy,
            "targets": self.n_targets,
            "bytes": self.n_bytes,
        }
        if self.floor is not None:
            named |= {"entropy_floor": self.floor, "excess": self.bits_per_byte - self.floor}
        for name, interval in self.intervals().items():
            named[f"{name}_95"] = list(interval)
        return named


def wilson(successes: int, n: int) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 %: honest at 0 and at 1, unlike p +- z sqrt(p (1 - p) / n)."""
    p, z = successes / n, 1.96
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def score(model: LanguageModel, batches: Iterable[Batch], device: torch.device | None = None) -> Score:
    """The model's Score on `batches`, in evaluation mode; the mode it was in is put back.

    Raises DataError if there is nothing to score.
    """
    result = score_part(model, batches, device)
    if not any(result.targets):
        raise DataError("nothing to score: the held-out text is empty")
    return result


def score_part(model: LanguageModel, batches: Iterable[Batch], device: torch.device | None = None) -> Score:
    """`score` for one process's share of the batches, which may hold nothing to score."""
    result, device = Score(), device or model.embedding.weight.device
    with computing(model):
        for batch in batches:
            result.add(batch, _logits(model, to_device(batch, device)))
    return result


def _logits(model: LanguageModel, batch: Batch) -> Iterator[Tensor]:
    """Logits of as many rows at a time as fit into _LOGITS numbers; all rows where processes share the weights."""
    total, length = batch.ids.shape
    rows = total if is_sharded(model) else max(1, _LOGITS // (length * model.config.vocab_size))
    control = accepted_control(model, batch)
    for first in range(0, total, rows):
        part = slice(first, first + rows)
        mask = None if batch.mask is None else batch.mask[part]
        yield model(batch.ids[part], mask=mask, control=None if control is None else control[part])[0]


def merged(score: Score, world_size: int) -> Score:
    """What all processes have scored, on each of them."""
    whole = Score()
    for part in all_gathered(score, world_size):
        whole.merge(part)
    return whole


def to_device(batch: Batch, device: torch.device) -> Batch:
    values = batch._asdict().items()
    moved: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
    return batch._replace(**moved)


def accepted_control(model: LanguageModel, batch: Batch) -> Tensor | None:
    """The batch's labels for a model that accepts control; None for others, for which they are a record."""
    return batch.control if "control" in model.depth.accepts else None
