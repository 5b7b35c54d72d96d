"""What a run reads is what it was trained on, and one process alone trains in it."""

from __future__ import annotations

import os

import pytest
from training_runs import configuration

import glissando
from glissando import run_files as files
from glissando.cli import main
from glissando.errors import ConfigError, DataError, RunError
from glissando.runs import Run
from glissando.training.fit import extend, resume, train


def test_resuming_takes_the_text_that_it_was_trained_on(tmp_path):
    """A moved text is named, another one is refused, and a run without a record of it resumes as it always did."""
    run, words = (
        train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run").path,
        tmp_path / "words.txt",
    )
    moved = words.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match=r"no file .*words\.txt.*--resume .*run --data\.path FILE"):
        resume(run)
    words.write_text(moved.read_text() + "!")
    with pytest.raises(
        RunError, match=r"words\.txt is not the text that .*run was trained on: it has [\d,]+ bytes with"
    ):
        resume(run)
    with pytest.raises(RunError, match=r"words\.txt is not the text that .*run was trained on"):
        extend(run, tmp_path / "longer", {"steps": 4})
    assert not (tmp_path / "longer").exists()
    with pytest.raises(ConfigError, match=r"has no option data\.name"):
        resume(run, texts={"data.name": str(moved)})
    assert main(["train", f"--resume={run}", f"--data.path={moved}"]) == 0
    assert Run.open(run).read_config()["data"]["path"] == str(moved)
    words.unlink()
    resume(run)
    moved.write_text(moved.read_text() + "!")
    (run / "environment.json").unlink()
    resume(run)


def test_the_ends_of_a_large_text_stand_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(files, "_END_BYTES", 10)
    data, path = configuration(tmp_path).data, tmp_path / "words.txt"
    before, text = files.fingerprints(data), path.read_bytes()
    path.write_bytes(text[:-1] + b"!")
    assert files.fingerprints(data) != before
    path.write_bytes(text + b"!")
    assert files.fingerprints(data) != before


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    run = train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run").path
    with files.alone(run), pytest.raises(RunError, match=rf"another process is training in .*\(pid {os.getpid()}\)"):
        resume(run)
    resume(run)
    glissando.load(run)
