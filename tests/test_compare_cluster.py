"""Trainings of a comparison as tasks of Ray; without Ray, what a worker does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison
from training_runs import environment

from glissando.checkpoints import latest_checkpoint
from glissando.cli import main
from glissando.compare import log
from glissando.compare.cluster import WorkerEnding, _train, require_ray
from glissando.compare.log import STOP, Log
from glissando.compare.measure import read_measured
from glissando.compare.plan import Job
from glissando.errors import ConfigError, MissingExtraError, RunError
from glissando.runs import Run

SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_rows": 2},
    "training": {"log_every": 1, "schedule": {"warmup_steps": 2}, "accelerator": "cpu"},
}


@pytest.fixture
def order(tmp_path, monkeypatch) -> dict[str, Any]:
    """One small training with one thread; the process is as it was afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = comparison(tmp_path, **SMALL)
    asked.write_plan()
    job = Job("run", "transformer-nano", 0, 1e-3)
    return {
        "job": job, "config": asked.config(job).as_dict(), "out": asked.out, "threads": 1, "gpus": False,
        "folder": os.getcwd(), "imports": [], "argv": ["glissando"],
    }  # fmt: skip


# ---------------------------------------------------------------------- a worker, without Ray


def test_a_worker_trains_and_measures(order):
    figures = _train(**order)
    path = order["job"].path(order["out"])
    assert figures == read_measured(path)
    assert isinstance(figures, dict)
    assert figures["spent"]["step"] == 4
    record = Run(path).read_environment()
    assert (record["threads"], record["command"]) == (1, ["glissando"])
    assert "parameters 7,472" in (order["out"] / "compare.log").read_text()


def test_a_worker_that_is_asked_to_stop_saves_and_its_successor_goes_on(order, monkeypatch):
    monkeypatch.setattr(log, "EVERY", -1.0)
    order["config"]["training"]["save_every"] = 100
    (order["out"] / STOP).touch()
    assert _train(**order) is None
    run = Run(order["job"].path(order["out"]))
    checkpoint = latest_checkpoint(run.path)
    assert checkpoint is not None
    assert 0 < int(checkpoint.name.removeprefix("step-")) < 4
    (order["out"] / STOP).unlink()
    figures = _train(**order)
    assert isinstance(figures, dict)
    assert figures["spent"]["step"] == 4
    assert len(run.read_environment()["resumed"]) == 1


def test_a_worker_that_a_signal_ends_lets_another_go_on(order, monkeypatch):
    """SIGTERM, as a machine sends it that is shut down: saved, and an error that Ray gives to another worker."""

    signals = iter([signal.SIGTERM])
    monkeypatch.setattr(Log, "stop_asked", lambda _: any(os.kill(os.getpid(), number) for number in signals))
    with pytest.raises(WorkerEnding, match="saved"):
        _train(**order)
    assert latest_checkpoint(order["job"].path(order["out"])) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": Path("/none")}, "does not see .*name an --out on a disk that all machines"),
        ({"imports": ["/none/mixer.py"]}, "no such Python file"),
    ],
)
def test_a_worker_on_another_machine_names_what_it_lacks(order, changes, message):
    with pytest.raises((RunError, ConfigError), match=message):
        _train(**order | changes)
    assert not order["job"].path(order["out"]).exists()


# ---------------------------------------------------------------------- the command, without Ray


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpus", "2"], "--cpus has no effect without --on"),
        (["--gpus", "1"], "--gpus has no effect without --on"),
        (["--on", "rai"], "--on"),
        (["--on", "ray", "--cpus", "0"], "--cpus: expected a whole number of at least 1, got 0"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "transformer-nano", "--budget", "steps=1", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"--on ray needs ray: pip install -e '\.\[ray\]'"):
        require_ray()


def test_a_url_is_refused(tmp_path, capsys):
    assert main(["compare", "transformer-nano", "--budget", "steps=1", "--out", "memory://book"]) == 2
    assert "--out of a comparison is a directory, got memory://book" in capsys.readouterr().err


# ---------------------------------------------------------------------- Ray itself

TRAINED = [
    "transformer-nano", "transformer-plus-nano", "--budget", "steps=40", "--contexts", "8",
    "--allow_unequal", "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.seq_len", "32",
    "--data.batch_size", "2", "--data.valid_rows", "4", "--training.accelerator", "cpu", "--training.log_every", "2",
    "--training.save_every", "5", "--training.schedule.warmup_steps", "2", "--training.precision", "32-true",
]  # fmt: skip


