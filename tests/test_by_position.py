"""Bits per byte by position: bits stand where their bytes do, halves are compared row by row."""

from __future__ import annotations

import math

import pytest
import torch

from glissando.config import from_dict
from glissando.data.tokenizers import ByteTokenizer, train_bpe
from glissando.model import LanguageModel, ModelConfig
from research import by_position

TEXT = "the cat sat on the mat and the dog sat by the door; " * 40


def model_with(tokenizer) -> LanguageModel:
    torch.manual_seed(0)
    options = {"hidden_size": 16, "mixer": {"kind": "spectral"}, "depth": {"layers": 1}, "vocab_size": 300}
    model = LanguageModel(from_dict(ModelConfig, options, "model")).eval()
    model.tokenizer = tokenizer
    return model


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(iter([TEXT]), 300)], ids=["bytes", "bpe"])
def test_the_bits_of_a_token_stand_at_its_first_byte(tokenizer):
    model, rows = model_with(tokenizer), by_position.cut(TEXT, 128, 3)
    costs = by_position.bits_by_byte(model, rows, 128)
    for row, found in zip(rows, costs, strict=True):
        ids, at = tokenizer.encode(row), 0
        logits = model(torch.tensor([ids]))[0][0].log_softmax(-1).detach()
        expected = torch.zeros(128, dtype=torch.float64)
        for place, token in enumerate(ids):
            if place:
                expected[at] = -logits[place - 1, token].item() / math.log(2)
            at += int(tokenizer.byte_lengths[token])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_halves_are_compared_row_by_row():
    easy = torch.tensor([[2.0, 2, 1, 1], [5, 5, 4, 4], [1, 1, 0, 0]])
    assert by_position.halves(easy) == (-1.0, 0.0)  # rows differ by more than halves do, and do not blur the difference
    gap = by_position.halves(easy + torch.tensor([[0.0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5], [0, 0, 0, 0]]))
    assert gap.value == pytest.approx(-1)
    assert gap.half == pytest.approx(4.3027 * 0.5 / math.sqrt(3))


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(SystemExit, match="has 2 rows of 1,000 bytes, 3 are needed"):
        by_position.cut(TEXT[:2000], 1000, 3)
    # The first two of three rows would cut a character in two.
    with pytest.raises(SystemExit, match="has 1 rows of 9 bytes"):
        by_position.cut("a" * 8 + "ä" + "a" * 17, 9, 2)
