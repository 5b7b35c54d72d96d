"""How the next token is drawn from a model's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import ConfigError, NotFiniteError
from glissando.kernels.drawing import NOT_FINITE, draw_rows
from glissando.kernels.exponentials import HIGH64, LOG2E64, LOW64, SERIES64, SMALLEST64

#: what a generator of PyTorch takes, with a margin for every row's own
_SEEDS = (-(2**63), 2**63 - 1)
#: random numbers that a row draws at once; what a seed gives does not depend on it
_BLOCK = 64
#: largest size of penalties and biases, so that no logit with them overflows
_MOST = 1e100
#: of options the least and the largest value, and one as an example
_RANGES = {
    "temperature": (0, 1e300, 0.8), "min_p": (0, 1, 0.05), "frequency_penalty": (-_MOST, _MOST, 0.5),
    "presence_penalty": (-_MOST, _MOST, 0.5), "repetition_penalty": (1 / _MOST, _MOST, 1.1),
}  # fmt: skip


def require_seed(seed: int) -> None:
    """Raise ConfigError for what is no seed."""
    if not (isinstance(seed, Integral) and _SEEDS[0] <= seed <= _SEEDS[1]):
        raise ConfigError(f"seed must be a whole number from -2**63 to 2**63 - 1, got {seed}")


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits z, in float64.

    c[v] is how often token v was generated in the row so far, its prompt not counted. Where c[v] > 0, a positive z[v]
    is divided by repetition_penalty, another is multiplied by it; then the logits become

        z[v] - (frequency_penalty * c[v] + presence_penalty * (c[v] > 0)) + logit_bias[v]

    as in OpenAI's API, and w = exp((z - max z) / temperature). The token is the first, in the order of the ids,
    whose cumulative weight is above u * (sum of all weights), with a number u in [0, 1) from the row's generator.

    temperature  0 takes the likeliest token, of equal ones the first, and no random number
    top_k        only the k likeliest tokens; of equal ones, those with the least ids
    top_p        then, only the likeliest tokens that together reach this share of the weight
    min_p        then, only tokens at least this many times as likely as the likeliest
    seed         row r draws from a generator of its own, seeded with seed + r
    logit_bias   pairs of a token id and what is added to its logit; -inf never draws it
    allowed      ids; no others are drawn
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    allowed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, (least, most, example) in _RANGES.items():
            is_number = isinstance(value := getattr(self, name), Real)
            if not (is_number and least <= value <= most):  # nor NaN
                raise ConfigError(f"{name} must be a number from {least} to {most}, such as {example}, got {value}")
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise ConfigError(f"top_k must be a whole number of at least 1, got {self.top_k}")
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        require_seed(self.seed)
        for token, bias in self.logit_bias:
            is_bias = isinstance(bias, Real) and (abs(bias) <= _MOST or bias == -math.inf)
            if not (isinstance(token, Integral) and token >= 0 and is_bias):
                raise ConfigError(
                    f"logit_bias must be numbers from -{_MOST} to {_MOST}, or -inf, by token id, such as "
                    f"{{7: -100.0}}, got {token!r}: {bias!r}"
                )
        for token in self.allowed or ():
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise ConfigError(f"allowed must be token ids, which are whole numbers, such as (7, 9), got {token!r}")

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens generated before it."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def has_biases(self) -> bool:
        return bool(self.logit_bias or self.allowed is not None)

    @property
    def is_random(self) -> bool:
        """Whether a draw takes a random number."""
        return self.temperature > 0

    def bias(self, size: int) -> Any:
        """What is added to each logit (size,), float64.

        Raises ConfigError for a token that there is not, or where none is left.
        """
        biases = np.full(size, 0.0 if self.allowed is None else -math.inf)
        for name, tokens in (("allowed", self.allowed or ()), ("logit_bias", dict(self.logit_bias))):
            if outside := [token for token in tokens if not 0 <= token < size]:
                raise ConfigError(f"{name} has the token {outside[0]}, outside the vocabulary of {size}")
        biases[list(self.allowed or ())] = 0.0
        for token, bias in self.logit_bias:
            biases[token] += bias
        if np.isneginf(biases).all():
            raise ConfigError("no token is left to draw: allow one whose logit_bias is not -inf")
        return biases

    def shifted(self, logits: Tensor, counts: Tensor | None = None) -> Tensor:
        """Logits (..., V) in float64 after penalties and biases; counts (..., V) of the tokens generated so far."""
        z = logits.double()
        if counts is not None:
            repeated = (z / self.repetition_penalty).where(z > 0, z * self.repetition_penalty)
            z = repeated.where(counts > 0, z)
            z = z - (self.frequency_penalty * counts.double() + self.presence_penalty * (counts > 0).double())
        return z + torch.from_numpy(self.bias(z.shape[-1])) if self.has_biases else z

    def weights(self, logits: Tensor, counts: Tensor | None = None) -> Tensor:
        """w (..., V) float64, 0 where a token is not drawn, on the CPU; the reference of `draw_row`, to the last bit.

        For a temperature above 0.
        """
        z = self.shifted(logits.detach().cpu(), counts)
        w = _exp((z - z.amax(-1, keepdim=True)) / self.temperature)
        top_k, top_p = self.top_k or z.shape[-1], self.top_p or 1.0
        if top_k >= z.shape[-1] and top_p == 1 and self.min_p == 0:
            return w
        order = z.argsort(stable=True, dim=-1, descending=True)
        w = w.scatter(-1, order[..., top_k:], 0.0)
        ordered, total = w.gather(-1, order), w.cumsum(-1)[..., -1:]
        before = torch.cat([torch.zeros_like(total), ordered.cumsum(-1)[..., :-1]], -1)
        kept = (before < top_p * total) & (ordered >= self.min_p)
        return torch.zeros_like(w).scatter(-1, order, ordered.where(kept, 0.0))

    def draw(self, logits: Tensor, uniforms: Tensor, counts: Tensor | None = None) -> Tensor:
        """(B, V) logits, (B,) numbers in [0, 1) -> (B,) ids. Logits must be finite."""
        if not self.is_random:
            return self.shifted(logits.detach().cpu(), counts).argmax(-1)
        cumulative = self.weights(logits, counts).cumsum(-1)
        return torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)


def _exp(x: Tensor) -> Tensor:
    """exp(x), x <= 0 in float64, by the operations of glissando.kernels.exponentials.exp64 and in their order."""
    y = x.clamp(min=SMALLEST64)
    n = (y * LOG2E64 + 0.5).floor()
    f = (y - n * HIGH64) - n * LOW64
    p = torch.full_like(f, SERIES64[0])
    for factor in SERIES64[1:]:
        p = p * f + factor
    return (p * ((n.long() + 1023) << 52).view(torch.float64)).where(x > SMALLEST64, 0.0)


class RowSampler:
    """What a row's draws depend on beside its logits: how tokens are drawn, random numbers, tokens generated so far.

    The row's numbers are the float64 numbers that the generator gives one after the other, in any company.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        self.sampling = sampling
        self.counts: Any = None  # (V,) int64 once a token was drawn, where penalties count them
        self._generator, self._begun = generator, generator.get_state()
        self._numbers, self._used = np.empty(0), 0

    @property
    def generator(self) -> torch.Generator:
        """A generator that goes on behind the numbers that were used."""
        generator = torch.Generator()
        generator.set_state(self._begun)
        torch.rand(self._used, dtype=torch.float64, generator=generator)
        return generator

    def numbers(self, count: int) -> Any:
        """The next random numbers (count,), of which `use` says how many were used."""
        if self._used + count > len(self._numbers):
            self._generator = self.generator
            self._begun, self._used = self._generator.get_state(), 0
            self._numbers = torch.rand(max(count, _BLOCK), dtype=torch.float64, generator=self._generator).numpy()
        return self._numbers[self._used : self._used + count]

    def use(self, count: int) -> None:
        self._used += count * self.sampling.is_random


