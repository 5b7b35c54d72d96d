from __future__ import annotations

import pytest

from glissando.model import LanguageModel
from research.parameters_picture import ROLES, matrices, plot_parameters


def test_every_parameter_is_drawn_once_beside_its_role(tmp_path):
    model = LanguageModel.from_preset("minimal-transformer")
    drawn = matrices(model)
    assert sum(rows.numel() for _, _, rows in drawn) == 2648
    assert all(title.partition("\n")[0] in ROLES.values() for _, title, _ in drawn)
    assert plot_parameters(model, tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_too_large_to_be_seen_is_refused(tmp_path):
    model = LanguageModel.from_preset("minimal-transformer", hidden_size=32, mixer={"rope_width": 32})
    with pytest.raises(ValueError, match="squares of more than 10,000"):
        plot_parameters(model, tmp_path / "p.png")
    assert not list(tmp_path.iterdir())
