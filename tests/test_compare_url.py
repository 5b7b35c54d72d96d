"""Comparisons at URLs: made here and copied there, continued on a machine that never had them, never overwritten. The
storages are fsspec's memory and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from comparisons_at_urls import (
    SMALL,
    URL,
    Killed,
    cache_of_a_test,
    empty,
    nothing_is_trained,
    on_another_machine,
    stored,
    text,
    toy,
    trained,
)
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import assert_same_tensors, crash_in

import glissando
from glissando import remote
from glissando.cli import main
from glissando.compare import run as compare
from glissando.compare import training
from glissando.compare.plan import Amount
from glissando.errors import ConfigError, RunError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    return cache_of_a_test(tmp_path, monkeypatch)


@pytest.fixture
def whole(tmp_path) -> dict[str, dict[str, Any]]:
    """The same, made in a directory without an interruption."""
    compare.compare(toy(tmp_path / "whole"))
    return trained(tmp_path / "whole")


# ---------------------------------------------------------------------- one process


def test_a_comparison_is_made_here_and_copied_there(cache, monkeypatch, capsys):
    asked = toy(
        URL, given=["transformer-nano", "transformer-plus-nano"], probes=["recall-8"], probe_budget=Amount("steps", 2)
    )
    report, _ = compare.compare(asked)
    message = capsys.readouterr().err.splitlines()[0]
    assert message == f"made in {asked.directory}, copied to {URL} after every save"
    assert asked.directory.is_relative_to(cache)
    pictures = [f"pictures/{path.name}" for path in (asked.directory / "pictures").iterdir()]
    assert pictures
    for name in ("plan.json", "speed.json", "report.html", "results.csv", "report.md", *pictures):
        assert stored()[f"compared/{name}"] == (asked.directory / name).read_bytes(), name
    assert report == asked.directory / "report.html"
    runs = [path.parent for path in asked.directory.glob("*/**/measured.json")]
    assert len(runs) == 4
    for run in runs:
        there = f"{URL}/{run.relative_to(asked.directory).as_posix()}"
        assert_same_tensors(dict(glissando.load(there).state_dict()), dict(glissando.load(run).state_dict()))
        assert stored()[f"compared/{run.relative_to(asked.directory)}/measured.json"]
    page = report.read_text()

    # Elsewhere nothing is trained or measured again, and the report is the same.
    on_another_machine(cache)
    nothing_is_trained(monkeypatch)
    before = stored()
    report, _ = compare.compare(
        toy(
            URL,
            given=["transformer-nano", "transformer-plus-nano"],
            probes=["recall-8"],
            probe_budget=Amount("steps", 2),
        )
    )
    assert report.read_text() == page
    assert stored() == before


def test_more_models_are_added_elsewhere(cache, tmp_path):
    compare.compare(toy(URL))
    before = {name: content for name, content in stored().items() if name.startswith("compared/runs/transformer-nano")}
    on_another_machine(cache)
    asked = toy(URL, given=["transformer-nano", "transformer-plus-nano"])
    compare.compare(asked)
    assert stored().items() >= before.items()
    both = toy(tmp_path / "both", given=["transformer-nano", "transformer-plus-nano"])
    compare.compare(both)
    assert_same_tensors(trained(asked.directory), trained(both.out))


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_an_interrupted_training_resumes_from_its_checkpoint(machine, whole, cache, monkeypatch):
    with monkeypatch.context() as patched:
        crash_in(patched, 4, Killed())
        with pytest.raises(Killed):
            compare.compare(toy(URL))
    assert not [name for name in stored() if name.endswith("measured.json")]
    if machine == "another":
        on_another_machine(cache)
    asked = toy(URL)
    steps: list[int] = []
    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("trained from the beginning"))
    original = training.Turn.after_step
    monkeypatch.setattr(
        training.Turn, "after_step", lambda turn, loop: (steps.append(loop.state.step), original(turn, loop))[1]
    )
    compare.compare(asked)
    assert steps == [3, 4]
    assert_same_tensors(trained(asked.directory), whole)


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the process was killed at that write to the storage, counted from 1, which is not made."""
    count, original = iter(range(1, 10**6)), remote.Place._write

    def write(self: Any, name: str, source: Any) -> None:
        if next(count) >= number:  # the thread that saves may go on for a moment
            raise Killed
        original(self, name, source)

    with monkeypatch.context() as patched:
        patched.setattr(remote.Place, "_write", write)
        try:
            compare.compare(toy(URL))
        except Killed:
            return True
    return False


