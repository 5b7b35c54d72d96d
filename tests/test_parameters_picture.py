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


@pytest.mark.parametrize(
    ("mixer", "depth"),
    [
        pytest.param(
            [{"kind": "liquid"}, {"kind": "delta"}, {"kind": "tau"}],
            {"kind": "discrete", "layers": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kind": "spectral", "filter": True, "phase_gate": True},
            {"kind": "tied", "layers": 1, "n_steps": 2},
            marks=pytest.mark.slow,
        ),
        ({"kind": "attention"}, {"kind": "flow", "layers": 0, "n_steps": 2, "control": ["mood"]}),
    ],
    ids=str,
)
def test_a_model_of_any_mixer_and_depth_has_a_picture(mixer, depth, tmp_path):
    model = LanguageModel.from_config({"vocab_size": 64, "hidden_size": 8, "mixer": mixer, "depth": depth})
    drawn = matrices(model)
    assert sum(rows.numel() for _, _, rows in drawn) == model.num_parameters()
    assert plot_parameters(model, tmp_path / "p.png").is_file()


def test_a_model_too_large_to_be_seen_is_refused(tmp_path):
    model = LanguageModel.from_preset("minimal-transformer", hidden_size=32, mixer={"rope_width": 32})
    with pytest.raises(ValueError, match="squares of more than 10,000"):
        plot_parameters(model, tmp_path / "p.png")
    assert not list(tmp_path.iterdir())
