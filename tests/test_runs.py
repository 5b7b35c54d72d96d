"""A run directory opens whole or says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import machine
import pytest
import torch

from glissando import runs, storage
from glissando.checkpoints import checkpoint_path, latest_checkpoint, point_to
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError, RunError
from glissando.loading import load
from glissando.machine import environment
from glissando.model import LanguageModel
from glissando.runs import Run, resumed_environment
from glissando.storage import MANIFEST, read_manifest
from glissando.training.state import TrainState

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
    path, before = checkpoint_path(run.path, step), latest_checkpoint(run.path)
    weights = {"model.norm.scale": torch.full((3,), value), "loss.scale": torch.ones(1)}
    files = Run(run.path, before).small_files()
    TrainState(step=step, model=weights).save(path, files)
    point_to(run.path, step, -1)
    return path


def begun(path):
    run = Run.create(path)
    run.write_tokenizer(ByteTokenizer())
    run.write_config(CONFIG)
    return run


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
    first = make(tmp_path / "run").small_files()["environment.json"]
    record = json.loads(resumed_environment(resumed_environment(first, {}), {"texts": {}}))
    assert (len(record.pop("resumed")), record.pop("texts")) == (2, {})
    assert record == json.loads(first)


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
        assert machine.git_state() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.git_state() is None
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


def test_until_training_ends_a_run_is_what_latest_names(tmp_path):
    run = begun(tmp_path / "run")
    for step in (7, 8):
        path = add_checkpoint(run, step, value=float(step))
        opened = Run.open(run.path)
        assert opened.checkpoint == path
        assert opened.read_config() == CONFIG
        assert opened.read_tokenizer() is not None
        weights = opened.read_state_dict()
        assert list(weights) == ["norm.scale"]
        assert weights["norm.scale"].tolist() == [step] * 3
    (run.path / "config.yaml").write_text("damaged")  # which its checkpoints have copies of
    assert Run.open(path).read_config() == CONFIG
    run.finish(checkpoint_path(run.path, 7), {"weights": "best"})
    assert Run.open(run.path).checkpoint is None
    assert Run.open(run.path).read_config() == CONFIG
    assert Run.open(run.path).read_state_dict()["norm.scale"].tolist() == [7.0] * 3


def test_a_damaged_checkpoint_names_the_previous(tmp_path):
    run = begun(tmp_path / "run")
    good, bad = add_checkpoint(run, 7), add_checkpoint(run, 8)
    flip(bad / "model.safetensors")
    for path in (bad, run.path):
        with pytest.raises(RunError, match=f"model.safetensors is damaged.*loads instead: {re.escape(str(good))}"):
            Run.open(path).read_state_dict()
    flip(bad / "tokenizer.json")
    with pytest.raises(RunError, match=f"tokenizer.json is damaged.*loads instead: {re.escape(str(good))}"):
        Run.open(run.path)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 40), lambda path: path.write_bytes(b"")])
def test_damaged_weights_name_the_file_and_the_checkpoint(tmp_path, damage):
    run = make(tmp_path / "run")
    damage(run.path / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged.*no complete checkpoint"):
        Run.open(run.path).read_state_dict()
    path = add_checkpoint(run, 7)
    with pytest.raises(RunError, match=rf"model\.safetensors is damaged.*{re.escape(str(path))}"):
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
    with pytest.raises(RunError, match=r"tokenizer\.json is missing.*copy the file back from where the run was"):
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


@pytest.mark.parametrize("write", ["write_atomic", "save_tensors", "write_manifest"])
def test_killed_at_its_end_a_run_is_what_latest_names(tmp_path, monkeypatch, write):
    run = begun(tmp_path / "run")
    path = add_checkpoint(run, 7, value=3.0)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(runs, write, killed)
        with pytest.raises(Killed):
            run.finish(path, {})
    assert Run.open(run.path).checkpoint == path
    run.finish(path, {})
    assert Run.open(run.path).read_state_dict()["norm.scale"].tolist() == [3.0] * 3
    assert {"model.safetensors", "summary.json"} <= read_manifest(run.path).keys()


def test_a_full_disk_at_the_end_leaves_the_run_that_latest_names(tmp_path):
    resource = pytest.importorskip("resource", reason="needs limits of POSIX")
    run = begun(tmp_path / "run")
    weights = {"model.a": torch.zeros(50_000)}
    TrainState(step=3, model=weights).save(path := checkpoint_path(run.path, 3), run.small_files())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as good as full: a file of more fails at its end
    try:
        with pytest.raises(RunError, match=r"No model\.safetensors was written"):
            run.finish(path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(Run.open(run.path).read_state_dict()) == {"a"}
    assert not [name for name in os.listdir(run.path) if name.startswith(".")]


@pytest.mark.slow
def test_importing_runs_does_not_import_lightning():
    code = "import sys, glissando.runs; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_damaged_weights_are_not_called_unfit(tmp_path):
    model = LanguageModel.from_config({"hidden_size": 8, "mixer": {"kind": "attention", "heads": 2}})
    model.save(tmp_path / "run")
    flip(tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunError, match=rf"^{re.escape(str(tmp_path))}/run/model\.safetensors is damaged"):
        load(tmp_path / "run")


@pytest.mark.parametrize("text", ["{x: 1}", "{model: null}", "{model: [1]}"])
def test_a_configuration_without_a_model_is_reported(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    storage.write_manifest(tmp_path)
    with pytest.raises(RunError, match=r"config\.yaml describes no model"):
        load(tmp_path)


def test_a_manifest_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    storage.write_manifest(tmp_path, ["a"])
    seen, opened = [], type(tmp_path).open
    monkeypatch.setattr(type(tmp_path), "open", lambda path, *mode: seen.append(path.name) or opened(path, *mode))
    read_manifest(tmp_path)
    assert seen == [MANIFEST]
