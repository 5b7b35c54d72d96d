"""How the next token is drawn from a model's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from glissando.errors import ConfigError

#: what a generator of PyTorch takes, with a margin for every row's own
_SEEDS = (-(2**63), 2**63 - 1)
#: below it logits over the temperature are no longer float32 numbers; any difference of theirs is certainty long before
_COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits z.

    temperature  p = softmax(z / temperature); 0 takes the likeliest token
    top_k        only the k likeliest tokens
    top_p        only the likeliest tokens that together reach this probability
    seed         row r draws from a generator of its own, seeded with seed + r
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # nor NaN
            raise ConfigError(f"temperature must be at least 0 (0 is greedy) and finite, got {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise ConfigError(f"top_k must be a whole number of at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if not (isinstance(self.seed, Integral) and _SEEDS[0] <= self.seed <= _SEEDS[1]):
            raise ConfigError(f"seed must be a whole number from -2**63 to 2**63 - 1, got {self.seed}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """(..., V) logits -> (..., V) probabilities, float32 at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / max(self.temperature, _COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # By place and not by value: among equal logits no more than k stay.
            chosen = logits.topk(self.top_k, -1)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, chosen.indices, chosen.values)
        probabilities = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return probabilities
        ordered, index = probabilities.sort(-1, descending=True)
        # A token stays if those before it have not yet reached top_p: the likeliest always does, also where top_p is
        # nothing in float32.
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill((before >= self.top_p) & (before > 0), 0.0)
        kept = torch.zeros_like(probabilities).scatter_(-1, index, ordered)
        return kept / kept.sum(-1, keepdim=True)

    def draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """(B, V) logits -> (B,) int64, each row by its own generator, so that a row does not depend on others."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p = self.probabilities(logits).cpu()
        # argmax p / q with q ~ Exp(1) draws from p; torch.multinomial computes the same numbers, one row at a call.
        q = torch.empty_like(p)
        for row, generator in zip(q.unbind(), generators, strict=True):
            row.exponential_(generator=generator)
        return (p / q).argmax(-1).to(logits.device)
