"""Comparisons at URLs: made here and copied there, continued on a machine that never had them, never overwritten. The
storages are fsspec's memory and files; with Ray, two nodes on this machine with a cache each."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import assert_same_tensors, crash_in, text_file, weights

import glissando
from glissando import remote
from glissando.cli import main
from glissando.compare import run as compare
from glissando.compare import training, worker
from glissando.compare.measure import read_measured
from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.worker import Order, carry_out
from glissando.errors import ConfigError, RunError
from glissando.runs import Run

pytestmark = pytest.mark.timeout(600)
URL = "memory://bucket/compared"
TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}
SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_stories": 2},
    "training": {"log_every": 1, "save_every": 2, "schedule": {"warmup_steps": 2}, "accelerator": "cpu"},
    "contexts": [8],
    "learning_rates": [2e-3],
}


class Killed(BaseException):
    """What no code of the library catches."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, an empty memory, and no time spent on speed."""

    def of_the_test(kind: str) -> Path:
        (tmp_path / "cache" / kind).mkdir(parents=True, exist_ok=True)
        return tmp_path / "cache" / kind

    monkeypatch.setattr(remote, "cache_dir", of_the_test)
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    empty()
    return tmp_path / "cache"


def empty() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def toy(out: str | Path, given: Sequence[str] = ("transformer-nano",), **changes: Any) -> Comparison:
    """Of one model, four steps, saved after two."""
    asked = comparison(Path(), **(SMALL | changes))
    asked.given, asked.out = list(given), out
    return asked


def text(folder: Path) -> dict[str, Any]:
    """A text of invented words, whose tokenizer is trained."""
    path, tokenizer = str(text_file(folder)), {"kind": "bpe", "vocab_size": 300}
    rows = {"seq_len": 32, "batch_size": 1, "max_valid_bytes": 100}
    return {"kind": "text", "path": path, "tokenizer": tokenizer} | rows


def stored() -> dict[str, bytes]:
    return {path.removeprefix("/bucket/"): bytes(file.getvalue()) for path, file in MemoryFileSystem.store.items()}


def on_another_machine(cache: Path) -> None:
    shutil.rmtree(cache)


def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "resume", "measure"):
        monkeypatch.setattr(training, name, lambda *_, **__: pytest.fail("trained or measured again"))


def trained(out: Path) -> dict[str, dict[str, Any]]:
    """The weights of each run, and what was measured on each held-out row."""
    found = {}
    for path in sorted(out.glob("*/**/measured.json")):
        nats = json.loads(path.read_bytes())["held_out"]["nats"]
        found[path.parent.relative_to(out).as_posix()] = {"nats": nats, "weights": weights(path.parent)}
    return found


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


# ---------------------------------------------------------------------- a worker, without Ray


@pytest.fixture
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def order(cache, tmp_path, monkeypatch, _signals_as_they_were) -> Order:
    """Of the training of `toy`, from a command on another machine, which has another cache."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = toy(URL, data=text(tmp_path))
    asked.check()
    asked.write_plan()
    copy = asked.copy
    assert copy is not None
    copy.push_plan()
    job = Job("run", "transformer-nano", 0, 2e-3)
    config, out, seal = asked.config(job).as_dict(), asked.directory, copy.seal
    on_another_machine(cache)
    elsewhere = out.with_name("elsewhere")
    config["data"]["tokenizer"]["path"] = str(elsewhere / "tokenizer.json")
    return Order(job, config, elsewhere, seal, os.getcwd(), [], ["glissando"], 1, False, url=URL)


def send(stop_after: int | None = None) -> Callable[[list[Any]], bool]:
    reports: list[Any] = []

    def take(events: list[Any]) -> bool:
        reports.append(events)
        return stop_after is not None and len(reports) >= stop_after

    return take


def test_a_worker_goes_on_where_one_elsewhere_was_killed(order, cache, tmp_path, monkeypatch):
    compare.compare(whole := toy(tmp_path / "whole", data=text(tmp_path)))
    with monkeypatch.context() as patched:
        crash_in(patched, 4, Killed())
        with pytest.raises(Killed):
            carry_out(order, send())
    on_another_machine(cache)
    figures = carry_out(order, send())
    assert isinstance(figures, dict)
    assert figures["provenance"]["resumed"] == 1
    assert json.loads(stored()["compared/runs/transformer-nano/lr-0.002-seed-0/measured.json"]) == figures
    on_another_machine(cache)
    asked = toy(URL, data=text(tmp_path))
    nothing_is_trained(monkeypatch)
    compare.compare(asked)
    assert_same_tensors(trained(asked.directory), trained(whole.out))


def test_a_worker_that_is_asked_to_stop_has_copied_what_it_saved(order, cache, monkeypatch):
    monkeypatch.setattr(worker, "EVERY", 0.0)
    order.config["training"]["save_every"] = 100
    assert carry_out(order, send(stop_after=4)) is None
    steps = {name.split("/")[5] for name in stored() if "/checkpoints/step-" in name}
    assert len(steps) == 1
    on_another_machine(cache)
    assert isinstance(figures := carry_out(order, send()), dict)
    assert figures["provenance"]["resumed"] == 1


def test_a_worker_that_sees_another_storage_says_so(order):
    empty()
    error = carry_out(order, send())
    assert isinstance(error, RunError)
    assert "does not see the comparison at memory://bucket/compared" in str(error)
    changed = dataclasses.replace(order, seal="another")
    assert "does not see the comparison" in str(carry_out(changed, send()))


def test_a_worker_takes_no_run_of_another_comparison(order, cache, tmp_path):
    """As where URL and command's directory were deleted, and a worker's machine still has what it trained then."""
    carry_out(order, send())
    empty()
    shutil.move(cache, cache.with_name("worker"))
    asked = toy(URL, data=text(tmp_path) | {"seq_len": 16})
    asked.check()
    asked.write_plan()
    assert asked.copy is not None
    asked.copy.push_plan()
    config, seal = asked.config(order.job).as_dict(), asked.copy.seal
    on_another_machine(cache)
    shutil.move(cache.with_name("worker"), cache)
    config["data"]["tokenizer"]["path"] = order.config["data"]["tokenizer"]["path"]
    assert isinstance(carry_out(dataclasses.replace(order, config=config, seal=seal), send()), dict)
    run = order.job.path(asked.directory)
    assert Run.open(run).read_config()["data"]["seq_len"] == 16
    assert list(asked.directory.parent.glob(f"{asked.directory.name}.1/runs/*/*/measured.json"))


def test_a_worker_reports_a_copy_that_fails(order, monkeypatch):
    original, events = remote.Place._write, list[Any]()

    def refuse(self: Any, name: str, source: Any) -> None:
        if "/runs/" in self.root:
            raise PermissionError("access denied")
        original(self, name, source)

    monkeypatch.setattr(remote.Place, "_write", refuse)
    error = carry_out(order, lambda new: bool(events.extend(new)))
    assert isinstance(error, RunError)
    assert "access denied" in str(error)
    assert any(event[0] == "print" and "the next save tries again" in event[1] for event in events)


def test_what_a_worker_has_finished_elsewhere_is_fetched(order, cache, tmp_path):
    figures = carry_out(order, send())
    on_another_machine(cache)
    asked = toy(URL, data=text(tmp_path))
    copy = asked.copy
    assert copy is not None
    run = order.job.path(asked.directory)
    copy.fetch_run(run)
    assert read_measured(run) == figures
    assert Run.open(run).read_environment()["command"] == ["glissando"]
