"""What a run reads is what it was trained on, and one process alone trains in it."""

from __future__ import annotations

import json
import os

import pytest
from training_runs import configuration, crash_in

import glissando
from glissando import run_files as files
from glissando.checkpoints import latest_checkpoint
from glissando.cli import main
from glissando.config import from_dict
from glissando.errors import ConfigError, DataError, RunError
from glissando.runs import Run
from glissando.storage import read_manifest, write_manifest
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train


def test_resuming_takes_the_text_that_it_was_trained_on(tmp_path, monkeypatch):
    """A moved text is named, another one is refused, and a run without a record of it resumes as it always did."""
    run, words = tmp_path / "run", tmp_path / "words.txt"
    with monkeypatch.context() as patched:
        crash_in(patched, 2, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            train(configuration(tmp_path, {"training": {"steps": 2, "save_every": 1}}), run)
    moved = words.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"no file .*words\.txt.*--resume .*run --data\.path FILE"):
        resume(run)
    words.write_text(moved.read_text() + "!")
    with pytest.raises(
        RunError, match=r"words\.txt is not the text that .*run was trained on: it has [\d,]+ bytes with"
    ):
        resume(run)
    with pytest.raises(ConfigError, match=r"has no option data\.name"):
        resume(run, texts={"data.name": str(moved)})
    assert main(["train", f"--resume={run}", f"--data.path={moved}"]) == 0
    assert Run.open(run).read_config()["data"]["path"] == str(moved)
    words.unlink()
    resume(run)
    moved.write_text(moved.read_text() + "!")
    for folder in (run, latest_checkpoint(run)):
        (folder / "environment.json").unlink()
        write_manifest(folder, [name for name in read_manifest(folder) if name != "environment.json"])
    with pytest.raises(RunError, match="no digest of it"):
        resume(run)
    resume(run, texts={"data.path": str(moved)})


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_run_on_a_pattern_knows_every_file(kind, tmp_path):
    """One that is changed, new, lost or vanished is named; all of them may have moved together."""
    suffix = "txt" if kind == "text" else kind
    (folder := tmp_path / "corpus").mkdir()
    for name in "abc":
        lines = [f"{name}{i} and some words" for i in range(60)]
        lines = [json.dumps({"text": line}) for line in lines] if kind == "jsonl" else lines
        (folder / f"{name}.{suffix}").write_text("\n".join(lines))
    data = {"kind": kind, "path": str(folder / f"*.{suffix}"), "seq_len": 16, "batch_size": 4}
    data |= {"max_valid_bytes": 100} if kind == "text" else {"valid_fraction": 0.05}
    config = from_dict(RunConfig, {**configuration(tmp_path).as_dict(), "data": data}, "test")
    config.training.steps = 2
    run = train(config, tmp_path / "run").path
    known = Run.open(run).read_environment()["texts"]["data.path"]
    assert [*known] == [f"{name}.{suffix}" for name in "abc"]
    resume(run)

    b = folder / f"b.{suffix}"
    before = b.read_bytes()
    b.write_bytes(before[:-9] + before[-9:].upper())
    first = rf"1 of its files differ; of the first, b\.{suffix}, it has [\d,]+ bytes .* that had [\d,]+ bytes"
    with pytest.raises(RunError, match=first):
        resume(run)
    b.unlink()
    with pytest.raises(RunError, match=rf"of the first, b\.{suffix}, it has nothing, and that had"):
        resume(run)
    b.write_bytes(before)
    (folder / f"d.{suffix}").write_bytes(before + b" ")
    with pytest.raises(RunError, match=rf"of the first, d\.{suffix}, it has .* and that had nothing"):
        resume(run)
    (folder / f"d.{suffix}").unlink()
    b.rename(folder / f"d.{suffix}")
    with pytest.raises(RunError, match="2 of its files differ"):
        resume(run)
    (folder / f"d.{suffix}").rename(b)
    folder.rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"no file .*--resume .*run --data\.path FILE"):
        resume(run)
    resume(run, texts={"data.path": str(tmp_path / "moved" / f"*.{suffix}")})


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    run = train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run").path
    with files.alone(run), pytest.raises(RunError, match=rf"another process is training in .*\(pid {os.getpid()}\)"):
        resume(run)
    resume(run)
    glissando.load(run)
