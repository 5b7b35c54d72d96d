"""What a user's type checker sees: mypy reads this file with the package's own (pyproject.toml); nothing runs it."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor

import glissando
from glissando.backbone import ModelState
from glissando.mixers import Mixer
from glissando.state import State


def calls(ids: Tensor, x: Tensor, model: glissando.LanguageModel, layer: glissando.LiquidRNN, mixer: Mixer) -> None:
    """nn.Module types a call as Any."""
    assert_type(model(ids), tuple[Tensor, ModelState | None])
    assert_type(model(ids, model.init_state(1)), tuple[Tensor, ModelState | None])
    assert_type(layer(x), tuple[Tensor, State])
    assert_type(mixer(x), tuple[Tensor, State])
