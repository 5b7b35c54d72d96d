"""Untrained models whose texts differ, for tests of what serves them."""

from __future__ import annotations

from typing import Any

import torch

from glissando.model import LanguageModel


def loud(preset: str, **options: Any) -> LanguageModel:
    """In float64, where rounding flips no draw; its weights are large, its end token never the likeliest."""
    torch.manual_seed(0)
    model = LanguageModel.from_preset(preset, **options | {"vocab_size": 256}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else None
        model.embedding.weight[0] = 0
        for name, parameter in model.named_parameters():
            if name.startswith("depth.control") or name == "depth.alpha":
                parameter.copy_(torch.randn_like(parameter).sign() * 2)  # dials that a text shows
    return model
