"""Bits per byte, perplexity and accuracy of a model on held-out batches.

    bits per byte = sum of -log2 p(target) / bytes of text the targets stand for

Intervals are 95 % and bootstrapped over rows, which are the independent pieces of text, not over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.data.base import IGNORED, Batch
from glissando.errors import DataError
from glissando.model import LanguageModel


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) in nats, (B, T), float32 at least; 0 where the target is IGNORED."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(targets)


@dataclass
class Score:
    """Sums over scored targets, kept by row so that intervals can be drawn."""

    nats: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    n_bytes: int = 0
    floor_bits: float | None = None

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Take in one batch and its logits (B, T, V)."""
        losses = token_losses(logits, batch.targets)
        hits = (logits.argmax(-1) == batch.targets).sum(1)
        self.nats += losses.double().sum(1).tolist()
        self.targets += (batch.targets != IGNORED).sum(1).tolist()
        self.correct += hits.tolist()
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

    def intervals(self, resamples: int = 2000, seed: int = 0) -> dict[str, tuple[float, float]]:
        """95 % bootstrap intervals of bits_per_byte and accuracy, rows drawn with replacement."""
        nats, targets, correct = (np.asarray(v, float) for v in (self.nats, self.targets, self.correct))
        bytes_per_target = self.n_bytes / self.n_targets
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(len(nats), np.full(len(nats), 1 / len(nats)), size=resamples)
        scored = np.maximum(counts @ targets, 1)
        bits = (counts @ nats) / scored / math.log(2) / bytes_per_target
        ends = [0.025, 0.975]
        return {
            "bits_per_byte": tuple(np.quantile(bits, ends).tolist()),
            "accuracy": tuple(np.quantile((counts @ correct) / scored, ends).tolist()),
        }

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


def score(model: LanguageModel, batches: Iterable[Batch], device: torch.device | None = None) -> Score:
    """The model's Score on `batches`, in evaluation mode; the mode it was in is put back.

    Raises DataError if there is nothing to score.
    """
    result = score_part(model, batches, device)
    if not any(result.targets):
        raise DataError("nothing to score: the held-out text is empty")
    return result


@torch.no_grad()
def score_part(model: LanguageModel, batches: Iterable[Batch], device: torch.device | None = None) -> Score:
    """`score` for one process's share of the batches, which may hold nothing to score."""
    was_training, device = model.training, device or model.embedding.weight.device
    model.eval()
    result = Score()
    try:
        for batch in batches:
            batch = to_device(batch, device)
            logits, _ = model(batch.ids, mask=batch.mask, control=heard_control(model, batch))
            result.add(batch, logits)
    finally:
        model.train(was_training)
    return result


def to_device(batch: Batch, device: torch.device) -> Batch:
    values = batch._asdict().items()
    moved: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
    return batch._replace(**moved)


def heard_control(model: LanguageModel, batch: Batch) -> Tensor | None:
    """Labels steer only a model that listens to control; for others they are just a record."""
    return batch.control if "control" in model.depth.honours else None
