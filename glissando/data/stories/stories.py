"""The stories as one grammar, built once, when first needed. research/stories proves that it is unambiguous."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import fsum
from pathlib import Path

import yaml

from glissando.data.stories import lexicon
from glissando.data.stories.grammar import Builder, Item, Seq, Text, draw
from glissando.data.stories.parser import Reader
from glissando.errors import unknown_name

END = "\n"  # ends a story: one byte, counted like any other
SPLITS = ("train", "valid", "test")
LABELS = ("mood", "speech")
SIGNS = {"+": 1, "0": 0, "-": -1}
#: templates of the frame of every story, and of what happens in it
FRAME, PLOTS = yaml.safe_load((Path(__file__).parent / "plots.yaml").read_text("ascii")).values()
_PLOT_EXPONENT = 0.3  # how much likelier the first plots are than the last


@dataclass(frozen=True)
class Story:
    """A story with its end marker, its information, its labels and its plot."""

    text: str
    bits: float
    labels: dict[str, int]
    plot: str


@cache
def grammar() -> Seq:
    """Builds the grammar."""
    numbers = lexicon.number_items()
    rules = {**FRAME, **PLOTS, "plot": _plot_choice()}
    builder = Builder(lexicon.pools(numbers), rules, numbers)
    return (*builder.template("<opening> <temper> <voice> <day> <plot> <end>"), Text(END))


def _plot_choice() -> str:
    weights = (f"{(k + 1) ** -_PLOT_EXPONENT:.6f}" for k in range(len(PLOTS)))
    return "[" + "|".join(f"{w}%{{!plot={name}}}<{name}>" for w, name in zip(weights, PLOTS, strict=True)) + "]"


def labels_of(slots: dict[str, Item]) -> dict[str, int]:
    """The labels that the slots decide; those not yet drawn are absent."""
    return {name: SIGNS[slots[name].key] for name in LABELS if name in slots}


def generate(seed: int, split: str, index: int) -> Story:
    """Story number `index` of a split. A pure function of its arguments: random access, no limit.

    Splits have keys of their own, so no story of one is ever drawn with another's random numbers, and none is
    rejected, which would change its probability. Raises UnknownNameError for an unknown split.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    key = blake2b(f"stories/{split}/{seed}/{index}".encode(), digest_size=16).digest()
    text, bits, slots = draw(grammar(), random.Random(int.from_bytes(key, "big")).random)
    return Story(text, bits, labels_of(slots), slots["plot"].key)


def parse(text: str) -> Story:
    """A story by its one derivation, end marker included. Raises ParseError where the text departs."""
    reader = Reader(text).read_all(grammar())
    return Story(text, fsum(reader.bits), labels_of(reader.slots), reader.slots["plot"].key)


def story_bits(text: str) -> float:
    """-log2 p(text), in bits. Raises ParseError if the grammar cannot produce it."""
    return parse(text).bits


def expected_bits() -> float:
    """E[bits of a story], exactly: the sum of research/stories/exact.py over the grammar."""
    return 198.76955592865124


def expected_bytes() -> float:
    """E[bytes of a story], the end marker included, likewise."""
    return 685.145707778782


def entropy_floor() -> float:
    """E[bits] / E[bytes]: no model can predict these stories in fewer bits per byte."""
    return expected_bits() / expected_bytes()


def sample_text(n: int, seed: int = 0) -> str:
    """`n` stories of the test split, one a line."""
    return "".join(generate(seed, "test", index).text for index in range(n))
