"""Trainings of a comparison as tasks of Ray; without Ray, what the command and a worker say to each other."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison
from training_runs import environment

from glissando.cli import main
from glissando.compare import worker
from glissando.compare.cluster import Cluster, Workers
from glissando.compare.measure import read_measured
from glissando.compare.plan import Job
from glissando.compare.table import Table
from glissando.compare.worker import Order, WorkerEnding, carry_out
from glissando.errors import ConfigError, MissingExtraError, RunError
from glissando.run_files import alone
from glissando.runs import Run

SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_stories": 2},
    "training": {"log_every": 1, "schedule": {"warmup_steps": 2}, "accelerator": "cpu"},
}


@pytest.fixture
def _signals_as_they_were() -> Iterator[None]:
    """A worker ignores SIGINT for good."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def order(tmp_path, monkeypatch, _signals_as_they_were) -> Order:
    """Of one small training, with one thread; the process is as it was afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = comparison(tmp_path, **SMALL)
    asked.out.mkdir()
    (asked.out / ".seal").touch()
    job = Job("run", "transformer-nano", 0, 1e-3)
    return Order(job, asked.config(job).as_dict(), asked.out, ".seal", os.getcwd(), [], ["glissando"], 1, False)


def recorder(events: list[Any], stop_after: int | None = None) -> Callable[[list[Any]], bool]:
    """What takes a worker's events, and asks to stop once it has taken so many reports."""
    reports = []

    def send(new: list[Any]) -> bool:
        events.extend(new)
        reports.append(len(new))
        return stop_after is not None and len(reports) >= stop_after

    return send


# ---------------------------------------------------------------------- a worker, without Ray


def test_a_worker_trains_measures_and_reports(order):
    events: list[Any] = []
    figures = carry_out(order, recorder(events))
    path = order.job.path(order.out)
    assert figures == read_measured(path)
    assert isinstance(figures, dict)
    assert figures["spent"]["step"] == 4
    kinds = [event[0] for event in events]
    assert events[0] == ("began", order.machine, os.getpid())
    assert {"log", "status", "bits", "speed"} <= set(kinds)
    assert "parameters 7,472" in "".join(event[1] for event in events if event[0] == "log")
    record = Run(path).read_environment()
    assert (record["threads"], record["command"]) == (1, ["glissando"])


def test_a_worker_that_is_asked_to_stop_saves_and_its_successor_goes_on(order, monkeypatch):
    monkeypatch.setattr(worker, "EVERY", 0.0)
    order.config["training"]["save_every"] = 100
    assert carry_out(order, recorder([], stop_after=4)) is None
    run = Run(order.job.path(order.out))
    checkpoint = run.latest_checkpoint()
    assert checkpoint is not None
    assert 0 < int(checkpoint.name.removeprefix("step-")) < 4
    figures = carry_out(order, recorder([]))
    assert isinstance(figures, dict)
    assert figures["spent"]["step"] == 4
    assert len(run.read_environment()["resumed"]) == 1


def test_a_worker_that_a_signal_ends_lets_another_go_on(order, monkeypatch):
    """SIGTERM, as a machine sends it that is shut down: saved, and an error that Ray gives to another worker."""
    monkeypatch.setattr(worker, "EVERY", 0.0)
    reports = []

    def send(events: list[Any]) -> bool:
        reports.append(events)
        if len(reports) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    with pytest.raises(WorkerEnding, match="saved"):
        carry_out(order, send)
    assert Run(order.job.path(order.out)).latest_checkpoint() is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seal": ".other"}, "does not see .*name an --out on a disk that all machines"),
        ({"version": "0.0"}, "and the command 0.0: install the same"),
        ({"imports": ["/none/mixer.py"]}, "no such Python file; all machines"),
    ],
)
def test_a_worker_on_another_machine_names_it_and_what_it_lacks(order, changes, message, monkeypatch):
    monkeypatch.setattr(worker.platform, "node", lambda: "node7")
    error = carry_out(dataclasses.replace(order, **changes), recorder([]))
    assert isinstance(error, RunError | ConfigError)
    with pytest.raises(type(error), match=f"^on node7: .*{message}"):
        raise error
    assert not order.job.path(order.out).exists()


def test_a_worker_waits_for_the_lock_of_a_lost_one(order, monkeypatch):
    """Which is held for a while; and if it is held for good, another process trains there."""
    monkeypatch.setattr(worker, "EVERY", 0.01)
    path = order.job.path(order.out)
    events: list[Any] = []
    with contextlib.ExitStack() as held:
        held.enter_context(alone(path))
        monkeypatch.setattr(worker, "_LOCKED_FOR", 0.05)
        assert "another process is training" in str(carry_out(order, recorder(events)))
        monkeypatch.setattr(worker, "_LOCKED_FOR", 60.0)
        before = len(events)

        def send(new: list[Any]) -> bool:
            events.extend(new)
            if len(events) > before + 2:
                held.close()
            return False

        figures = carry_out(order, send)
    assert isinstance(figures, dict)
    assert figures["spent"]["step"] == 4
    assert any("is locked by another process" in str(event) for event in events)


