"""Trained models of the package: each opens by its name, and its card's figures are those of its file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import yaml

import glissando
from glissando import pretrained
from glissando.cli import main
from glissando.cli.evaluate import measure
from glissando.config import from_dict
from glissando.data.corpora import CORPORA, build_corpus
from glissando.errors import RunError
from glissando.generation import tokenizer_of
from glissando.runs import MODEL, Run

NAMES = pretrained.names()
SERIES = [name for name in NAMES if yaml.safe_load((pretrained.ROOT / name / "config.yaml").read_text()).get("kind")]
TEXT = [name for name in NAMES if name not in SERIES]
#: trained on a file that is not part of the project
OF_FILES = [name for name in TEXT if Run.open(name).read_config()["data"].get("path")]
MODELS = Path(__file__).parent.parent / "models"


def test_there_are_models():
    assert {"dial", "stories"} <= set(TEXT)
    assert "series" in SERIES


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_a_small_run_and_a_whole_card(name):
    folder = pretrained.ROOT / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3_000_000
    front, text = pretrained.card(name)
    assert {"about", "license", "parameters", "figures", "training"} <= set(front)
    assert all(f"\n## {section}\n" in text for section in ("Data", "Limits", "Figures", "Training"))
    config = Run.open(name).read_config(kind="series" if name in SERIES else None)
    trained = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    assert all(config["data"][option] == value for option, value in trained["data"].items())
    assert not [line for line in (folder / "config.yaml").read_text().splitlines() if ": /" in line], "a machine's path"


@pytest.mark.parametrize("name", SERIES)
def test_the_figures_of_a_forecaster_are_those_of_the_file(name, tmp_path, capsys):
    table, card = tmp_path / "example.csv", pretrained.card(name)[0]
    assert main(["series", "example", "--out", str(table)]) == 0
    capsys.readouterr()
    assert main(["series", "evaluate", name, "--file", str(table), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["scored"] == card["figures"]["steps"]
    for target, by_predictor in measured["targets"].items():
        for who, each in by_predictor.items():
            assert each["rmse"] == pytest.approx(card["figures"]["rmse"][who][target], abs=2e-4)
        assert by_predictor["model"]["rmse"] < 0.75 * by_predictor["last value"]["rmse"]
    assert glissando.SeriesModel.load(name).num_parameters() == card["parameters"]
    assert main(["generate", name]) == 1
    assert "glissando.SeriesModel.load" in capsys.readouterr().err


def scored(name: str) -> None:
    """The card's figures are measured anew."""
    model, figures = glissando.load(name), pretrained.card(name)[0]["figures"]
    assert model.num_parameters() == pretrained.card(name)[0]["parameters"]
    corpus = build_corpus(
        from_dict(CORPORA.section(), Run.open(name).read_config()["data"], "data"), tokenizer_of(model)
    )
    result = measure(model, corpus, 1)
    assert result["bytes"] == figures["held_out_bytes"]
    assert float(str(result["bits_per_byte"])) == pytest.approx(figures["bits_per_byte"], abs=2e-4)
    if "floor" in figures:
        assert corpus.entropy_floor == pytest.approx(figures["floor"], abs=1e-4)
        assert figures["floor"] < figures["bits_per_byte"]


@pytest.mark.parametrize("name", [name for name in TEXT if name not in OF_FILES])
def test_the_cards_figures_are_those_of_the_file(name):
    scored(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FILES)
def test_the_cards_figures_are_those_of_the_file_on_its_text(name, monkeypatch):
    folder = Path(os.environ.get("GLISSANDO_DATA") or MODELS.parent.parent / "shared" / "data")
    if not (folder / Run.open(name).read_config()["data"]["path"]).is_file():
        pytest.skip(f"the text is not part of the project: put it into {folder}, or name its folder by $GLISSANDO_DATA")
    monkeypatch.chdir(folder)
    scored(name)


def test_a_name_stands_for_a_run_directory(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "stories", "--prompt", "Once upon a time", "--max_tokens", "8", "--step", "plain"]) == 0
    assert len(capsys.readouterr().out) > 20
    assert main(["generate", "storys"]) == 1
    assert "Did you mean stories?" in capsys.readouterr().err
    with pytest.raises(RunError, match=r"trained models in the package: .*dial"):
        Run.open("nothing-like-it-at-all")
    with pytest.raises(RunError, match="no run at elsewhere/stories"):
        Run.open("elsewhere/stories")


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    with pytest.raises(RunError, match="stories is not a run"):
        Run.open("stories")
    assert pretrained.resolve(Path("dial")) == pretrained.ROOT / "dial"


def test_the_command_lists_them_and_prints_a_card(capsys):
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{listed}" for name in NAMES)
    assert main(["models", "dial"]) == 0
    assert capsys.readouterr().out.startswith("# dial\n")
    assert main(["models", "dail"]) == 2
    assert "Did you mean 'dial'?" in capsys.readouterr().err


def test_a_training_starts_from_one(tmp_path):
    out = tmp_path / "run"
    assert (
        main(["train", "--from", "stories", "--training.steps", "1", "--data.valid_stories", "4", "--out", str(out)])
        == 0
    )
    assert math.isfinite(float(glissando.load(out).embedding.weight.detach().sum()))
    assert not any(path.name.endswith((".lock", ".tmp")) for path in (pretrained.ROOT / "stories").iterdir())


def test_the_weights_are_int8():
    from safetensors import safe_open

    for name in TEXT:
        with safe_open(pretrained.ROOT / name / MODEL, "pt") as file:
            assert any(key.endswith(".int8") for key in file.keys()), name  # noqa: SIM118
