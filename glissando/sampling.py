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

    With c[v], how often token v was generated in the row so far, its prompt not counted, the logits become

        z[v] - frequency_penalty * c[v] - presence_penalty * (c[v] > 0) + logit_bias[v]

    as in OpenAI's API, before temperature, top_k and top_p.

    temperature  p = softmax(z / temperature); 0 takes the likeliest token
    top_k        only the k likeliest tokens
    top_p        only the likeliest tokens that together reach this probability
    seed         row r draws from a generator of its own, seeded with seed + r
    logit_bias   pairs of a token id and what is added to its logit
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # nor NaN
            raise ConfigError(f"temperature must be at least 0 (0 is greedy) and finite, got {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise ConfigError(f"top_k must be a whole number of at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if not (isinstance(self.seed, Integral) and _SEEDS[0] <= self.seed <= _SEEDS[1]):
            raise ConfigError(f"seed must be a whole number from -2**63 to 2**63 - 1, got {self.seed}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} must be a finite number, such as 0.5, got {getattr(self, name)}")
        for token, bias in self.logit_bias:
            if not (isinstance(token, Integral) and token >= 0 and math.isfinite(bias)):
                raise ConfigError(
                    f"logit_bias must be finite numbers by token id, such as {{7: -100.0}}, got {token!r}: {bias!r}"
                )

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens generated before it."""
        return bool(self.frequency_penalty or self.presence_penalty)

    def shifted(self, logits: Tensor, written: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, V) after penalties and biases; `written` has the tokens generated in each row so far.

        Raises ConfigError for a bias of a token that there is not.
        """
        if not (self.counts_tokens or self.logit_bias):
            return logits
        shifted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if self.counts_tokens:
            for row, tokens in zip(shifted, written, strict=True):
                ids, counts = torch.tensor(tokens, dtype=torch.int64).unique(return_counts=True)
                penalty = self.frequency_penalty * counts.to(row.dtype) + self.presence_penalty
                row.index_add_(0, ids.to(row.device), penalty.to(row.device), alpha=-1)
        if self.logit_bias:
            tokens, biases = zip(*self.logit_bias, strict=True)
            if (most := max(tokens)) >= logits.shape[-1]:
                raise ConfigError(f"logit_bias has the token {most}, outside the vocabulary of {logits.shape[-1]}")
            index = torch.tensor(tokens, device=shifted.device)
            shifted.index_add_(-1, index, shifted.new_tensor(biases).expand(len(shifted), -1))
        return shifted

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

    def draw(
        self, logits: Tensor, generators: Sequence[torch.Generator], written: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """(B, V) logits -> (B,) int64, each row by its own generator, so that a row does not depend on others.

        `written` has the tokens generated in each row so far; without penalties none are needed.
        """
        logits = self.shifted(logits, written)
        if self.temperature == 0:
            return logits.argmax(-1)
        p = self.probabilities(logits).cpu()
        # argmax p / q with q ~ Exp(1) draws from p; torch.multinomial computes the same numbers, one row at a call.
        q = torch.empty_like(p)
        for row, generator in zip(q.unbind(), generators, strict=True):
            row.exponential_(generator=generator)
        return (p / q).argmax(-1).to(logits.device)
