"""Trained models of the package: each opens by its name, and its card's figures are those of its file."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from slow import slow_where

import glissando
from glissando import pretrained
from glissando.cli import main
from glissando.cli.evaluate import measure
from glissando.config import from_dict
from glissando.data.corpora import CORPORA, StoriesOptions, build_corpus
from glissando.errors import RunError
from glissando.evaluation.carried import score_carried
from glissando.generation import tokenizer_of
from glissando.runs import MODEL, Run
from glissando.series.scores import SEASON
from research.pretrained import success

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
@pytest.mark.slow
def test_the_figures_of_a_forecaster_are_those_of_the_file(name, tmp_path, capsys):
    table, card = tmp_path / "example.csv", pretrained.card(name)[0]
    assert main(["series", "example", "--out", str(table)]) == 0
    capsys.readouterr()
    assert main(["series", "evaluate", name, "--file", str(table), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert not list((pretrained.ROOT / name).glob("*.png")), "nothing is written into the package"
    assert measured["scored"] == card["figures"]["values"]
    for target, by_predictor in measured["targets"].items():
        assert set(by_predictor) - {SEASON} == set(card["figures"]["rmse"])  # a period is of the values at hand
        for who, each in by_predictor.items():
            if who == SEASON:
                continue
            assert each["rmse"] == pytest.approx(card["figures"]["rmse"][who][target], abs=2e-4)
        assert by_predictor["model"]["rmse"] < 0.75 * by_predictor["last value"]["rmse"]
    assert glissando.SeriesModel.load(name).num_parameters() == card["parameters"]
    for command in (["generate", name], ["serve", "dial", name, "--port", "0"]):
        assert main(command) == 1
        printed = capsys.readouterr().err
        assert f"{name} predicts numbers: use `glissando series evaluate {name} --file FILE`" in printed
        assert "Language models in the package: dial, stories, tinystories" in printed


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


@pytest.mark.parametrize("name", slow_where({"dial"}, [name for name in TEXT if name not in OF_FILES]))
@pytest.mark.slow
def test_the_cards_figures_are_those_of_the_file(name):
    scored(name)


def test_a_state_that_is_carried_from_story_to_story_costs_nothing():
    """0.024 bits per byte were its price, before rows of training went on from each other."""
    figures, model = pretrained.card("stories")[0]["figures"], glissando.load("stories")
    assert figures["carried"] == pytest.approx(figures["bits_per_byte"], abs=1e-3)
    corpus = build_corpus(StoriesOptions(valid_rows=24), tokenizer_of(model))
    bits = score_carried(model, corpus.batches("valid")).bits(first=500)
    assert bits["carried"] == pytest.approx(bits["reset"], abs=2e-3)


@pytest.mark.slow
def test_the_dials_end_stories_as_often_as_the_card_says():
    front, model = pretrained.card("dial")[0], glissando.load("dial")
    options = from_dict(CORPORA.section(), Run.open("dial").read_config()["data"], "data")
    measured = success(model, build_corpus(options, tokenizer_of(model)))
    assert set(measured) == {"mood", "speech"}
    for dial, ends in front["figures"]["dials"].items():
        for end, share in ends.items():
            assert measured[dial][end] == pytest.approx(share, abs=1.5 / 32)  # one story, where rounding differs


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_the_command_of_a_card_writes_its_text(name, capsys):
    """On other processors a rounding may draw another token, so the beginning is compared."""
    _, text = pretrained.card(name)
    found = re.findall(r"^`glissando (generate .*)`:\n\n((?:>.*\n)+)", text, re.MULTILINE)
    assert len(found) == (2 if name == "dial" else 1)
    for command, quoted in found:
        assert main(shlex.split(command)) == 0
        printed = "\n".join(f"> {line}" for line in capsys.readouterr().out.strip().splitlines())
        assert printed[:200] == quoted[:200]


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
    for name in ("storys", "tests"):  # directories, but no runs
        (tmp_path / name[:-1]).mkdir()
    assert main(["generate", "storys"]) == 1
    assert "Did you mean stories?" in capsys.readouterr().err
    (tmp_path / "storyx").mkdir()
    (tmp_path / "storyx" / "config.yaml").touch()
    assert main(["generate", "storyz"]) == 1
    assert "Did you mean storyx?" in capsys.readouterr().err
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


@pytest.mark.slow
def test_a_training_starts_from_one(tmp_path):
    out = tmp_path / "run"
    assert (
        main(["train", "--from", "stories", "--training.steps", "1", "--data.valid_rows", "4", "--out", str(out)]) == 0
    )
    assert math.isfinite(float(glissando.load(out).embedding.weight.detach().sum()))
    assert not any(path.name.endswith((".lock", ".tmp")) for path in (pretrained.ROOT / "stories").iterdir())


@pytest.mark.parametrize("name", OF_FILES)
@pytest.mark.slow
def test_a_model_of_a_text_that_is_not_in_the_package_asks_for_one(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = f"`glissando evaluate {name} --file FILE`, or `glissando train --from {name} --data.path FILE`"
    for command in (["evaluate", name], ["train", "--from", name, "--training.steps", "1", "--out", "no"]):
        assert main(command) == 1
        assert printed in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("Lily and Tom went to the park. They saw a big dog.\n" * 400)
    given = ["--data.path", "mine.txt"]
    assert main(["train", "--from", name, *given, "--training.steps", "1", "--out", "run"]) == 0
    assert Run.open("run").read_config()["data"]["valid_path"] is None
    capsys.readouterr()
    for more in (["--file", "mine.txt"], given):
        assert main(["evaluate", name, *more]) == 0
        assert "bits per byte" in capsys.readouterr().out
    assert main(["evaluate", name, "--data.path", "none.txt"]) == 1
    assert "there is no file none.txt" in capsys.readouterr().err


def test_a_dial_beyond_its_labels_is_reported_and_a_model_without_one_names_one_that_has(capsys, tmp_path):
    given = ["--max_tokens", "2", "--step", "plain", "--seed", "0", "--control"]
    assert main(["generate", "dial", *given, "mood=5,speech=-1"]) == 0
    printed = capsys.readouterr().err
    assert "mood=5 is outside -1 to 1, where this model was trained." in printed
    assert "speech" not in printed
    assert main(["steer", "stories", "--out", str(tmp_path / "out")]) == 2
    assert "the model of stories has no dials: use `dial` of the package" in capsys.readouterr().err


def test_the_cards_of_models_that_write_have_examples_of_prompts():
    for name in TEXT:
        examples = pretrained.card(name)[0]["prompts"]
        assert len(examples) == 4
        assert all(text.isascii() for text in examples), "quotes as the texts have them"


def test_the_weights_are_int8():
    from safetensors import safe_open

    for name in TEXT:
        with safe_open(pretrained.ROOT / name / MODEL, "pt") as file:
            assert any(key.endswith(".int8") for key in file.keys()), name  # noqa: SIM118
