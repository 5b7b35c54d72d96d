"""Processes that are killed, and a torchrun that starts them again: nothing that was complete is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tolerances import assert_close
from training_runs import (
    PLAIN,
    assert_same_tensors,
    configuration,
    crash_in,
    curve,
    environment,
    last_checkpoint,
    mapping,
    options,
    weights,
)

from glissando.errors import ConfigError, RunError, TrainingError
from glissando.stages import train_stages
from glissando.training import launch, loop
from glissando.training.fit import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CHANGES = {"training": {"steps": 8, "save_every": 2, "log_every": 1}}


def of_job(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setattr(launch, "job", lambda: name)


def killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of the job `seven`, which ended in step 6."""
    with monkeypatch.context() as patched:
        of_job(patched, "seven")
        crash_in(patched, 6, RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            train(configuration(folder, CHANGES), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_the_same_command_of_the_same_job_goes_on(tmp_path, monkeypatch):
    whole = train(configuration(tmp_path, CHANGES), tmp_path / "whole")
    run = killed(tmp_path, monkeypatch)
    assert last_checkpoint(run).step in (4, 5)  # the best too
    of_job(monkeypatch, "seven")
    train(configuration(tmp_path, CHANGES), run)
    assert_same_tensors(weights(run), weights(whole))
    assert_close(curve(run), curve(whole.path), "train_loss", 0.0)


@pytest.mark.parametrize(("name", "changes"), [("eight", {}), (None, {}), ("seven", {"training.steps": 10})])
def test_another_job_or_another_configuration_is_refused(tmp_path, monkeypatch, name, changes):
    run = killed(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    of_job(monkeypatch, name)
    with pytest.raises(RunError, match="nothing is overwritten"):
        train(configuration(tmp_path, CHANGES, changes), run)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def test_processes_that_see_different_checkpoints_are_refused(tmp_path, monkeypatch):
    """Weights that differ between them would never be made equal again."""
    monkeypatch.setattr(loop, "all_gathered", lambda value, _: [value, value + 4])
    with pytest.raises(TrainingError, match="begin at different steps, 0, 4"):
        train(configuration(tmp_path, CHANGES), tmp_path / "run")


@pytest.mark.slow
def test_stages_of_the_same_job_go_on(tmp_path, monkeypatch):
    config = configuration(tmp_path, CHANGES, {"stages": [{"name": "a"}, {"name": "b", "data": {"seed": 1}}]})
    whole = train_stages(config, tmp_path / "whole")
    of_job(monkeypatch, "seven")
    with monkeypatch.context() as patched:
        crash_in(patched, 6, RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            train_stages(config, tmp_path / "run")
    for run, expected in zip(train_stages(config, tmp_path / "run"), whole, strict=True):
        assert_same_tensors(weights(run), weights(expected))


def test_a_job_has_a_name_or_none(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert launch.job() == "7"


@pytest.mark.parametrize(("restarts", "processes", "store", "refused"), [
    ("3", "2", "True", True), ("0", "2", "True", False), ("3", "1", "True", False), ("3", "2", "False", False),
])  # fmt: skip
def test_a_store_with_addresses_of_dead_processes_is_refused(monkeypatch, restarts, processes, store, refused):
    for name, value in {
        "TORCHELASTIC_MAX_RESTARTS": restarts, "WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": store,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    launched: list[bool] = []
    fabric = SimpleNamespace(launch=lambda: launched.append(True))
    with pytest.raises(ConfigError, match="DISABLE_SHARE_RDZV_TCP_STORE=1") if refused else contextlib.nullcontext():
        launch.connect(fabric)
    assert bool(launched) != refused


#: the second process is killed before a step, and later the first in the middle of a checkpoint
KILLED_TWICE = """
import os, signal, sys
from pathlib import Path
from glissando.training import state
from glissando.training.progress import Progress
folder = Path(sys.argv.pop(1))
def die_once(name):
    if not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
before_step, save_tensors = Progress.before_step, state.save_tensors
def dying_before_step(self, loop, batches):
    before_step(self, loop, batches)
    if loop.state.step == 3 and os.environ["RANK"] == "1":
        die_once("second")
def dying_in_saving(path, tensors, metadata=None):
    save_tensors(path, tensors, metadata)
    if path.name == state.TRAINER_TENSORS and "step-00000006" in str(path):
        die_once("first")
Progress.before_step, state.save_tensors = dying_before_step, dying_in_saving
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def two_processes(folder: Path, nodes: int, program: str, values: dict) -> None:
    """The program in two processes on one or two nodes, all on this machine, until it has ended well; killed ones start
    again."""
    script = folder / "program.py"
    script.write_text(program)
    where = ["--standalone"]
    if nodes > 1:
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    where += ["--rdzv-id=seven", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", "--max-restarts=8"]
    node = [*TORCHRUN, *where, str(script), str(folder), *options(values), f"--out={folder / 'run'}"]
    with contextlib.ExitStack() as stack:
        started, several = [], environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        for number in range(nodes):  # into files: nobody reads a pipe while both are waited for
            said = stack.enter_context((folder / f"node-{number}").open("w"))
            started.append(subprocess.Popen(node, env=several, stdout=said, stderr=said))
            stack.callback(started[-1].kill)
        for number, each in enumerate(started):
            assert each.wait(timeout=500) == 0, (folder / f"node-{number}").read_text()[-3000:]


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_on_one_machine_go_on_after_each_process_was_killed(tmp_path):
    whole = train(configuration(tmp_path, PLAIN, CHANGES), tmp_path / "whole")
    run = tmp_path / "run"
    two_processes(tmp_path, 2, KILLED_TWICE, mapping(tmp_path, PLAIN, CHANGES))
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists()
    assert_close(curve(run), curve(whole.path), "train_loss", 1e-5)
    assert last_checkpoint(run).step == 8


#: each process of a sharded training is killed once while it writes, the first also between shards and publication, and
#: the second also while the processes connect; `starts` has the step of the checkpoint that each start finds
KILLED_IN_WRITING = """
import os, signal, sys
from pathlib import Path
from glissando import shards, storage
from glissando.checkpoints import latest_checkpoint
from glissando.runs import Run
from glissando.training import loop
folder = Path(sys.argv.pop(1))
def die_once(name):
    if not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
write_data, write_manifest, connect = shards.HuggingFaceStorageWriter.write_data, storage.write_manifest, loop.connect
def dying_after_shard(self, *args):
    done = write_data(self, *args)
    if "step-00000004" in str(self.path) and os.environ["RANK"] == "1":
        die_once("second")
    if "step-00000006" in str(self.path) and os.environ["RANK"] == "0":
        die_once("first")
    return done
def dying_before_manifest(directory, names=None):
    if "step-00000008" in str(directory):
        die_once("publication")
    write_manifest(directory, names)
def dying_in_connecting(fabric):
    if (folder / "second").exists() and os.environ["RANK"] == "1":
        die_once("connecting")
    connect(fabric)
shards.HuggingFaceStorageWriter.write_data, storage.write_manifest = dying_after_shard, dying_before_manifest
loop.connect = dying_in_connecting
if os.environ["RANK"] == "0":
    newest = latest_checkpoint(folder / "run")
    with (folder / "starts").open("a") as file:
        print(0 if newest is None else int(newest.name.removeprefix("step-")), file=file)
    if newest is not None:
        Run.open(folder / "run").read_state_dict()
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2])
def test_sharded_processes_that_are_killed_while_they_write_go_on(tmp_path, nodes):
    whole = train(configuration(tmp_path, PLAIN, CHANGES), tmp_path / "whole")
    run, changes = tmp_path / "run", {"training": {"strategy": "fsdp", "validate_every": 100}}
    two_processes(tmp_path, nodes, KILLED_IN_WRITING, mapping(tmp_path, PLAIN, CHANGES, changes))
    for name in ("second", "connecting", "first", "publication"):
        assert (tmp_path / name).exists(), name
    # A restart on one node may be followed by one on the other, which finds the same.
    starts = [int(step) for step in (tmp_path / "starts").read_text().split()]
    assert starts == sorted(starts)
    assert set(starts) == {0, 2, 4, 6}
    assert_close(curve(run), curve(whole.path), "train_loss", 1e-5)
    assert last_checkpoint(run).step == 8
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.serial
@pytest.mark.slow
def test_torchrun_hands_on_the_signal_that_slurm_sends(tmp_path):
    """The training saves after the step in progress, and the same command of the same job goes on."""
    run = tmp_path / "run"
    many = {"training": {"steps": 100_000, "save_every": 100_000, "validate_every": 100_000}}
    handed = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout=60"]
    where = ["--standalone", "--rdzv-id=seven", "--nproc-per-node=2"]
    arguments = [*options(mapping(tmp_path, PLAIN, many)), f"--out={run}"]
    node = [*TORCHRUN, *where, *handed, "-m", "glissando", "train", *arguments]
    with subprocess.Popen(node, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 200
            while not (run / "metrics.csv").is_file() or (run / "metrics.csv").read_text().count("\n") < 3:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.2)
            os.kill(process.pid, signal.SIGUSR1)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    step = last_checkpoint(run).step
    assert step > 0
    assert f"stopped and saved at step {step}" in said
    assert process.returncode != 0
