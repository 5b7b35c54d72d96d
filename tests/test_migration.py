"""Configurations of older runs open as they were meant: for every preset, today's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import glissando
from glissando import storage
from glissando.config import from_dict, merge
from glissando.migration import migrated
from glissando.model import LanguageModel
from glissando.presets import load_preset, preset_names
from glissando.runs import Run
from glissando.training.config import RunConfig

BEFORE = yaml.safe_load((Path(__file__).parent / "data/configurations_before.yaml").read_text())


#: what presets had then, where they have changed since
THEN: dict[str, dict[str, Any]] = {name: {"data.valid_stories": 256} for name in ("gpt", "hybrid-ode")}
THEN |= {
    name: {"training.optimizer": {"kind": "adamw", "learning_rate": 4e-3 if "minimal" in name else 2e-3, "beta2": 0.99}}
    for name in BEFORE["presets"]
    if name.endswith("-nano")
}
for name in ("continuous-transformer", "tauformer", "tauformer-100m"):  # now with the text of their publications
    THEN.setdefault(name, {}).update(
        {"data": {"kind": "stories", "tokenizer": "bytes"}, "training.sample_prompt": None}
    )
for name in THEN:
    if name.endswith("-nano") and name != "transformer-nano":
        THEN[name]["model.depth.shortcuts"] = False


def before(differences: dict[str, Any]) -> dict[str, Any]:
    """A whole config.yaml as the previous version wrote it."""

    def put(over: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        merged = dict(over)
        for key, value in values.items():
            inside = isinstance(value, dict) and not key.startswith("=")
            merged[key.removeprefix("=")] = put(over.get(key, {}), value) if inside else value
        return merged

    return put(BEFORE["defaults"], differences)


def today(*updates: dict[str, Any]) -> RunConfig:
    return from_dict(RunConfig, merge(RunConfig, {"training": {"steps": 100, "precision": "32-true"}}, *updates))


def test_every_preset_of_then_is_here_today():
    assert set(BEFORE["presets"]) <= set(preset_names())


@pytest.mark.parametrize("name", BEFORE["presets"])
def test_a_preset_as_it_was_written_is_todays(name):
    preset = {key: value for key, value in load_preset(name).items() if key != "about"}
    read = from_dict(RunConfig, migrated(before(BEFORE["presets"][name])), "config.yaml")
    assert read == today(preset, THEN.get(name, {}), {"preset": name})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "text",
            {
                "data": {"kind": "text", "path": "book.txt", "stride": 64},
                "data.tokenizer": {"kind": "bpe", "vocab_size": 512},
            },
        ),
        (
            "jsonl",
            {
                "data": {"kind": "jsonl", "path": "a.jsonl", "tokenizer": {"kind": "file", "path": "t.json"}},
                "training.schedule": "constant",
            },
        ),
        (
            "tau",
            {
                "model.mixer": "tau",
                "training": {"calibration": {"kind": "drift", "every": 7}, "schedule": {"kind": "plateau", "cuts": 2}},
            },
        ),
        (
            "flow",
            {
                "model.mixer": ["spectral", {"kind": "attention", "heads": 2}],
                "model.depth": {
                    "kind": "flow", "n_steps": 4, "control": ["mood", "speech"], "method": "heun", "alpha": 0.2,
                },
            },
        ),
    ],
)  # fmt: skip
def test_sections_that_have_become_unions(name, options):
    assert from_dict(RunConfig, migrated(before(BEFORE["others"][name])), "config.yaml") == today(options)


@pytest.mark.parametrize("name", [*BEFORE["presets"], *BEFORE["others"]])
def test_what_is_written_today_stays_as_it_is(name):
    written = migrated(before({**BEFORE["presets"], **BEFORE["others"]}[name]))
    assert migrated(written) == written
    config = from_dict(RunConfig, written).as_dict()
    assert migrated(config) == config


def test_stages_are_migrated_too():
    stages = [{"name": "first", "data": {"corpus": "shift", "shift": {"by": 2}}, "training": {"steps": 3}}]
    read = from_dict(RunConfig, migrated({**before({}), "stages": stages}))
    assert read.stages[0].data == {"kind": "shift", "by": 2}


def test_a_run_with_an_older_configuration_opens(tmp_path):
    small = {"hidden_size": 16, "depth": {"layers": 2, "shortcuts": False}}
    model = LanguageModel.from_preset("hybrid-ode-nano", **small)
    model.save(tmp_path / "run")
    old = before(BEFORE["presets"]["hybrid-ode-nano"])
    old["model"] |= {"hidden_size": 16, "depth": old["model"]["depth"] | {"layers": 2}}
    run = Run(tmp_path / "run")
    run.write_config(old)
    storage.write_manifest(run.path)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(glissando.load(tmp_path / "run")(ids)[0], model.eval()(ids)[0])


def test_an_option_that_is_newer_than_the_migration_stays():
    """Only options of other kinds were written with their defaults; one that the migration does not know is kept."""
    depth = {"kind": "discrete", "layers": 2, "alpha": 0.5, "newer": 1}
    assert migrated({"model": {"depth": depth}})["model"]["depth"] == {"kind": "discrete", "layers": 2, "newer": 1}
