"""A run directory opens whole or says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from glissando import storage
from glissando.checkpoints import checkpoint_path
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError, RunError
from glissando.loading import load
from glissando.machine import environment, git_state
from glissando.model import LanguageModel
from glissando.runs import Run
from glissando.storage import MANIFEST, publish_directory, read_manifest, verify_manifest
from glissando.trees import save_tree

CONFIG = {"model": {"hidden_size": 8, "mixer": "tau"}, "rates": [1e-3, 2.0], "seed": None, "name": "ä"}
WEIGHTS = {"embedding.weight": torch.arange(6.0).reshape(2, 3), "norm.scale": torch.ones(3)}


def make(path, weights=WEIGHTS):
    run = Run.create(path)
    run.write_tokenizer(ByteTokenizer())
    run.write_model(weights, CONFIG)
    return run


def relist(run):
    """The manifest of somebody who means what is there."""
    names = (*read_manifest(run.path), "metrics.csv")
    storage.write_manifest(run.path, [name for name in names if (run.path / name).is_file()])


def add_checkpoint(run, step, value=1.0):
    path = checkpoint_path(run.path / "checkpoints", step)
    weights = {"model.norm.scale": torch.full((3,), value), "loss.scale": torch.ones(1)}

    def fill(directory):
        save_tree(directory, weights, "model")
        save_tree(directory, {}, "trainer")

    publish_directory(path, fill)
    return path


def flip(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_run_comes_back(tmp_path):
    make(tmp_path / "a")
    run = Run.open(tmp_path / "a")
    assert run.read_config() == CONFIG
    weights = run.read_state_dict()
    assert list(weights) == sorted(WEIGHTS)
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)
    expected = ["config.yaml", "environment.json", "model.safetensors", "tokenizer.json"]
    assert sorted(read_manifest(run.path)) == expected
    assert not [entry for entry in read_manifest(run.path).values() if "previous" in entry]


def test_nothing_is_overwritten(tmp_path):
    make(tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"run exists and is not empty\. Choose a new name: nothing is overwritten"):
        Run.create(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    with pytest.raises(
        RunError,
        match=r"run exists and is not empty \(a training: .*--resume .*run` continues it\)\. Choose a new name",
    ):
        Run.create(tmp_path / "run")
    for anew in (False, True):
        with pytest.raises(RunError, match="nothing is overwritten"):
            Run.create(tmp_path / "notes", anew=anew)
        with pytest.raises(RunError, match="is a file"):
            Run.create(tmp_path / "file", anew=anew)
    assert os.listdir(tmp_path / "notes") == ["mine.txt"]


def test_a_resumed_run_keeps_its_first_environment(tmp_path):
    run = make(tmp_path / "run")
    first = json.loads((run.path / "environment.json").read_text())
    run.note_resumed()
    record = json.loads((run.path / "environment.json").read_text())
    assert len(record.pop("resumed")) == 1
    assert record == first
    Run.open(run.path)


def test_the_environment_says_where_without_absolute_paths(tmp_path, monkeypatch):
    arguments = ["/usr/bin/glissando", "train", "--out=/secret/home/run", f"{os.getcwd()}/data/a.txt", "a=b"]
    monkeypatch.setattr(sys, "argv", arguments)
    record = environment()
    assert record["command"] == ["glissando", "train", "--out=run", os.path.join("data", "a.txt"), "a=b"]
    assert record["versions"]["torch"]
    assert record["cores"] >= 1
    assert record["cpu"]
    assert record["git"] is None or re.fullmatch("[0-9a-f]{40}", record["git"]["commit"])
    assert os.getcwd() not in json.dumps(record)


def test_a_commit_is_asked_for_in_silence(tmp_path, monkeypatch, capfd):
    """Outside a checkout, and where git is not installed."""
    with monkeypatch.context() as patch:
        patch.setattr("glissando.machine.__file__", str(tmp_path / "machine.py"))
        assert git_state() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None
    assert capfd.readouterr() == ("", "")


def test_a_missing_run_suggests_the_nearest(tmp_path):
    make(tmp_path / "tauformer")
    with pytest.raises(RunError, match=r"no run at .*tauforner\. Did you mean .*tauformer\?"):
        Run.open(tmp_path / "tauforner")
    with pytest.raises(RunError, match=r"No run in .* has a similar name"):
        Run.open(tmp_path / "none" / "xyz")
    (tmp_path / "m.ckpt").touch()
    with pytest.raises(RunError, match=r"m\.ckpt is a file"):
        Run.open(tmp_path / "m.ckpt")


def test_a_directory_of_runs_is_no_run(tmp_path):
    make(tmp_path / "one")
    with pytest.raises(RunError, match=r"is not a run: it has no config\.yaml\. It holds runs: one"):
        Run.open(tmp_path)


def test_a_run_killed_early_is_incomplete(tmp_path):
    run = Run.create(tmp_path / "run")
    with pytest.raises(RunError, match=r"incomplete: config\.yaml is missing.*killed before the first"):
        Run.open(run.path)
    run.write_config(CONFIG)
    with pytest.raises(RunError, match=r"incomplete: model\.safetensors is missing.*killed before the first"):
        Run.open(run.path)
    path = add_checkpoint(run, 7)
    with pytest.raises(RunError, match=f"incomplete.*loads instead: {re.escape(str(path))}"):
        Run.open(run.path)


def test_a_checkpoint_opens_as_its_run(tmp_path):
    run = make(tmp_path / "run")
    (run.path / "model.safetensors").unlink()
    opened = Run.open(add_checkpoint(run, 7, value=3.0))
    assert opened.path.samefile(run.path)
    assert opened.read_config() == CONFIG
    weights = opened.read_state_dict()
    assert list(weights) == ["norm.scale"]
    assert weights["norm.scale"].tolist() == [3.0] * 3


def test_a_damaged_checkpoint_names_the_previous(tmp_path):
    run = make(tmp_path / "run")
    good, bad = add_checkpoint(run, 7), add_checkpoint(run, 8)
    flip(bad / "model.safetensors")
    with pytest.raises(RunError, match=f"model.safetensors is damaged.*loads instead: {re.escape(str(good))}"):
        Run.open(bad)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 40), lambda path: path.write_bytes(b"")])
def test_damaged_weights_name_the_file_and_the_checkpoint(tmp_path, damage):
    run = make(tmp_path / "run")
    damage(run.path / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged.*no complete checkpoint"):
        Run.open(run.path).read_state_dict()
    path = add_checkpoint(run, 7)
    with pytest.raises(RunError, match=rf"model\.safetensors is damaged.*{re.escape(str(path))}"):
        Run.open(run.path).read_state_dict()


def test_pickled_weights_are_refused(tmp_path):
    run = make(tmp_path / "run")
    torch.save(WEIGHTS, run.path / "model.safetensors")
    relist(run)
    with pytest.raises(RunError, match=r"model\.safetensors is a pickle"):
        Run.open(run.path).read_state_dict()


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "tokenizer.json"])
def test_damage_to_a_small_file_is_noticed_on_opening(tmp_path, name):
    run = make(tmp_path / "run")
    flip(run.path / name, 0)
    with pytest.raises(RunError, match=f"{re.escape(name)} is damaged"):
        Run.open(run.path)


def test_a_copy_without_the_record_of_its_making_opens(tmp_path):
    run = make(tmp_path / "run")
    (run.path / "environment.json").unlink()
    Run.open(run.path).read_state_dict()
    (run.path / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer\.json is missing.*Copy it back from where the run was"):
        Run.open(run.path)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make("~/run").path == tmp_path / "run"
    assert Run.open("~/run").path == tmp_path / "run"


def test_metrics_may_grow(tmp_path):
    run = make(tmp_path / "run")
    (run.path / "metrics.csv").write_text("step,loss\n")
    relist(run)
    assert "metrics.csv" in read_manifest(run.path)
    (run.path / "metrics.csv").write_text("step,loss\n1,2\n")
    Run.open(run.path).read_state_dict()


def test_a_configuration_is_plain_yaml(tmp_path):
    run = Run.create(tmp_path / "run")
    with pytest.raises(ConfigError, match="plain values"):
        run.write_config({"a": object()})
    run.write_config(CONFIG)
    (run.path / MANIFEST).unlink()
    (run.path / "config.yaml").write_text("a: [")
    with pytest.raises(RunError, match=r"config\.yaml is malformed"):
        run.read_config()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_replacing_the_weights_leaves_a_run_that_opens(tmp_path, monkeypatch, moment):
    """Killed between listing the new weights and putting them in place, or before the last manifest."""
    run, new = make(tmp_path / "run"), {"norm.scale": torch.zeros(3)}

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    if moment == "after":
        write = Run.write_tensors
        monkeypatch.setattr(Run, "write_tensors", lambda *args: (write(*args), killed()))
    else:
        announce = Run._announce
        monkeypatch.setattr(Run, "_announce", lambda *args: (announce(*args), killed()))
    with pytest.raises(Killed):
        run.write_model(new, CONFIG)
    assert set(Run.open(run.path).read_state_dict()) == set(new if moment == "after" else WEIGHTS)
    flip(run.path / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        Run.open(run.path).read_state_dict()


def test_a_full_disk_leaves_the_old_weights(tmp_path):
    run = make(tmp_path / "run")
    code = (
        "import resource, sys, torch; from glissando.runs import Run\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "Run(__import__('pathlib').Path(sys.argv[1])).write_model({'a': torch.zeros(50_000)}, {})"
    )
    (run.path / "config.yaml").write_text("{}\n")
    relist(run)
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False)
    assert "The old model.safetensors is kept" in done.stderr
    verify_manifest(run.path, ["model.safetensors"])
    assert set(Run.open(run.path).read_state_dict()) == set(WEIGHTS)
    assert not [name for name in os.listdir(run.path) if name.startswith(".")]


def test_importing_runs_does_not_import_lightning():
    code = "import sys, glissando.runs; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_does_not_stand_in_for_what_it_has_no_copy_of(tmp_path):
    run = make(tmp_path / "run")
    path = add_checkpoint(run, 7)
    for damage in (lambda path: path.write_text("x"), lambda path: path.unlink()):
        damage(run.path / "tokenizer.json")
        for place in (run.path, path):
            with pytest.raises(RunError, match=r"tokenizer\.json is (damaged|missing).* Put the tokenizer\.json"):
                Run.open(place)
    (run.path / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"config\.yaml is missing\. Put the config\.yaml"):
        Run.open(run.path)


def test_damaged_weights_are_not_called_unfit(tmp_path):
    model = LanguageModel.from_config({"hidden_size": 8, "mixer": {"kind": "attention", "heads": 2}})
    model.save(tmp_path / "run")
    flip(tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunError, match=rf"^{re.escape(str(tmp_path))}/run/model\.safetensors is damaged"):
        load(tmp_path / "run")


@pytest.mark.parametrize("text", ["{x: 1}", "{model: null}", "{model: [1]}"])
def test_a_configuration_without_a_model_is_told(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    storage.write_manifest(tmp_path)
    with pytest.raises(RunError, match=r"config\.yaml describes no model"):
        load(tmp_path)


def test_a_manifest_that_is_written_meanwhile_is_not_damage(tmp_path, monkeypatch):
    file, read = tmp_path / "a", storage.record
    file.write_bytes(b"old")
    storage.write_manifest(tmp_path, ["a"])

    def overtaken(path):
        monkeypatch.setattr(storage, "record", read)
        file.write_bytes(b"new")  # after the manifest was read, before the file is
        storage.write_manifest(tmp_path, ["a"])
        return read(path)

    monkeypatch.setattr(storage, "record", overtaken)
    verify_manifest(tmp_path, ["a"])
    file.write_bytes(b"bad")
    with pytest.raises(RunError, match="is damaged"):
        verify_manifest(tmp_path, ["a"])


def test_a_manifest_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    storage.write_manifest(tmp_path, ["a"])
    seen, opened = [], type(tmp_path).open
    monkeypatch.setattr(type(tmp_path), "open", lambda path, *mode: seen.append(path.name) or opened(path, *mode))
    read_manifest(tmp_path)
    assert seen == [MANIFEST]
