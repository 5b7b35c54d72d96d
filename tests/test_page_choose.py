"""The matrix of docs/choose.md says what the code says: time steps, constant state, compiled step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from glissando.mixers.base import Mixer
from glissando.model import LanguageModel

PAGE = (Path(__file__).parent.parent / "docs" / "choose.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (\w+)[^|]*\| (\w+)[^|]*\| (\w+)", PAGE, re.MULTILINE)
PRESETS = {"attention": "transformer-plus", "spectral": "continuous-transformer", "liquid": "liquid-ssm"}
PRESETS |= {"delta": "delta", "tau": "tauformer"}


def test_every_mixer_has_a_row():
    assert [row[0] for row in ROWS] == list(PRESETS)


@pytest.mark.parametrize(("kind", "dt", "constant", "compiled"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_that_of_the_code(kind, dt, constant, compiled):
    model = LanguageModel.from_preset(f"{PRESETS[kind]}-nano", depth={"layers": 1})
    mixer = next(module for module in model.modules() if isinstance(module, Mixer))

    def numbers(tokens: int) -> int:
        state = model(torch.zeros(1, tokens, dtype=torch.int64), model.init_state(1))[1]
        return sum(leaf.numel() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))

    written = [word == "yes" for word in (dt, constant, compiled)]
    assert written == ["dt" in mixer.accepts, numbers(16) == numbers(32), hasattr(mixer, "lower")]
