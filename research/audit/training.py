"""What the claims about learning share: bytes of one text, a plain training loop, and what held-out text costs.

The loop is the published ones': a window at random, AdamW, clipping at 1. Any model will do that maps ids (B, T) to
logits, or to logits and a state.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.errors import DataError
from research.audit.claim import Plan

STORIES, QUICK_STORIES = 3000, 20
#: a factor on the learning rate from (step, steps, |gradient| before clipping)
Factor = Callable[[int, int, float], float]


@dataclass(frozen=True)
class Bytes:
    """A text as bytes: its first nine tenths to train on, the rest held out; `source` names the text."""

    train: Tensor
    held_out: Tensor
    source: str

    @property
    def reported(self) -> Tensor:
        """The first half of what is held out, for figures where the other half has chosen something."""
        return self.held_out[: len(self.held_out) // 2]

    @property
    def choosing(self) -> Tensor:
        return self.held_out[len(self.held_out) // 2 :]

    def text(self, split: str, length: int = 200_000) -> str:
        ids = self.train if split == "train" else self.held_out
        return bytes(ids[:length].tolist()).decode("utf-8", "ignore")


@lru_cache(maxsize=2)
def read_bytes(plan: Plan) -> Bytes:
    """The plan's text, or built-in stories.

    Raises DataError for a text that cannot be read, or is too short to hold anything out.
    """
    if plan.text is not None:
        try:
            data, source = Path(plan.text).read_bytes(), Path(plan.text).name
        except OSError as error:
            raise DataError(f"cannot read --text {plan.text}: {error}") from error
    else:
        from glissando.data.corpora import StoriesOptions, build_corpus

        n = QUICK_STORIES if plan.quick else STORIES
        corpus = build_corpus(StoriesOptions())
        data, source = "".join(itertools.islice(corpus.texts("train"), n)).encode(), f"{n:,} built-in stories"
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    edge = len(ids) * 9 // 10
    if len(ids) - edge < 1000:
        raise DataError(f"{source} has {len(ids)} bytes; a tenth of them must be at least 1,000: give a longer text")
    return Bytes(ids[:edge], ids[edge:], f"{source}, {len(ids):,} bytes")


@dataclass(frozen=True)
class Learning:
    """How a model is trained: rows of a step, tokens of a row, steps, and the optimizer."""

    batch: int
    length: int
    steps: int
    rate: float
    seed: int = 0
    factor: Factor = lambda step, steps, norm: 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0


@dataclass
class Curve:
    """The loss (nats a token) of each training batch, |gradient| before clipping, and the factor on the rate."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def last(self, steps: int = 50) -> float:
        """The mean loss of the last steps, of half of them at the most."""
        taken = self.losses[-max(1, min(steps, len(self.losses) // 2)) :]
        return sum(taken) / len(taken)


def cosine(step: int, steps: int, norm: float) -> float:
    """A twentieth of the steps to rise, then down to a fiftieth."""
    rise = min(1.0, (step + 1) / max(1, steps // 20))
    return rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def homeostatic(step: int, steps: int, norm: float) -> float:
    """The Continuous Transformer's: sigmoid(1 / (|grad| + 1e-6) - 0.5)."""
    return 1 / (1 + math.exp(0.5 - 1 / (norm + 1e-6)))


def learn(model: nn.Module, ids: Tensor, how: Learning, watch: Callable[[int], Any] | None = None) -> Curve:
    """Train on random windows of ids (N,), the same ones for the same seed; `watch` is called before each step."""
    curve = Curve()
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.rate, betas=how.betas, weight_decay=how.weight_decay)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        for step, rows in enumerate(itertools.islice(windows(ids, how.batch, how.length, how.seed), how.steps)):
            if watch is not None:
                watch(step)
            loss = losses(model, rows).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), how.clip).item()
            factor = how.factor(step, how.steps, norm)
            for group in optimizer.param_groups:
                group["lr"] = how.rate * factor
            optimizer.step()
            curve.losses.append(loss.item())
            curve.norms.append(norm)
            curve.factors.append(factor)
    model.eval()
    return curve


def windows(ids: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """(B, T + 1) at random places, without end."""
    rng, steps = torch.Generator().manual_seed(seed), torch.arange(length + 1)
    while True:
        yield ids[torch.randint(len(ids) - length, (batch, 1), generator=rng) + steps]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    found = model(ids)
    return found[0] if isinstance(found, tuple) else found


def losses(model: nn.Module, rows: Tensor) -> Tensor:
    """(B, T) nats for rows (B, T + 1)."""
    logits = logits_of(model, rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


@dataclass(frozen=True)
class HeldOut:
    """Nats a token of each window, (W,), and the share of tokens that were the likeliest."""

    nats: Tensor
    accuracy: float

    @property
    def mean(self) -> float:
        return float(self.nats.mean())


@torch.no_grad()
def held_out(model: nn.Module, ids: Tensor, length: int, count: int = 32) -> HeldOut:
    """What the first `count` windows of ids (N,) cost, without overlap."""
    count = min(count, (len(ids) - 1) // length)
    rows = torch.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])
    nats, right = [], 0.0
    for part in rows.split(8):
        logits, target = logits_of(model, part[:, :-1]), part[:, 1:]
        nats.append(F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(1))
        right += float((logits.argmax(-1) == target).float().mean(1).sum())
    return HeldOut(torch.cat(nats), right / count)


@dataclass(frozen=True)
class Tuned:
    """Models of one kind, a seed each, at the rate of fewest nats on text that is not reported."""

    rate: float
    models: list[Any]
    scores: list[HeldOut]

    @property
    def nats(self) -> Tensor:
        """(S, W)."""
        return torch.stack([score.nats for score in self.scores])

    @property
    def mean(self) -> float:
        return float(self.nats.mean())

    @property
    def accuracy(self) -> float:
        return sum(score.accuracy for score in self.scores) / len(self.scores)


def tuned(
    make: Callable[[], nn.Module], text: Bytes, how: Learning, rates: Sequence[float], seeds: range, count: int = 32
) -> Tuned:
    """Train the first seed at each rate, choose, and train the others at that one; `count` windows are reported."""

    def trained(rate: float, seed: int) -> nn.Module:
        model = seeded(seed, make)
        learn(model, text.train, replace(how, rate=rate, seed=seed))
        return model

    first = {rate: trained(rate, seeds[0]) for rate in rates}
    best = min(rates, key=lambda rate: held_out(first[rate], text.choosing, how.length, count).mean)
    models = [first[best], *(trained(best, seed) for seed in seeds[1:])]
    return Tuned(best, models, [held_out(model, text.reported, how.length, count) for model in models])


def parameters(model: nn.Module) -> int:
    """Trainable numbers, a complex one counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def seeded(seed: int, make: Callable[[], nn.Module]) -> Any:
    """`make()` with this seed; the random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def running_median(values: Sequence[float], window: int) -> list[float]:
    """The median of `window` values around each one, of fewer at the ends."""
    half = window // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
