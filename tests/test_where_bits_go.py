"""The example that says where a model's bits go: its parts add up, and are what they are called."""

from __future__ import annotations

import runpy
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from glissando.data.stories.stories import generate, story_bits
from glissando.model import LanguageModel

EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "where_bits_go.py"))


def spans(text: str) -> dict[str, list[str]]:
    """The words told, by kind: a first byte and the rest behind it."""
    found: dict[str, list[str]] = defaultdict(list)
    for letter, kind in zip(text, EXAMPLE["kinds_of"](text), strict=True):
        name, _, part = kind.partition(", ")
        if part == "first byte":
            found[name].append(letter)
        elif part == "rest":
            found[name][-1] += letter
    return found


def test_what_is_told_again_was_told_before():
    for index in range(20):
        text = generate(0, "valid", index).text
        told = spans(text)
        assert {"a name", "a name again", "a fact"} <= set(told)
        assert len(told["a name"]) == len(set(told["a name"]))
        assert set(told["a name again"]) <= set(told["a name"])
        assert all(text.count(name) > 1 for name in told["a name again"])
        assert set(told["a pronoun"]) <= {
            f(w) for w in ["he", "she", "him", "her", "his", "himself", "herself"] for f in (str, str.title)
        }


def test_the_parts_add_up():
    """Of the floor to the stories' exact bits, of a model without knowledge to 8 a byte."""
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).eval()
    with torch.no_grad():
        model.embedding.weight.zero_()
    kinds, floor, (spent,) = EXAMPLE["measure"]([model], 3)
    texts = [generate(0, "valid", index).text for index in range(3)]
    assert kinds.total() == sum(map(len, texts))
    assert floor.total() == pytest.approx(sum(map(story_bits, texts)))
    for kind, count in kinds.items():
        assert spent[kind] == pytest.approx(8 * count, rel=1e-5)
