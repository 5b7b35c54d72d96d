"""Options are merged along their types: what a section is called inside the package means nothing inside a user's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from glissando import loading
from glissando.cli import main
from glissando.config import Registry, from_dict, merge, to_dict, unregistered
from glissando.errors import ConfigError, RunError
from glissando.mixers import MIXERS, AttentionConfig
from glissando.mixers.attention import Attention
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import CONFIG, Run
from glissando.training.config import RunConfig
from glissando.training.schedules import SCHEDULES, WarmupCosineOptions

#: names of sections of a run
SECTIONS = ("schedule", "optimizer", "tokenizer", "data", "depth", "mixer", "calibration", "model", "training")


@pytest.fixture
def registered(monkeypatch):
    """The options of a mixer `borrowing`, each named as a section of a run is, some of other types."""
    monkeypatch.setattr(MIXERS, "_classes", dict(MIXERS._classes))
    monkeypatch.setattr(MIXERS, "options", dict(MIXERS.options))

    @dataclass
    class Borrowing(AttentionConfig):
        schedule: str = "none"
        optimizer: str = "none"
        tokenizer: str = "none"
        calibration: str = "none"
        model: str = "none"
        training: str = "none"
        data: list[str] = field(default_factory=list)
        depth: int = 1
        mixer: dict[str, float] = field(default_factory=dict)
        warmup: SCHEDULES.section() | None = None  # type: ignore[valid-type]

    @MIXERS.register("borrowing", Borrowing)
    class Borrowed(Attention):
        pass

    return Borrowing


VALUES: dict[str, Any] = {
    "schedule": "cosine", "optimizer": "muon", "tokenizer": "words.json", "calibration": "fixed", "model": "m",
    "training": "t", "data": ["text", "stories"], "depth": 3, "mixer": {"a.b": 0.5, "kind": 2.0},
}  # fmt: skip


def test_every_name_of_a_section_is_a_users_to_give(registered, tmp_path, capsys):
    wanted = {"kind": "borrowing", **VALUES}
    model = LanguageModel.from_preset("transformer-nano", mixer=wanted, depth={"layers": 1}, hidden_size=16)
    assert vars(model.config.mixer).items() >= VALUES.items()
    model.save(tmp_path / "run")
    again = loading.load(tmp_path / "run", {"mixer.depth": 4, "mixer": {"mixer": {"a.b": 1.0}, "schedule": "cosine"}})
    assert again.config.mixer.depth == 4
    assert again.config.mixer.mixer == {"a.b": 1.0, "kind": 2.0}
    assert to_dict(model.config)["mixer"].items() >= wanted.items()

    lines = [
        f"--model.mixer.{name}={value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)}"
        for name, value in VALUES.items()
    ]
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({"model": {"mixer": wanted}}))
    for arguments in (["--model.mixer", "borrowing", *lines], ["--config", str(tmp_path / "file.yaml")]):
        assert main(["train", "--preset", "transformer-nano", "--print_config", *arguments]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)["model"]["mixer"]
        assert printed.items() >= wanted.items()


def test_a_section_inside_a_users_mixer_is_merged_by_its_own_type(registered, capsys):
    kept = {"model": {"mixer": {"kind": "borrowing", "warmup": "constant"}}}
    changed = merge(RunConfig, kept, {"model.mixer.warmup.warmup_steps": 7})
    section = from_dict(RunConfig, changed).model.mixer.warmup
    assert (SCHEDULES.kind_of(section), section.warmup_steps) == ("constant", 7)
    command = ["train", "--print_config", "--model.mixer.warmup", "constant", "--model.mixer.warmup.warmup_steps", "7"]
    assert main([*command, "--model.mixer", "borrowing"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["mixer"]["warmup"] == to_dict(section, SCHEDULES.section())


def test_a_name_waits_until_its_section_is_known(registered):
    """On the command line the kind may be the preset's, which is merged later."""
    asked = merge(RunConfig, {"model.mixer.warmup": "constant"}, {"model.mixer.warmup.warmup_steps": 7})
    whole = merge(RunConfig, {"model": {"mixer": "borrowing"}}, asked)
    assert whole == {"model": {"mixer": {"kind": "borrowing", "warmup": {"kind": "constant", "warmup_steps": 7}}}}


def test_another_kind_takes_the_place_of_a_section_and_keeps_what_all_kinds_have():
    before = {"data": {"kind": "text", "path": "a.txt", "seq_len": 64}}
    assert merge(RunConfig, before, {"data": "stories"}) == {"data": {"kind": "stories", "seq_len": 64}}
    assert merge(RunConfig, before, {"data.valid_fraction": 0.2, "data": {"kind": "text"}})["data"] == {
        "kind": "text", "path": "a.txt", "seq_len": 64, "valid_fraction": 0.2,
    }  # fmt: skip
    assert merge(ModelConfig, {"mixer.heads": 2, "mixer": "tau"}) == {"mixer": {"kind": "tau", "heads": 2}}


def test_names_with_points_that_are_no_sections_are_kept():
    grown = {"grown": {"depth.blocks.0.mlp.up.weight": [0.5, 8.0, 1.0]}}
    assert merge(RunConfig, grown, {"data.path": "b.txt"}) == {**grown, "data": {"path": "b.txt"}}


def test_kinds_that_nothing_registers_are_found_in_sections_alone(registered):
    own = {"kind": "borrowing", **VALUES, "warmup": "slow"}
    stages = [{"name": "one", "model": {"mixer": ["attention", "lost"]}, "data": "gone"}]
    config = {"model": {"mixer": own, "depth": "deep"}, "stages": stages, "preset": {"mixer": "x"}}
    assert unregistered(RunConfig, config) == ["schedule 'slow'", "depth 'deep'", "mixer 'lost'", "corpus 'gone'"]


def test_a_run_opens_without_what_only_its_training_needs(tmp_path):
    run = Run(tmp_path)
    config = {"model": {"mixer": "attention"}, "training": {"schedule": "lost"}}
    (tmp_path / CONFIG).write_text(yaml.safe_dump(config))
    assert run.read_config() == config
    with pytest.raises(RunError, match="needs schedule 'lost', which nothing has registered: give --import FILE"):
        run.read_config(to_train=True)


def test_options_of_two_names_are_refused_and_so_are_those_of_none():
    registry: Registry[Any] = Registry("thing", "one")
    registry.add("one", WarmupCosineOptions, "module:One")
    with pytest.raises(ConfigError, match="thing 'two' has the options of thing 'one'"):
        registry.add("two", WarmupCosineOptions, "module:Two")
    with pytest.raises(ConfigError, match="expected the options of a registered thing, got AttentionConfig"):
        registry.kind_of(AttentionConfig())


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"imports": [5]}, r"imports\[1\]: expected a text, got 5"),
        ({"imports": "mine.py"}, "imports: expected a list, got 'mine.py'"),
        ({"model": {"mixer": {"kind": [1]}}}, r"unknown mixer"),
        ({"model": {5: 3}}, "5"),
        ({"model": [5]}, "model: expected"),
    ],
)
def test_values_of_another_type_are_reported(values: dict[Any, Any], error: str, tmp_path, capsys):
    with pytest.raises(ConfigError, match=error):
        from_dict(RunConfig, merge(RunConfig, values))
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "--print_config", "--config", str(tmp_path / "file.yaml")]) == 2


def test_options_in_the_place_of_their_type_are_refused():
    """Two programs lost their preset so, without an error."""
    with pytest.raises(TypeError, match="merge takes the type of the options first"):
        merge({"preset": "delta-nano", "model": {"hidden_size": 8}}, {"data": {"seq_len": 8}})
