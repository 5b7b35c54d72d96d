"""The verb `grow`, going on from what it made, and stages that grow."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from subjects import random_ids
from training_runs import PLAIN, configuration, metrics

import glissando
from glissando.cli import main
from glissando.config import from_dict, merge
from glissando.errors import ConfigError
from glissando.presets import load_preset
from glissando.runs import Run
from glissando.stages import plans, train_stages
from glissando.training.config import RunConfig
from glissando.training.fit import train
from glissando.training.language_task import LanguageTask

STAGED = {
    "stages": [
        {"name": "small", "training": {"steps": 4}},
        {"name": "large", "grow": {"width": 2, "layers": 1}, "training": {"steps": 3}, "data": {"seed": 1}},
        {"name": "larger", "grow": {"ffn": 2}, "training": {"steps": 2}},
        {"name": "calm", "training": {"steps": 2, "optimizer": {"learning_rate": 1e-4}}},
    ]
}


@pytest.fixture(autouse=True)
def unsampled(monkeypatch):
    """Sampled text takes longer than these trainings."""
    monkeypatch.setattr(LanguageTask, "sample", lambda self, model: "")


def assert_same_logits(one: Path, other: Path) -> None:
    small, large = glissando.load(one), glissando.load(other)
    ids = random_ids(small, 2, 16, 0)
    with torch.no_grad():
        torch.testing.assert_close(large(ids)[0], small(ids)[0], rtol=0, atol=1e-5)


def test_the_verb_grows_a_run_and_train_goes_on_from_it(tmp_path, capsys):
    small = train(configuration(tmp_path, PLAIN, {"training.steps": 4}), tmp_path / "small").path
    out = tmp_path / "large"
    assert main(["grow", str(small), "--width=2", "--layers=1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{glissando.load(small).num_parameters():,} -> {glissando.load(out).num_parameters():,}" in printed
    assert f"glissando train --from {out}" in printed
    assert_same_logits(small, out)
    more = ["--training.steps=3", "--training.schedule.warmup_steps=0"]  # its text is that of the small run
    assert main(["train", "--from", str(out), "--out", str(tmp_path / "more"), *more]) == 0
    config = Run.open(tmp_path / "more").read_config()
    assert config["model"]["hidden_size"] == 32
    assert config["grown"]["depth.blocks.0.mlp.up.weight"] == [0.5, 4.0]
    # Adam's moments came along: the loss of the first steps is no higher than where the small model ended.
    assert float(metrics(tmp_path / "more")[0]["train_loss"]) < float(metrics(small)[-1]["train_loss"]) + 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width=2"], "--out is missing"),
        (["--width=0", "--out=OUT"], "width: expected a number of at least 1, got 0"),
        (["--steps=1", "--out=OUT"], "this one is discrete"),
        (["--widht=2", "--out=OUT"], "Did you mean --width"),
    ],
    ids=str,
)
def test_mistakes_leave_nothing_behind(arguments, message, tmp_path, capsys):
    glissando.LanguageModel.from_config(configuration(tmp_path).model).save(tmp_path / "run")
    values = [argument.replace("OUT", str(tmp_path / "out")) for argument in arguments]
    assert main(["grow", str(tmp_path / "run"), *values]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_was_never_trained_grows_without_an_optimizer(tmp_path, capsys):
    glissando.LanguageModel.from_config(configuration(tmp_path).model).save(tmp_path / "run")
    assert main(["grow", str(tmp_path / "run"), "--width=2", f"--out={tmp_path / 'out'}"]) == 0
    assert "the optimizer starts with an empty one" in capsys.readouterr().err
    assert_same_logits(tmp_path / "run", tmp_path / "out")


def staged(folder: Path, *updates: dict[str, Any]) -> RunConfig:
    return configuration(folder, PLAIN, {"training": {"steps": 4, "log_every": 1}}, STAGED, *updates)


@pytest.mark.slow
def test_stages_grow(tmp_path):
    runs = train_stages(staged(tmp_path), tmp_path / "out")
    sizes = [(m.config.hidden_size, m.config.depth.layers) for m in (glissando.load(run.path) for run in runs)]
    assert sizes == [(16, 2), (32, 3), (32, 3), (32, 3)]
    assert_same_logits(runs[0].path, tmp_path / "out" / "2-large-start")
    assert_same_logits(runs[1].path, tmp_path / "out" / "3-larger-start")
    hidden = [Run.open(run.path).read_config()["model"]["block"]["mlp"]["hidden"] for run in runs]
    assert hidden == [None, 96, 192, 192]
    # What growth left to remember is kept by stages that do not grow.
    assert Run.open(runs[3].path).read_config()["grown"]["embedding.weight"] == [1.0, 2.0]
    assert Run.open(runs[3].path).read_config()["grown"]["depth.blocks.0.mlp.up.weight"] == [0.5, 8.0]


@pytest.mark.slow
def test_stages_that_grow_resume(tmp_path):
    """The second stage and its start are gone, as if the machine had stopped between them: the rest is made again."""
    out = tmp_path / "out"
    train_stages(staged(tmp_path), out)
    with (out / "4-calm" / "metrics.csv").open() as file:
        before = [row["train_loss"] for row in csv.DictReader(file)]
    for name in ("2-large", "3-larger", "3-larger-start", "4-calm"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    train_stages(staged(tmp_path), out)
    with (out / "4-calm" / "metrics.csv").open() as file:
        assert [row["train_loss"] for row in csv.DictReader(file)] == before


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"name": "a", "grow": {"width": 2}}], r"stages\[1\] \(a\): grow makes the model of the stage before"),
        ([{"name": "a"}, {"name": "b", "grow": {"widht": 2}}], "Did you mean 'width'"),
        ([{"name": "a"}, {"name": "b", "grow": {"steps": 2}}], r"stages\[2\] \(b\): .*this one is discrete"),
    ],
)
def test_mistakes_in_growth_show_before_any_training(tmp_path, stages, message):
    with pytest.raises(ConfigError, match=message):
        train_stages(staged(tmp_path, {"stages": stages}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_example_of_growth_is_one_that_trains():
    values = yaml.safe_load((Path(__file__).parent.parent / "examples" / "grow.yaml").read_text())
    preset = load_preset(values["preset"])
    config = from_dict(RunConfig, merge(RunConfig, preset, values))
    widths = [stage.model.hidden_size for _, stage, _ in plans(config, Path("out"))]
    assert widths == [32, 64, 128]
    assert [plan.growth is None for plan in plans(config, Path("out"))] == [True, False, False]


def test_the_options_of_the_command_line_are_those_of_growth(capsys):
    with pytest.raises(SystemExit):
        main(["grow", "--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in ("width", "heads", "ffn", "state", "layers", "steps", "head_size"))
    assert "--vocab" not in printed
