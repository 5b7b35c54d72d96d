"""The recipes of 124M parameters: of one size, and each trains by the command line on generated ids."""

from __future__ import annotations

import pytest
import yaml

from glissando.cli import main
from glissando.presets import load_preset, preset_names, preset_parameters
from glissando.runs import Run

RECIPES = [name for name in preset_names() if name.endswith("-124m")]


def test_the_recipes_are_of_one_size_and_differ_in_the_model_alone():
    counts = {name: preset_parameters(name) for name in RECIPES}
    assert len(counts) == 5
    assert max(counts.values()) <= 1.02 * min(counts.values()), counts
    first, *others = [{key: load_preset(name)[key] for key in ("data", "training")} for name in RECIPES]
    assert all(other == first for other in others)
    data, training = first["data"], first["training"]
    assert (data["kind"], data["tokenizer"], data["seq_len"] * data["batch_size"]) == ("hub", "gpt2", 2**19)
    assert (training["precision"], training["compile"]) == ("bf16-mixed", True)
    assert all(load_preset(name)["model"]["vocab_size"] >= 50257 for name in RECIPES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_for_two_steps_on_generated_ids(name, tmp_path, capsys):
    """The whole model, on numbers below GPT-2's 50,257, without what needs a network, a GPU or a compiler."""
    config = tmp_path / "recipe.yaml"
    preset = load_preset(name)
    config.write_text(yaml.safe_dump({key: preset[key] for key in ("model", "training")}))
    run = tmp_path / "run"
    given = "--data.kind mqar --data.vocabulary 50257 --data.seq_len 64 --data.batch_size 2 --data.valid_rows 2"
    given += " --training.steps 2 --training.accumulate 1 --training.compile false --training.accelerator cpu"
    assert main(["train", "--config", str(config), *given.split(), "--out", str(run)]) == 0, capsys.readouterr()
    assert Run.open(run).read_config()["model"]["vocab_size"] == 50304
    assert sum(value.numel() for value in Run.open(run).read_state_dict().values()) >= preset_parameters(name)
