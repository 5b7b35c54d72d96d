"""How well a dial turns a text: sweeps of the control over held-out prompts, judged by the corpus's own oracle.

Every prompt is continued at every value u with the same random numbers, so that what differs is the dial's doing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glissando.data.base import Corpus
from glissando.errors import ConfigError
from glissando.evaluation.scoring import score, wilson
from glissando.generation import generate
from glissando.model import LanguageModel

#: what is swept by default: from -1.5 to 1.5 in steps of 0.25
VALUES = tuple(v / 4 for v in range(-6, 7))


@dataclass(frozen=True)
class Sweep:
    """One dial: the label of each prompt's text (NaN: no evidence) at each value u, and the cost of held-out text."""

    name: str
    values: tuple[float, ...]
    labels: NDArray[np.float64]  # (values, prompts)
    texts: list[list[str]]  # [value][prompt]
    bits_per_byte: list[float]  # of held-out text read with the dial at u
    uncontrolled: float  # the same without a control

    def at(self, u: float) -> NDArray[np.float64]:
        return self.labels[self.values.index(u)]

    def means(self) -> NDArray[np.float64]:
        """The mean label at each value; prompts without evidence count as 0, which is no mood and no leaning."""
        return np.nan_to_num(self.labels).mean(1)

    def success(self, u: float) -> tuple[int, int]:
        """How many texts lean to the side of u, of how many; no evidence is no success."""
        return int((np.nan_to_num(self.at(u)) * math.copysign(1, u) > 0).sum()), self.labels.shape[1]

    def anti_steerable(self) -> float:
        """The share of prompts whose text leans more to the positive side at u = -1 than at u = 1."""
        return float((np.nan_to_num(self.at(1.0)) < np.nan_to_num(self.at(-1.0))).mean())

    def rank_correlation(self) -> float:
        """Spearman's, of u and the mean label at u."""
        return spearman(np.asarray(self.values), self.means())

    def crossing(self, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
        """Where the mean label rises through 0, with a 95 % interval bootstrapped over prompts; NaN if nowhere."""
        rng, n = np.random.default_rng(seed), self.labels.shape[1]
        labels, u = np.nan_to_num(self.labels), np.asarray(self.values)
        draws = [crossing_point(u, labels[:, rng.integers(0, n, n)].mean(1)) for _ in range(resamples)]
        found = [draw for draw in draws if not math.isnan(draw)]
        low, high = np.quantile(found, [0.025, 0.975]).tolist() if found else (math.nan, math.nan)
        return crossing_point(u, self.means()), low, high

    def as_dict(self) -> dict[str, Any]:
        """The figures that `glissando steer` writes."""
        plus, minus = self.success(1.0), self.success(-1.0)
        at, low, high = self.crossing()
        zero = self.bits_per_byte[self.values.index(0.0)]
        return {
            "dial": self.name,
            "prompts": self.labels.shape[1],
            "success_at_+1": plus[0] / plus[1],
            "success_at_+1_95": list(wilson(*plus)),
            "success_at_-1": minus[0] / minus[1],
            "success_at_-1_95": list(wilson(*minus)),
            "spearman": self.rank_correlation(),
            "crossing": at,
            "crossing_95": [low, high],
            "anti_steerable": self.anti_steerable(),
            "bits_per_byte_uncontrolled": self.uncontrolled,
            "bits_per_byte_at_0": zero,
            "u": list(self.values),
            "mean_label": self.means().tolist(),
            "evidence": (~np.isnan(self.labels)).mean(1).tolist(),
            "bits_per_byte": self.bits_per_byte,
        }


def sweep(
    model: LanguageModel,
    corpus: Corpus,
    name: str,
    *,
    values: Sequence[float] = VALUES,
    prompts: int = 32,
    max_tokens: int = 700,
    temperature: float = 0.8,
    seed: int = 0,
) -> Sweep:
    """Turn the dial `name` over held-out prompts, the other dials at 0.

    Raises ConfigError for values without -1, 0 and 1, for a model without this dial and for a corpus without an oracle.
    """
    values = tuple(sorted(set(values)))
    if not {-1.0, 0.0, 1.0} <= set(values):
        raise ConfigError(f"a sweep needs the values -1, 0 and 1 among others; got {list(values)}")
    if prompts < 2:
        raise ConfigError(f"a sweep needs at least 2 prompts to say how sure it is, got {prompts}")
    beginnings = corpus.prompts(prompts, seed=seed)
    texts, labels, costs = [], [], []
    for u in values:
        said = generate(model, beginnings, max_tokens=max_tokens, temperature=temperature, seed=seed, control={name: u})
        whole = [a + b for a, b in zip(beginnings, said, strict=True)]
        texts.append(whole)
        labels.append([_label(corpus, text, name) for text in whole])
        costs.append(cost(model, corpus, {name: u}))
    return Sweep(name, values, np.array(labels), texts, costs, cost(model, corpus, None))


def _label(corpus: Corpus, text: str, name: str) -> float:
    judged = corpus.judge(text)
    if name not in judged:
        raise ConfigError(f"the corpus's oracle judges {', '.join(judged)}, and the dial is named {name!r}")
    value = judged[name]
    return math.nan if value is None else value


def cost(model: LanguageModel, corpus: Corpus, control: dict[str, float] | None) -> float:
    """Bits per byte of the held-out text, read with the dials so; without a control if None."""
    names = model.config.depth.control
    given = None if control is None else torch.tensor([[control.get(name, 0.0) for name in names]])
    batches = (
        batch._replace(control=None if given is None else given.expand(len(batch.ids), -1))
        for batch in corpus.batches("valid")
    )
    return score(model, batches).bits_per_byte


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The correlation of ranks, equal values sharing theirs; NaN if one of the two does not vary."""
    ranks = [_ranks(values) for values in (x, y)]
    spread = [r - r.mean() for r in ranks]
    scale = math.sqrt(float((spread[0] ** 2).sum() * (spread[1] ** 2).sum()))
    return float((spread[0] * spread[1]).sum()) / scale if scale else math.nan


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (values[:, None] > values[None]).sum(1)
    equal = (values[:, None] == values[None]).sum(1)
    return below + (equal - 1) / 2


def crossing_point(u: NDArray[np.float64], means: NDArray[np.float64]) -> float:
    """Where straight lines between the means rise through 0 nearest to u = 0; NaN if they do not."""
    points = []
    for (a, low), (b, high) in pairwise(zip(u, means, strict=True)):
        if low <= 0 <= high and high > low:
            points.append(float(a - low * (b - a) / (high - low)))
    return min(points, key=abs) if points else math.nan
