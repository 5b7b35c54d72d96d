"""Bits per byte of the same text after more and more context: bits stand where their bytes do, pieces are paired."""

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


def bits_by_definition(model, row: str) -> torch.Tensor:
    tokenizer, at = model.tokenizer, 0
    ids = tokenizer.encode(row)
    logits = model(torch.tensor([ids]))[0][0].log_softmax(-1).detach()
    bits = torch.zeros(len(row.encode()), dtype=torch.float64)
    for place, token in enumerate(ids):
        if place:
            bits[at] = -logits[place - 1, token].item() / math.log(2)
        at += int(tokenizer.byte_lengths[token])
    return bits


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(iter([TEXT]), 300)], ids=["bytes", "bpe"])
def test_the_bits_of_a_token_stand_at_its_first_byte(tokenizer):
    model, row = model_with(tokenizer), TEXT[:128]
    torch.testing.assert_close(
        by_position.bits_by_byte(model, row), bits_by_definition(model, row), rtol=1e-5, atol=1e-5
    )


def test_every_piece_is_read_at_every_place():
    model = model_with(ByteTokenizer())
    found = by_position.by_place(model, TEXT[:256].encode(), 16, 4)
    assert found.shape == (16 - 2 * 3, 4)  # the first and last three pieces are not read at all places
    for number, bits in enumerate(found, 3):
        for place, cell in enumerate(bits):
            start = (number - place) * 16
            row = bits_by_definition(model, TEXT[start : start + 64])
            assert cell.item() == pytest.approx(row[place * 16 : place * 16 + 16].mean().item(), abs=1e-5)


def test_differences_are_of_the_same_bytes_and_their_intervals_over_blocks():
    text = torch.rand(16, 1, dtype=torch.float64)  # how hard a piece is cancels
    gain = torch.tensor([[0.0, -0.5, -0.5, -1.0]], dtype=torch.float64)
    gaps = by_position.differences(text + gain, text + gain + 0.25)
    assert [gap.value for gap in gaps] == pytest.approx([-0.5, 0, -0.5, -0.5, -0.25])
    assert max(gap.half for gap in gaps) < 1e-9
    apart = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1] * 2, dtype=torch.float64)[:, None]
    noisy = by_position.differences(text + gain * (1 + apart), text)[0]
    assert noisy.half == pytest.approx(3.1824 * torch.tensor([-1.0, 0, -1, 0]).std().item() / math.sqrt(4))


def test_a_row_that_would_cut_a_character_is_left_out():
    model, text = model_with(ByteTokenizer()), "a" * 31 + "\u00e4" + "a" * 95  # the character stands on bytes 31 and 32
    assert (
        len(by_position.by_place(model, text.encode(), 16, 2)) == 3
    )  # rows 0 and 2 of 7 are left out, and pieces 1 to 3 of 6


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(SystemExit, match="4 pieces of 16 bytes of the text can be read at all 4 places; more than 4"):
        by_position.by_place(model_with(ByteTokenizer()), TEXT[:160].encode(), 16, 4)
