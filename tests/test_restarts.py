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

from glissando.errors import RunError, TrainingError
from glissando.runs import Run
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


def test_the_same_command_of_the_same_job_goes_on(tmp_path, monkeypatch):
    whole = train(configuration(tmp_path, CHANGES), tmp_path / "whole")
    run = killed(tmp_path, monkeypatch)
    assert last_checkpoint(run).step == 4
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
    of_job(monkeypatch, "eight")
    with pytest.raises(RunError, match="nothing is overwritten"):
        train_stages(config, tmp_path / "run")


def test_a_job_has_a_name_or_none(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert launch.job() == "7"


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
before_step, save_tree = Progress.before_step, state.save_tree
def dying_before_step(self, loop, batches):
    before_step(self, loop, batches)
    if loop.state.step == 3 and os.environ["RANK"] == "1":
        die_once("second")
def dying_in_saving(directory, tree, name):
    save_tree(directory, tree, name)
    if name == "trainer" and tree["step"] == 6:
        die_once("first")
Progress.before_step, state.save_tree = dying_before_step, dying_in_saving
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def on_two_nodes(folder: Path, program: str, values: dict) -> None:
    """The program, one process a node, both on this machine, until it has ended well; killed ones start again."""
    script = folder / "program.py"
    script.write_text(program)
    where = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=seven",
        "--local-addr=127.0.0.1",
    ]
    node = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=4", *where, str(script), str(folder)]
    node += [*options(values), f"--out={folder / 'run'}"]
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(2):  # into files: nobody reads a pipe while both are waited for
            said = stack.enter_context((folder / f"node-{number}").open("w"))
            nodes.append(subprocess.Popen(node, env=environment(), stdout=said, stderr=said))
            stack.callback(nodes[-1].kill)
        for number, each in enumerate(nodes):
            assert each.wait(timeout=500) == 0, (folder / f"node-{number}").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_on_one_machine_go_on_after_each_process_was_killed(tmp_path):
    whole = train(configuration(tmp_path, PLAIN, CHANGES), tmp_path / "whole")
    run = tmp_path / "run"
    on_two_nodes(tmp_path, KILLED_TWICE, mapping(tmp_path, PLAIN, CHANGES))
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists()
    assert_close(curve(run), curve(whole.path), "train_loss", 1e-5)
    assert last_checkpoint(run).step == 8


#: each process of a sharded training is killed once while it writes, the first also between shards and publication
KILLED_IN_WRITING = """
import os, signal, sys
from pathlib import Path
from glissando import shards
folder = Path(sys.argv.pop(1))
def die_once(name):
    if not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
save_tensors, save_manifest = shards.save_tensors, shards.save_manifest
def dying_after_shard(path, *args, **keywords):
    save_tensors(path, *args, **keywords)
    if "step-00000004" in str(path) and os.environ["RANK"] == "1":
        die_once("second")
    if "step-00000006" in str(path) and os.environ["RANK"] == "0":
        die_once("first")
def dying_before_manifest(directory, files):
    if "step-00000008" in str(directory):
        die_once("publication")
    save_manifest(directory, files)
shards.save_tensors, shards.save_manifest = dying_after_shard, dying_before_manifest
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sharded_processes_that_are_killed_while_they_write_go_on(tmp_path):
    whole = train(configuration(tmp_path, PLAIN, CHANGES), tmp_path / "whole")
    run, told = tmp_path / "run", {"training": {"strategy": "fsdp", "validate_every": 100}}
    script = tmp_path / "program.py"
    script.write_text(KILLED_IN_WRITING)
    # A torchrun of its own for each start: one that starts processes again hands them addresses of those that died.
    node = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    arguments = [*options(mapping(tmp_path, PLAIN, CHANGES, told)), f"--out={run}"]
    for complete in (2, 4, 6, 8):
        done = subprocess.run([*node, *arguments], env=environment(), capture_output=True, text=True, check=False)
        arguments = [f"--resume={run}"]
        assert (done.returncode == 0) == (complete == 8), done.stderr[-3000:]
        assert last_checkpoint(run).step == complete
        Run.open(run).read_state_dict()
    for name in ("first", "second", "publication"):
        assert (tmp_path / name).exists(), name
    assert_close(curve(run), curve(whole.path), "train_loss", 1e-5)
    assert last_checkpoint(run).step == 8
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


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