class Sampler:
    """Draws the next tokens of several rows together, each as it would be drawn alone.

    known  ids from 0 that are drawn: logits behind them belong to none
    """

    def __init__(self, rows: Sequence[RowSampler], known: int) -> None:
        self.rows, self.known = list(rows), known
        every = [row.sampling for row in rows]
        self._random = any(sampling.is_random for sampling in every)
        self._numbers = np.zeros((len(rows), 6))
        for numbers, s in zip(self._numbers, every, strict=True):
            penalties = s.frequency_penalty, s.presence_penalty, s.repetition_penalty
            numbers[:] = s.temperature, s.top_p or 1.0, s.min_p, *penalties
        self._top_k = np.array([min(s.top_k or known, known) for s in every], np.int64)
        self._counts = np.zeros((len(rows), known if any(s.counts_tokens for s in every) else 0), np.int64)
        self._biases = np.zeros((len(rows), 0))
        if any(s.has_biases for s in every):
            self._biases = np.stack([s.bias(known) for s in every])
        for row, counts in zip(self.rows, self._counts, strict=True):
            if row.sampling.counts_tokens:
                if row.counts is not None:
                    counts[:] = row.counts
                row.counts = counts  # shared from here on

    def arguments(self, count: int) -> tuple[Any, ...]:
        """What `draw_row` takes of `count` tokens a row: parameters, counts, biases and random numbers (B, count)."""
        uniforms = np.array([row.numbers(count) for row in self.rows]) if self._random else _NO_NUMBERS
        return self.known, self._numbers, self._top_k, self._counts, self._biases, uniforms

    def use(self, written: Any) -> None:
        """The tokens (B, n) were drawn, ids below 0 not."""
        for row, tokens in zip(self.rows, written.tolist(), strict=True):
            row.use(sum(token >= 0 for token in tokens))

    def draw(self, logits: Tensor) -> Any:
        """(B, V) logits -> (B, 1) ids int64, NOT_FINITE where a row's logits are not finite numbers."""
        if logits.dtype == torch.float32 and logits.device.type == "cpu":
            written = np.empty((len(self.rows), 1), np.int64)
            draw_rows(logits.detach().contiguous().numpy(), *self.arguments(1), written)
        else:
            written = self._by_tensors(logits)
        self.use(written)
        return written

    def draw_along(self, logits: Tensor, draft: Sequence[int]) -> Any:
        """(T, V) logits of one row behind a token and behind each of a draft of T - 1 -> (1, n) ids, to the first that
        is not the draft's."""
        ids = [self.draw(logits[:1])]
        for n, expected in enumerate(draft, 1):
            if ids[-1][0, 0] != expected:
                break
            ids.append(self.draw(logits[n : n + 1]))
        return np.concatenate(ids, 1)

    def _by_tensors(self, logits: Tensor) -> Any:
        """`draw_rows` by tensor operations."""
        written = np.full((len(self.rows), 1), NOT_FINITE, np.int64)
        _, _, _, counts, _, uniforms = self.arguments(1)
        alike: dict[Sampling, list[int]] = {}
        for row, finite in enumerate(logits.isfinite().all(-1).tolist()):
            if finite:
                alike.setdefault(self.rows[row].sampling, []).append(row)
        for sampling, rows in alike.items():
            numbers = torch.from_numpy(uniforms[rows, 0] if sampling.is_random else np.zeros(len(rows)))
            before = torch.from_numpy(counts[rows]) if sampling.counts_tokens else None
            written[rows, 0] = sampling.draw(logits[rows, : self.known], numbers, before).numpy()
            if counts.size:
                counts[rows, written[rows, 0]] += 1
        return written

    def keep(self, rows: Sequence[int]) -> Sampler:
        """A sampler of these rows alone, in this order."""
        return Sampler([self.rows[row] for row in rows], self.known)


#: random numbers of rows that take none
_NO_NUMBERS = np.empty((0, 0))


def require_finite(token: int) -> None:
    """Raise NotFiniteError for what a sampler returns where logits are not finite: the likeliest of NaNs is some
    token."""
    if token == NOT_FINITE:
        raise NotFiniteError(
            "the model's logits are not finite, so that no token can be sampled: its training diverged, or its numbers "
            "overflow in this precision. Load an earlier checkpoint, or use float32"
        )