# ---------------------------------------------------------------------- the command, without Ray


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpus", "2"], "--cpus has no effect without --on ray"),
        (["--ray_address", "auto"], "--ray_address has no effect without --on ray"),
        (["--on", "rai"], "--on"),
        (["--on", "ray", "--cpus", "0"], "--cpus must be at least 1, got 0"),
        (["--on", "ray", "--gpus", "1.5"], "--gpus must be a whole number or a fraction below 1, got 1.5"),
        (["--on", "ray", "--retries", "-1"], "--retries must be at least 0"),
        (["--on", "ray", "--turns", "2"], "leave out one of the two"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "transformer-nano", "--budget", "steps=1", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"--on ray needs ray: pip install -e '\.\[ray\]'"):
        Cluster().check(comparison(tmp_path))


def test_what_workers_report_is_in_the_table(tmp_path):
    asked = comparison(tmp_path)
    shown = Table(tmp_path, io.StringIO())
    jobs = [Job("run", "a", seed, 1e-3) for seed in (0, 1)] + [Job("probe", "b", 0, 1e-3, "copy")]
    workers = Workers(Cluster(), asked, shown)
    workers._jobs = list(jobs)
    for number in (0, 1, 2):
        workers._take(number, jobs[number], ("began", "node1", 7))
    assert {model: row["state"] for model, row in shown.rows.items()} == {"a": "2 run", "b": "copy"}
    workers._take(0, jobs[0], ("bits", "1.2345"))
    workers._take(1, jobs[1], ("log", "one\ntwo\n"))
    workers._ended(jobs[0])
    assert shown.rows["a"] == {"state": "run", "bits_byte": "1.2345"}
    workers._take(0, jobs[0], ("status", "too late"))
    assert 0 not in workers._at_work
    workers._take(1, jobs[1], ("began", "node2", 8))
    workers._ended(jobs[1])
    assert shown.rows["a"]["state"] == "waiting"
    shown.close(show=False)
    log = (tmp_path / "compare.log").read_text()
    assert f"[{jobs[1].title}] one\n[{jobs[1].title}] two\n" in log
    assert f"{jobs[1].title}: its worker was lost; it goes on on node2" in log


def test_a_budget_in_seconds_is_said_to_be_shared(tmp_path):
    for budget, said in (("steps=4", False), ("seconds=4", True)):
        file = io.StringIO()
        asked = comparison(tmp_path)
        asked.budget = type(asked.budget).parse(budget, "--budget")
        with contextlib.closing(Table(tmp_path, file)) as shown:
            Workers(Cluster(), asked, shown)
        assert ("trainings on one machine share it" in file.getvalue()) == said


# ---------------------------------------------------------------------- Ray itself

TRAINED = [
    "transformer-nano", "transformer-plus-nano", "--budget", "steps=40", "--contexts", "8",
    "--allow_unequal", "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.seq_len", "32",
    "--data.batch_size", "2", "--data.valid_stories", "4", "--training.accelerator", "cpu", "--training.log_every", "2",
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
        said = ended(process)
        assert left_behind(Path(temporary)) == []
        assert list(Path(temporary).glob("ray*")) == []
    ended(other)
    assert not (tmp_path / ".ray").exists()
    assert "its worker was lost; it goes on on" in said
    assert len(Run(killed).read_environment()["resumed"]) == 1
    log = (out / "compare.log").read_text()
    steps = re.findall(rf"^\[{killed.parent.name}, .*\] step (\d+),", log, re.MULTILINE)  # of its validations
    # Each once: again, if it had started at step 0. What a killed worker had not yet sent is missing.
    assert len(steps) == len(set(steps))
    assert steps[-1] == "40"
    assert measured(out) == measured(alone)
    assert len(measured(out)) == 2
    assert (out / "report.html").is_file()
    assert not list(out.glob(".cluster-*"))


#: a cluster of two machines, which share neither a directory nor a cache; the second is lost at the first line of input
MACHINES = """
import sys
from ray.cluster_utils import Cluster
first, second = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "env_vars": {"GLISSANDO_CACHE": first}})
node = cluster.add_node(num_cpus=1, env_vars={"GLISSANDO_CACHE": second})
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(node, allow_graceful=False)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_a_url_the_machine_of_a_training_may_be_lost(tmp_path):
    """Of two machines with a cache each, and a command with a third: the run goes on on the other one."""
    pytest.importorskip("ray")
    there, alone = tmp_path / "there", tmp_path / "alone"
    caches = [tmp_path / name for name in ("first", "second", "command")]
    other = start(alone)
    around = environment() | {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        machines = subprocess.Popen(
            [sys.executable, "-c", MACHINES, *map(str, caches[:2])], env=around | {"TMPDIR": temporary},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert machines.stdin is not None
        assert machines.stdout is not None
        try:
            address = machines.stdout.readline().strip()
            url, mine = f"file://{there}", {"GLISSANDO_CACHE": str(caches[2])}
            process = start(url, "--on", "ray", "--ray_address", address, around=mine)
            while process.poll() is None and not (found := list(caches[1].glob("training/*/runs/*/*"))):
                time.sleep(0.05)
            lost = at_step(found[0].parents[2], 10, process)
            print("lost", file=machines.stdin, flush=True)
            said = ended(process)
        finally:
            machines.communicate("\n\n", timeout=300)
    ended(other)
    assert "its worker was lost; it goes on on" in said
    name = lost.relative_to(found[0].parents[2])
    assert len(Run(there / name).read_environment()["resumed"]) == 1
    assert list(caches[0].glob(f"training/*/{name}/measured.json"))
    assert measured(there) == measured(alone)
    assert len(measured(there)) == 2
    assert (there / "report.html").is_file()


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
