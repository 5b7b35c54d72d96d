"""Bits per byte, accuracy and their intervals against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from subjects import build

from glissando.data.base import IGNORED, Batch
from glissando.errors import DataError
from glissando.evaluation.scoring import Score, score, token_losses, wilson


def batch(targets: list[list[int]], n_bytes: int | None = None, floor: float | None = None) -> Batch:
    t = torch.tensor(targets)
    return Batch(torch.zeros_like(t), t, int((t != IGNORED).sum()) if n_bytes is None else n_bytes, floor_bits=floor)


def test_a_uniform_guess_costs_eight_bits_a_byte():
    result = Score()
    result.add(batch([[3, 7, IGNORED], [1, 2, 3]]), torch.zeros(2, 3, 256))
    assert result.bits_per_byte == pytest.approx(8)
    assert result.perplexity == pytest.approx(256)
    assert result.n_targets == 5


def test_bits_are_shared_over_bytes_not_tokens():
    """Four tokens of one bit each that stand for ten bytes cost 0.4 bits a byte."""
    result = Score()
    result.add(batch([[0, 1, 0, 1]], n_bytes=10, floor=3.0), torch.zeros(1, 4, 2))
    assert result.bits_per_byte == pytest.approx(0.4)
    assert result.floor == pytest.approx(0.3)
    assert result.as_dict()["excess"] == pytest.approx(0.1)


def test_ignored_targets_cost_nothing():
    logits = torch.randn(1, 3, 5)
    losses = token_losses(logits, torch.tensor([[2, IGNORED, 4]]))
    assert losses[0, 1] == 0
    assert losses[0, 0] == pytest.approx(float(-logits[0, 0].log_softmax(-1)[2]))


def test_accuracy_counts_scored_targets():
    result = Score()
    logits = torch.zeros(1, 4, 3)
    logits[0, :, 1] = 1
    result.add(batch([[1, 1, 2, IGNORED]]), logits)
    assert result.accuracy == pytest.approx(2 / 3)


def test_intervals_cover_the_truth():
    """Rows of known mean loss: about 95 of 100 intervals hold it."""
    generator = torch.Generator().manual_seed(0)
    kept = 0
    for trial in range(200):
        rows = 1.0 + 0.5 * torch.randn(40, generator=generator).double()
        result = Score(
            nats=(rows * math.log(2)).tolist(), targets=[1] * 40, correct=[0] * 40, row_bytes=[1.0] * 40, n_bytes=40
        )
        low, high = result.intervals(resamples=400, seed=trial)["bits_per_byte"]
        kept += low <= 1.0 <= high
    assert 0.88 <= kept / 200 <= 0.99


def test_score_streams_batches_and_keeps_the_mode():
    model = build("preset:transformer-nano", torch.float32).train()
    result = score(model, [batch([[1, 2]]), batch([[3, IGNORED]])])
    assert result.n_targets == 3
    assert model.training
    with pytest.raises(DataError, match="nothing to score"):
        score(model, [batch([[IGNORED]])])


def test_wilson_interval():
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(10, 10)[1] == pytest.approx(1)
    assert wilson(10, 10)[0] > 0.7
    assert wilson(0, 10)[0] == pytest.approx(0)


def test_intervals_are_never_without_width():
    wrong = Score(nats=[1.0, 1.1], targets=[15, 15], correct=[0, 0], row_bytes=[15.0, 15.0], n_bytes=30)
    low, high = wrong.intervals()["accuracy"]
    assert (low, high) == (0, pytest.approx(0.1135, abs=1e-3))
    assert Score(nats=[1.0], targets=[15], correct=[3], row_bytes=[15.0], n_bytes=15).intervals() == {}


def test_intervals_resample_bytes_with_their_rows():
    """Rows of many bytes a token and rows of few: a ratio of sums, not a mean of fixed bytes per target."""
    result = Score()
    for _ in range(20):
        result.add(batch([[0, 1]], n_bytes=10), torch.zeros(1, 2, 2))
        result.add(batch([[0, 1]], n_bytes=2), torch.zeros(1, 2, 2))
    low, high = result.intervals()["bits_per_byte"]
    assert low < 2 * 40 / 240 < high
    assert 0.05 < high - low < 0.3
