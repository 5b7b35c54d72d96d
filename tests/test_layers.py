"""Pictures name a layer by its place among all blocks, also where kinds of mixers alternate."""

from __future__ import annotations

import pytest
import torch

from glissando.evaluation.observe import layer_numbers, pictures_of
from glissando.mixers.attention import Attention
from glissando.mixers.spectral import Spectral
from glissando.model import LanguageModel


@pytest.fixture(scope="module")
def mixed() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel.from_preset(
        "composite-nano", hidden_size=16, mixer=["spectral", "attention", "spectral", "spectral"], depth={"layers": 4}
    ).eval()


def test_numbers_of_a_mixed_stack(mixed):
    assert layer_numbers(mixed, Spectral, 3) == [1, 3, 4]
    assert layer_numbers(mixed, Attention, 1) == [2]


def test_applications_are_counted_where_a_block_is_applied_again():
    model = LanguageModel.from_preset("continuous-transformer", hidden_size=16)
    applied = model.config.depth.layers
    assert layer_numbers(model, Spectral, applied) == list(range(1, applied + 1))


def test_looks_name_the_layers_of_a_mixed_stack(mixed):
    result = {look["name"]: look for look in pictures_of(mixed, torch.arange(12).unsqueeze(0))}
    assert result["decay_times"]["rows"] == ["layer 1", "layer 3", "layer 4"]
    assert len(result["decay_times"]["values"]) == 3
