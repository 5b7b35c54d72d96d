"""The recipes of 124M parameters: of one size, and each trains by the command line on generated ids."""

from __future__ import annotations

import json

import pytest
import yaml

from glissando.cli import main
from glissando.presets import load_preset, preset_names, preset_note
from glissando.runs import Run

RECIPES = [name for name in preset_names() if name.endswith("-124m")]


def test_the_recipes_are_of_one_size_and_differ_in_the_model_alone():
    counts = {name: preset_note(name, "parameters") for name in RECIPES}
    assert len(counts) == 6
    assert max(counts.values()) <= 1.02 * min(counts.values()), counts
    first, *others = [{key: load_preset(name)[key] for key in ("data", "training")} for name in RECIPES]
    assert all(other == first for other in others)
    data, training = first["data"], first["training"]
    assert (data["kind"], data["tokenizer"], data["seq_len"] * data["batch_size"]) == ("hub_stream", "gpt2", 2**19)
    assert (training["precision"], training["compile"]) == ("bf16-mixed", True)
    assert all(load_preset(name)["model"]["vocab_size"] >= 50257 for name in RECIPES)


@pytest.mark.filterwarnings("ignore")
def test_the_recipes_data_stream_by_the_same_command(tmp_path, monkeypatch, capsys):
    """A small model with the recipe's options, on a local data set that the library streams."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder := tmp_path / "set").mkdir()
    lines = [json.dumps({"text": f"Page {i} of a web that has many pages. " * 3, "score": 3.5}) for i in range(200)]
    for number in range(2):
        (folder / f"train-{number}.jsonl").write_text("\n".join(lines[100 * number : 100 * number + 100]))
    small = "--model.vocab_size 256 --model.hidden_size 16 --model.depth.layers 1 --model.mixer.heads 2"
    small += " --data.seq_len 16 --data.batch_size 16"
    arguments = f"--data.name {folder} --data.subset null --data.tokenizer bytes --data.max_valid_bytes 500"
    arguments += " --training.steps 2 --training.compile false --training.accelerator cpu --training.precision 32-true"
    run = tmp_path / "run"
    command = ["train", "--preset", "transformer-124m", *small.split(), *arguments.split(), "--out", str(run)]
    assert main(command) == 0, capsys.readouterr()
    assert Run.open(run).read_config()["data"]["kind"] == "hub_stream"
    assert Run.open(run).read_config()["training"]["accumulate"] == 16
    assert main(["evaluate", str(run)]) == 0


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_for_two_steps_on_generated_ids(name, tmp_path, capsys):
    """The whole model, on numbers below GPT-2's 50,257, without what needs a network, a GPU or a compiler."""
    config = tmp_path / "recipe.yaml"
    preset = load_preset(name)
    config.write_text(yaml.safe_dump({key: preset[key] for key in ("model", "training")}))
    run = tmp_path / "run"
    arguments = "--data.kind mqar --data.vocabulary 50257 --data.seq_len 64 --data.batch_size 2 --data.valid_rows 2"
    arguments += " --training.steps 2 --training.accumulate 1 --training.compile false --training.accelerator cpu"
    assert main(["train", "--config", str(config), *arguments.split(), "--out", str(run)]) == 0, capsys.readouterr()
    assert Run.open(run).read_config()["model"]["vocab_size"] == 50304
    assert sum(value.numel() for value in Run.open(run).read_state_dict().values()) >= preset_note(name, "parameters")
