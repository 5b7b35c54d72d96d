"""No model is cheaper on fresh stories than the generator: the floor is a floor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from math import fsum
from typing import NamedTuple

import numpy as np
import pytest
import torch

from glissando.data.stories import generate
from glissando.model import LanguageModel
from glissando.presets import load_preset
from research.stories.costs import byte_costs

#: A model that is right by luck alone beats the truth by b bits with probability below 2 ** -b.
CHANCE_BITS = 20.0
ORDER = 6
TRAINING_BYTES = 800_000

Scorer = Callable[[str], float]


class Table(NamedTuple):
    """Values of sorted keys; 0 for any other key."""

    keys: np.ndarray
    values: np.ndarray

    def at(self, wanted: np.ndarray) -> np.ndarray:
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.values[place], 0)


class NGrams:
    """Bytes predicted from the 0 to 6 before them: p_k = (c + u p_{k-1}) / (n + u), Witten and Bell's mixture.

    c counts the byte after the last k, n everything after them, u how many different bytes came after them.
    """

    def __init__(self, text: bytes) -> None:
        windows = self._windows(text)
        self._tables = []
        for order in range(ORDER + 1):
            known, counts = np.unique(windows % 256 ** (order + 1), return_counts=True)
            contexts, first = np.unique(known // 256, return_index=True)
            totals, kinds = np.add.reduceat(counts, first), np.diff(first, append=len(known))
            self._tables.append((Table(known, counts), Table(contexts, totals), Table(contexts, kinds)))

    def bits(self, text: bytes) -> float:
        windows = self._windows(text)
        p = np.full(len(windows), 1 / 256)
        for order, (counts, totals, kinds) in enumerate(self._tables):
            window = windows % 256 ** (order + 1)
            c, n, u = counts.at(window), totals.at(window // 256), kinds.at(window // 256)
            p = np.where(n > 0, (c + u * p) / np.maximum(n + u, 1), p)
        return float(-np.log2(p).sum())

    @staticmethod
    def _windows(text: bytes) -> np.ndarray:
        """(N,) int64: every byte of `text` with the 6 before it, line feeds before the first."""
        padded = np.frombuffer(b"\n" * ORDER + text, np.uint8).astype(np.int64)
        shifted = [padded[i : len(padded) - ORDER + i] << (8 * (ORDER - i)) for i in range(ORDER + 1)]
        return np.bitwise_or.reduce(shifted)


def untrained_bits(text: str) -> float:
    torch.manual_seed(0)
    model = LanguageModel.from_config(load_preset("transformer-nano")["model"]).eval()
    ids = torch.tensor([list(("\n" + text).encode())])
    with torch.no_grad():
        logits = model(ids[:, :-1])[0].double()
    return float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")) / np.log(2)


def training_text() -> str:
    """The first TRAINING_BYTES of the training stories, and what completes a hundred."""
    text = ""
    stories = (generate(0, "train", index).text for index in count())
    while len(text) < TRAINING_BYTES:
        text += "".join(islice(stories, 100))
    return text


@pytest.fixture(scope="module")
def margin() -> Callable[[Scorer], float]:
    """Bits by which a scorer lies above the floor on fresh stories."""
    stories = [generate(0, "test", index) for index in range(16)]
    return lambda scorer: fsum(scorer(story.text) - story.bits for story in stories)


@pytest.fixture(scope="module")
def n_grams() -> NGrams:
    return NGrams(training_text().encode())


def test_no_model_is_below_the_floor(margin: Callable[[Scorer], float], n_grams: NGrams) -> None:
    assert margin(lambda text: n_grams.bits(text.encode())) > -CHANCE_BITS
    assert margin(untrained_bits) > -CHANCE_BITS
    assert margin(lambda text: fsum(byte_costs(text))) == pytest.approx(0, abs=1e-6)


def test_the_n_grams_predict(n_grams: NGrams) -> None:
    """A scorer that learned nothing would prove nothing."""
    text = generate(1, "test", 0).text
    assert n_grams.bits(text.encode()) < len(text)


def test_a_scorer_that_cheats_by_one_percent_is_caught(margin: Callable[[Scorer], float]) -> None:
    assert margin(lambda text: 0.99 * fsum(byte_costs(text))) < -CHANCE_BITS


def test_the_n_grams_are_a_distribution(n_grams: NGrams) -> None:
    """The probabilities of every next byte sum to one, after known and unknown contexts: no cheat of its own."""
    for before in (generate(0, "test", 3).text[:100].encode(), b"Once u", b"qzx#!~"):
        start = n_grams.bits(before)
        assert fsum(2 ** (start - n_grams.bits(before + bytes([byte]))) for byte in range(256)) == pytest.approx(1)