def every_write(step: int, whole: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    number = 1
    while killed_at(number, monkeypatch):
        on_another_machine(cache)
        asked = toy(URL)
        compare.compare(asked)
        assert_same_tensors(trained(asked.directory), whole)
        assert stored()["compared/report.html"]
        on_another_machine(cache)
        empty()
        number += step
    return number


@pytest.mark.slow
def test_killed_while_it_copies_it_resumes_elsewhere_to_the_same_weights(whole, cache, monkeypatch):
    assert every_write(7, whole, cache, monkeypatch) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_any_write_it_resumes_elsewhere_to_the_same_weights(whole, cache, monkeypatch):
    assert every_write(1, whole, cache, monkeypatch) > 30


def test_turns_alternate_at_a_url(whole, cache):
    compare.compare(asked := toy(URL, turns=2))
    assert_same_tensors(trained(asked.directory), whole)


def test_a_training_that_diverged_is_not_repeated_elsewhere(cache, monkeypatch):
    sizes = {"learning_rates": [1e-3, 1e30], "sweep_share": 1.0, "sweep_beyond": 0}
    asked = toy(URL, **sizes, training=SMALL["training"] | {"clip": None})
    compare.compare(asked)
    failed = "sweep/transformer-nano/lr-1e+30-seed-0"
    assert "the loss is nan" in json.loads(stored()[f"compared/{failed}/measured.json"])["failed"]
    on_another_machine(cache)
    nothing_is_trained(monkeypatch)
    compare.compare(toy(URL, **sizes, training=SMALL["training"] | {"clip": None}))


def test_the_tokenizer_is_that_of_the_url(cache, tmp_path, monkeypatch):
    """Trained once: another machine, with another text file of the same name, may not train its own."""
    with monkeypatch.context() as patched:
        crash_in(patched, 4, Killed())
        with pytest.raises(Killed):
            compare.compare(toy(URL, data=text(tmp_path)))
    on_another_machine(cache)
    monkeypatch.setattr("glissando.compare.plan.build_tokenizer", lambda _: pytest.fail("trained again"))
    asked = toy(URL, data=text(tmp_path))
    compare.compare(asked)
    assert (asked.directory / "tokenizer.json").read_bytes() == stored()["compared/tokenizer.json"]


# ---------------------------------------------------------------------- nothing is lost


def test_a_url_with_other_files_is_refused(cache, capsys):
    MemoryFileSystem().pipe_file("/bucket/compared/notes.txt", b"mine")
    with pytest.raises(RunError, match=r"memory://bucket/compared is not empty and has no plan\.json.*another --out"):
        compare.compare(toy(URL))
    assert stored() == {"compared/notes.txt": b"mine"}
    assert not list(cache.glob("training/*/plan.json"))


def test_a_file_is_refused():
    MemoryFileSystem().pipe_file("/bucket/compared", b"mine")
    with pytest.raises(RunError, match=r"memory://bucket/compared is a file.*another --out"):
        compare.compare(toy(URL))


def test_files_in_the_place_of_a_run_are_refused(cache):
    compare.compare(toy(URL))
    on_another_machine(cache)
    MemoryFileSystem().pipe_file("/bucket/compared/runs/transformer-plus-nano/lr-0.002-seed-0/notes.txt", b"mine")
    with pytest.raises(RunError, match=r"transformer-plus-nano/lr-0\.002-seed-0 exists and is not empty"):
        compare.compare(toy(URL, given=["transformer-nano", "transformer-plus-nano"]))
    assert stored()["compared/runs/transformer-plus-nano/lr-0.002-seed-0/notes.txt"] == b"mine"


@pytest.mark.parametrize("is_finished", [True, False])
def test_other_options_are_refused_elsewhere(is_finished, cache, monkeypatch):
    if is_finished:
        compare.compare(toy(URL))
    else:
        with monkeypatch.context() as patched:
            crash_in(patched, 4, Killed())
            with pytest.raises(Killed):
                compare.compare(toy(URL))
    on_another_machine(cache)
    before = stored()
    changed = toy(URL, data=SMALL["data"] | {"batch_size": 2})
    with pytest.raises(ConfigError, match=r"trained with other options: data\.batch_size was 1 and is 2"):
        compare.compare(changed)
    assert stored() == before


def test_the_directory_of_another_comparison_is_renamed(cache, whole, capsys):
    """As where the URL was emptied and used again from another machine."""
    first = toy(URL, data=SMALL["data"] | {"batch_size": 2})
    compare.compare(first)
    ours = trained(first.directory)
    shutil.move(cache, cache.with_name("ours"))
    empty()
    compare.compare(toy(URL))
    theirs = {name: content for name, content in stored().items() if "/runs/" in name}
    shutil.rmtree(cache)
    shutil.move(cache.with_name("ours"), cache)
    compare.compare(toy(URL))
    assert stored().items() >= theirs.items()
    assert_same_tensors(trained(first.directory), whole)
    assert_same_tensors(trained(first.directory.with_name(f"{first.directory.name}.1")), ours)
    assert "was renamed to" in capsys.readouterr().err


def test_a_copy_that_fails_is_reported_and_made_up_for(cache, whole, monkeypatch, capsys):
    """After the first save, and at the end, where it is an error."""
    original = remote.Place._write

    def refuse(self: Any, name: str, source: Any) -> None:
        if "/runs/" in self.root:
            raise PermissionError("access denied")
        original(self, name, source)

    asked = toy(URL)
    with monkeypatch.context() as patched:
        patched.setattr(remote.Place, "_write", refuse)
        with pytest.raises(
            RunError,
            match=r"not copied to memory://.*access denied.*the same command continues from there and copies it",
        ):
            compare.compare(asked)
    message = capsys.readouterr().err
    assert "access denied" in message
    assert "Training continues; the next save tries again" in message
    assert "train --resume" not in message
    assert str(asked.directory) in message
    compare.compare(toy(URL))
    on_another_machine(cache)
    nothing_is_trained(monkeypatch)
    compare.compare(asked := toy(URL))
    assert_same_tensors(trained(asked.directory), whole)


def test_what_was_finished_while_the_storage_was_away_is_copied_later(cache, monkeypatch):
    """Also where the last file alone was not copied."""
    original = remote.Place._write

    def refuse(self: Any, name: str, source: Any) -> None:
        if name == "measured.json":
            raise PermissionError("access denied")
        original(self, name, source)

    with monkeypatch.context() as patched:
        patched.setattr(remote.Place, "_write", refuse)
        with pytest.raises(RunError, match="access denied"):
            compare.compare(toy(URL))
    with monkeypatch.context() as patched:
        nothing_is_trained(patched)
        compare.compare(toy(URL))
    assert stored()["compared/runs/transformer-nano/lr-0.002-seed-0/measured.json"]


def test_a_storage_that_is_read_alone_is_an_error_before_anything_is_trained(monkeypatch):
    def refuse(self: Any, name: str, source: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(remote.Place, "_write", refuse)
    nothing_is_trained(monkeypatch)
    with pytest.raises(RunError, match=r"could not write memory://bucket/compared/plan\.json.*Nothing was trained"):
        compare.compare(toy(URL))


COMMAND = [
    "compare", "transformer-nano", "--budget", "steps=2", "--contexts", "8", "--allow_unequal",
    "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.seq_len", "32", "--data.batch_size", "1",
    "--data.valid_stories", "2", "--training.accelerator", "cpu", "--training.log_every", "1",
    "--training.schedule.warmup_steps", "2",
]  # fmt: skip


def test_the_command_writes_to_a_url_of_files(cache, tmp_path, monkeypatch, capsys):
    url = f"file://{tmp_path}/there"
    assert main([*COMMAND, "--out", url]) == 0
    message = capsys.readouterr()
    assert f"copied to {url} after every save" in message.err.splitlines()[0]
    assert f"{url}/report.html" in message.out
    assert (tmp_path / "there/report.html").is_file()
    on_another_machine(cache)
    nothing_is_trained(monkeypatch)
    assert main([*COMMAND, "--out", url]) == 0
    capsys.readouterr()
    assert main([*COMMAND, "--out", f"nosuch://{tmp_path}"]) == 1
    assert "no storage is known by the protocol of nosuch://" in capsys.readouterr().err


def test_an_interrupted_training_keeps_its_number_of_threads_elsewhere(cache, tmp_path, monkeypatch, capsys):
    url = f"file://{tmp_path}/there"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with monkeypatch.context() as patched:
        crash_in(patched, 2, Killed())
        with pytest.raises(Killed):
            main([*COMMAND, "--training.save_every", "1", "--threads", "1", "--out", url])
    on_another_machine(cache)
    chosen: list[int | None] = []
    monkeypatch.setattr("glissando.threads.use_threads", lambda *given: chosen.append(given[3]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main([*COMMAND, "--training.save_every", "1", "--out", url]) == 0
    assert chosen == [1]