#: the program, but for the measurement of speed, which is no matter of Ray's
PROGRAM = """
import sys
from glissando.cli import main
from glissando.compare import run
train = {"median": 1.0, "low": 1.0, "high": 1.0}
run.measure_speed = lambda runs, *_: dict.fromkeys(
    runs, {"decode": {}, "state": {}, "train": train, "memory_mib": 1.0}
)
sys.exit(main(sys.argv[1:]))
"""


def start(out: Path | str, *arguments: str, around: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The comparison as a process of its own group, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, "compare", *TRAINED, "--out", str(out), *arguments],
        env=environment() | dict(around or {}), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """What it has said, once it has ended."""
    _, said = process.communicate(timeout=1500)
    assert process.returncode == status, said
    assert "Traceback" not in said
    return said


def trainer(run: Path) -> int | None:
    """The process that trains in a run: its lock says which."""
    with contextlib.suppress(OSError, ValueError):
        return int((run / ".lock").read_text())
    return None


def at_step(out: Path, least: int, process: subprocess.Popen[str]) -> Path:
    """A run of the process that has a checkpoint of such a step, while it goes on."""
    while process.poll() is None:
        for found in out.glob("runs/*/*/checkpoints/step-*"):
            run = found.parent.parent
            done = (run / "summary.json").exists()
            if not done and (found / "manifest.json").exists() and int(found.name.removeprefix("step-")) >= least:
                return run
        time.sleep(0.02)
    raise AssertionError(f"no run in {out} has come to step {least}: {process.communicate()[1]}")


def left_behind(temporary: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines += [text] if str(temporary) in text and process.name != str(os.getpid()) else []
    return lines


def measured(out: Path) -> dict[str, list[float]]:
    """Nats of each held-out row, by run."""
    figures = {path: json.loads(path.read_bytes()) for path in sorted(out.glob("runs/*/*/measured.json"))}
    return {str(path.parent.relative_to(out)): each["held_out"]["nats"] for path, each in figures.items()}


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_worker_is_replaced_and_the_results_are_those_without_ray(tmp_path):
    """Two workers, one of which is killed while it trains: its run goes on from its checkpoint. Nothing of Ray is left,
    and it writes nothing outside the temporary folder."""
    pytest.importorskip("ray")
    alone, out = tmp_path / "alone", tmp_path / "ray"
    other = start(alone)
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as temporary:
        around = {"TMPDIR": temporary, "HOME": str(tmp_path), "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
        process = start(out, "--on", "ray", around=around)
        killed = at_step(out, 10, process)
        pid = trainer(killed)
        assert pid is not None
        assert pid != process.pid
        os.kill(pid, signal.SIGKILL)
        ended(process)
        assert left_behind(Path(temporary)) == []
        assert list(Path(temporary).glob("ray*")) == []
    ended(other)
    assert not (tmp_path / ".ray").exists()
    assert len(Run(killed).read_environment()["resumed"]) == 1
    assert measured(out) == measured(alone)
    assert len(measured(out)) == 2
    assert (out / "report.html").is_file()
    assert not (out / STOP).exists()


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_saves_and_the_same_command_goes_on_without_ray(tmp_path):
    """SIGINT to all processes of the command, as a terminal sends it."""
    pytest.importorskip("ray")
    out = tmp_path / "out"
    process = start(out, "--on", "ray")
    stopped = at_step(out, 5, process)
    os.killpg(process.pid, signal.SIGINT)
    said = ended(process, 130)
    assert "the same command continues from here" in said
    run = Run(stopped)
    steps = [int(each.name.removeprefix("step-")) for each in (stopped / "checkpoints").glob("step-*")]
    assert 5 <= max(steps) < 40
    assert not run.read_environment().get("resumed")
    ended(start(out))
    assert len(measured(out)) == 2
    assert len(run.read_environment()["resumed"]) == 1


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_the_user_has_to_change_is_an_error_of_the_command(tmp_path):
    """More cores than there are; and, found by the worker alone, files of the user's own in a run's place."""
    pytest.importorskip("ray")
    out = tmp_path / "out"
    stray = out / "runs/transformer-nano/lr-0.004-seed-0/notes.txt"
    for arguments, status, message in (
        (["--cpus", "100000"], 2, "no machine of the cluster has 100000 CPUs"),
        ([], 1, f"glissando compare: {stray.parent} is not a run"),
    ):
        assert message in ended(start(out, "--on", "ray", *arguments), status)
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_text("mine")
    assert stray.read_text() == "mine"
