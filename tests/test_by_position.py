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
    options = {
        "hidden_size": 16,
        "mixer": {"kind": "spectral"},
        "depth": {"layers": 1},
        "vocab_size": 300,
        "head_bias": True,
    }
    model = LanguageModel(from_dict(ModelConfig, options, "model")).eval()
    model.tokenizer = tokenizer
    return model


def bits_by_definition(model, row: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer, at = model.tokenizer, 0
    ids = tokenizer.encode(row)
    logits = model(torch.tensor([ids]))[0][0].log_softmax(-1).detach()
    bits, sizes = (torch.zeros(len(row.encode()), dtype=torch.float64) for _ in range(2))
    for place, token in enumerate(ids):
        if place:
            bits[at] = -logits[place - 1, token].item() / math.log(2)
            sizes[at] = float(tokenizer.byte_lengths[token])
        at += int(tokenizer.byte_lengths[token])
    return bits, sizes


TOKENIZERS = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(iter([TEXT]), 300)], ids=["bytes", "bpe"])


@TOKENIZERS
def test_the_bits_of_a_token_stand_at_its_first_byte(tokenizer):
    model, row = model_with(tokenizer), TEXT[:128]
    bits, sizes = by_position.bits_and_sizes(model, row)
    expected_bits, expected_sizes = bits_by_definition(model, row)
    torch.testing.assert_close(bits, expected_bits, rtol=1e-5, atol=1e-5)
    assert torch.equal(sizes, expected_sizes)


def test_every_piece_is_read_at_every_place():
    model = model_with(ByteTokenizer())
    result = by_position.by_place(model, TEXT[: 15 * 16].encode(), 16, 4)
    assert result.shape == (8, 4)  # nine pieces of fifteen are read at all places, and eight are whole blocks
    for number, bits in enumerate(result, 3):
        for place, cell in enumerate(bits):
            start = (number - place) * 16
            costs, _ = bits_by_definition(model, TEXT[start : start + 64])
            # as the first of a row the piece's first byte is not scored, and so it counts nowhere
            assert cell.item() == pytest.approx(costs[place * 16 + 1 : place * 16 + 16].mean().item(), abs=1e-5)


@TOKENIZERS
def test_a_model_that_cannot_use_its_context_gains_nothing(tokenizer):
    """Words that the edges of rows cut, and tokens that are not scored, make no difference."""
    model = model_with(tokenizer)
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.head_bias.normal_()  # tokens differ in what they cost
    result = by_position.by_place(model, TEXT[:1000].encode(), 37, 4)
    assert result.min() > 0
    for gap in by_position.differences(result, result):
        assert abs(gap.value) < 1e-12 > gap.half


def test_differences_are_of_the_same_bytes_and_their_intervals_over_blocks():
    text = torch.rand(16, 1, dtype=torch.float64)  # how hard a piece is cancels
    gain = torch.tensor([[0.0, -0.5, -0.5, -1.0]], dtype=torch.float64)
    gaps = by_position.differences(text + gain, text + gain + 0.25)
    assert [gap.value for gap in gaps] == pytest.approx([-0.5, 0, -0.5, -0.5, -0.25])
    assert max(gap.half for gap in gaps) < 1e-9
    apart = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1] * 2, dtype=torch.float64)[:, None]
    noisy = by_position.differences(text + gain * (1 + apart), text)[0]
    assert noisy.half == pytest.approx(3.1824 * torch.tensor([-1.0, 0, -1, 0]).std().item() / math.sqrt(4))


def test_pieces_begin_and_end_with_characters():
    greek = "\u03bb\u03cc\u03b3\u03bf\u03c2 " * 40  # letters of two bytes
    result = by_position.by_place(model_with(ByteTokenizer()), greek.encode(), 17, 2)
    assert len(result) == len(greek.encode()) // 17 + 1 - 2 - 1 - (len(greek.encode()) // 17 + 1 - 2 - 1) % 2
    assert result.isfinite().all()


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(SystemExit, match="4 pieces of 16 bytes of the text can be read at all 4 places; at least 8"):
        by_position.by_place(model_with(ByteTokenizer()), TEXT[:160].encode(), 16, 4)
