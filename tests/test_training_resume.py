"""A run that was interrupted, killed or ran into trouble ends where an uninterrupted one does, or says why not."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import training_runs
from training_runs import (
    SHIFT,
    assert_same_tensors,
    command,
    configuration,
    last_checkpoint,
    mapping,
    metrics,
    options,
    started,
    weights,
)

import glissando
from glissando.checkpoints import latest_checkpoint
from glissando.cli import main
from glissando.errors import ConfigError, DataError, DivergenceError, RunError, Stopped, TrainingError
from glissando.metrics import read_metrics
from glissando.training import state
from glissando.training.budget import Clock
from glissando.training.fit import resume, train
from glissando.training.progress import Progress
from glissando.training.schedules import Plateau
from glissando.training.task import Objective


def assert_same_run(got: Path, expected: Path) -> None:
    """All of a checkpoint but the clock, metrics and samples, bit by bit."""
    assert_same_tensors(weights(got), weights(expected))
    mine, theirs = (dataclasses.asdict(last_checkpoint(run)) for run in (got, expected))
    for key in mine:
        if "seconds" not in key and key != "logged":  # whose rows have times
            assert_same_tensors(mine[key], theirs[key], key)
    assert metrics(got) == metrics(expected)
    one, other = ((run / "samples.txt") for run in (got, expected))
    assert one.is_file() == other.is_file()
    if one.is_file():
        assert one.read_text() == other.read_text()


class Crash(Exception):
    """Stands for a power cut."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A plateau is found within a few steps."""
    monkeypatch.setattr(Plateau, "patience", 1)


@pytest.fixture
def crash_in(monkeypatch):
    """Makes training stop dead in the given step, before it is taken."""
    return lambda step: training_runs.crash_in(monkeypatch, step, Crash())


PLATEAU = {"kind": "plateau", "warmup_steps": 0}
CASES = {
    # the checkpoint of step 4 lies between the rows of steps 3 and 6, and between validations
    "between rows": {"save_every": 4, "log_every": 3, "validate_every": 5},
    "plateau": {
        "save_every": 5, "log_every": 4, "validate_every": 1, "sample_every": 3, "early_stopping": 50,
        "schedule": PLATEAU, "optimizer": {"learning_rate": 1.0},
    },
    "everything at once": {"save_every": 3, "log_every": 3, "validate_every": 3, "sample_every": 3},
    "double": {"save_every": 4, "precision": "64-true"},
    "bf16": {"save_every": 4, "precision": "bf16-mixed"},
    "muon": {"save_every": 4, "optimizer": {"kind": "muon"}},
}  # fmt: skip


#: what differs most; the others are slow
QUICK = {"between rows", "muon"}


@pytest.mark.parametrize(
    ("case", "corpus"),
    [*(pytest.param(case, {}, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES), ("plateau", SHIFT)],
)
def test_resuming_is_as_if_never_stopped(tmp_path, crash_in, case, corpus):
    changes = {"training": CASES[case] | {"accumulate": 2, "steps": 7}}
    train(configuration(tmp_path, corpus, changes), tmp_path / "whole")
    crash_in(6)
    with pytest.raises(Crash):
        train(configuration(tmp_path, corpus, changes), tmp_path / "x")
    resume(tmp_path / "x")
    assert_same_run(tmp_path / "x", tmp_path / "whole")
    if case == "plateau":
        assert last_checkpoint(tmp_path / "x").schedule["cuts"] > 0


@pytest.mark.slow
def test_without_the_random_state_resuming_differs(tmp_path, crash_in, monkeypatch):
    """The test above can fail: dropout draws from it."""
    changes = {"training": {"save_every": 4, "steps": 14}}
    train(configuration(tmp_path, changes), tmp_path / "whole")
    crash_in(12)
    with pytest.raises(Crash):
        train(configuration(tmp_path, changes), tmp_path / "x")
    monkeypatch.setattr("glissando.training.loop.restore_rng", lambda *_: None)
    resume(tmp_path / "x")
    with pytest.raises(AssertionError):
        assert_same_tensors(weights(tmp_path / "x"), weights(tmp_path / "whole"))


def test_resuming_a_finished_run_changes_nothing(tmp_path, capfd):
    train(configuration(tmp_path, {"training": {"steps": 4}}), tmp_path / "run")
    before, rows = weights(tmp_path / "run"), metrics(tmp_path / "run")
    capfd.readouterr()
    resume(tmp_path / "run")
    assert "is finished, at step 4: nothing is left to train\n" in capfd.readouterr().err
    assert_same_tensors(weights(tmp_path / "run"), before)
    assert metrics(tmp_path / "run") == rows


@pytest.mark.parametrize(
    "ending",
    [
        {"steps": None, "seconds": 0.3},
        {"validate_every": 1, "early_stopping": 1, "optimizer": {"learning_rate": 5.0}, "steps": 90},
    ],
)
def test_resuming_a_run_that_stopped_by_itself_takes_no_further_step(tmp_path, ending):
    train(configuration(tmp_path, {"training": ending}), tmp_path / "run")
    step, before = last_checkpoint(tmp_path / "run").step, weights(tmp_path / "run")
    resume(tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").step == step
    assert_same_tensors(weights(tmp_path / "run"), before)


def test_time_already_spent_counts(tmp_path, crash_in, monkeypatch):
    readings = itertools.count()
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: next(readings) / 50))  # one lasts a fiftieth of a second
    crash_in(9)
    with pytest.raises(Crash):
        train(configuration(tmp_path, {"training": {"steps": None, "seconds": 3.0, "save_every": 4}}), tmp_path / "run")
    spent, began = last_checkpoint(tmp_path / "run").seconds, Clock.now()
    assert spent > 0.5
    resume(tmp_path / "run")
    assert Clock.now() - began < 3.0 - spent + 0.5
    seconds = [float(row["seconds"]) for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert seconds == sorted(seconds)
    assert 3.0 <= seconds[-1] < 4.0


def test_resume_takes_other_machine_options_only(tmp_path):
    train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run")
    resume(tmp_path / "run", {"accelerator": "cpu", "devices": 1})
    with pytest.raises(ConfigError, match="learning_rate"):
        resume(tmp_path / "run", {"learning_rate": 1.0})


def test_resume_without_a_checkpoint_says_so(tmp_path, crash_in):
    crash_in(1)
    with pytest.raises(Crash):
        train(configuration(tmp_path), tmp_path / "run")
    with pytest.raises(RunError, match=r"stopped before its first checkpoint.*starts it again"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("ending", [Crash, Stopped])
@pytest.mark.slow
def test_starting_from_a_run_that_has_not_ended_says_so(tmp_path, crash_in, monkeypatch, capfd, ending):
    if ending is Crash:
        crash_in(9)
    else:  # Ctrl-C
        original = Progress.before_step

        def interrupt(self, loop, batches):
            original(self, loop, batches)
            if loop.state.step == 8:
                monkeypatch.setattr(Progress, "before_step", original)
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(Progress, "before_step", interrupt)
    with pytest.raises(ending):
        train(configuration(tmp_path, {"training": {"save_every": 4}}), tmp_path / "run")
    onward = {"start_from": str(tmp_path / "run"), "training": {"steps": 1}}
    said = f"{tmp_path / 'run'} has not ended its training: this one starts from the weights that it has saved so far"
    train(configuration(tmp_path, onward), tmp_path / "early")
    assert said in capfd.readouterr().err
    resume(tmp_path / "run")
    train(configuration(tmp_path, onward), tmp_path / "late")
    assert "has not ended" not in capfd.readouterr().err


def test_a_finished_run_without_its_weights_names_them_and_its_checkpoint_loads(tmp_path):
    run = train(configuration(tmp_path, {"training": {"steps": 4}}), tmp_path / "run").path
    before = weights(run)
    (run / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"model\.safetensors is missing"):
        glissando.load(run)
    assert_same_tensors(dict(glissando.load(run / "checkpoints" / "step-00000004").state_dict()), before)


def test_what_cannot_be_resumed_says_why(tmp_path):
    train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run")
    with pytest.raises(RunError, match=r"no run at .*rum\. Did you mean .*run\?"):
        resume(tmp_path / "rum")
    with pytest.raises(RunError, match="is not a run"):
        resume(tmp_path)
    record = (tmp_path / "run" / "environment.json").read_text()
    with pytest.raises(ConfigError, match=r"training\.accelerator 'foo'"):
        resume(tmp_path / "run", {"accelerator": "foo"})
    assert (tmp_path / "run" / "environment.json").read_text() == record
    for folder in (tmp_path / "run", *(tmp_path / "run" / "checkpoints").iterdir()):
        (folder / "tokenizer.json").unlink()
    with pytest.raises((DataError, RunError), match=r"tokenizer\.json"):
        resume(tmp_path / "run")


def test_a_damaged_metrics_file_does_not_end_in_a_traceback(tmp_path):
    run = train(configuration(tmp_path, {"training": {"steps": 4, "log_every": 1}}), tmp_path / "run").path
    path = run / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"\n2,", b"\n\xff\xfe,"))
    assert [row["step"] for row in read_metrics(path)] == ["1", "3", "4"]
    path.write_bytes(b"\x00" + whole[20:])
    with pytest.raises(RunError, match=r"metrics\.csv is damaged.*Move it elsewhere"):
        read_metrics(path)


# ---------------------------------------------------------------------- kill -9 and Ctrl-C


def test_training_goes_on_when_nobody_reads_what_it_says(tmp_path, monkeypatch):
    """`glissando train 2>&1 | head` ends its reader, and not a night of training."""
    reader, writer = os.pipe()
    os.close(reader)
    run = tmp_path / "run"
    with os.fdopen(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        monkeypatch.setattr("sys.stderr", pipe)
        every = {"training": {"steps": 4, "validate_every": 1}}
        assert main(["train", *options(mapping(tmp_path, every)), f"--out={run}"]) == 0
        print("at the end", file=pipe)  # as the interpreter flushes it
    assert last_checkpoint(run).step == 4


def wait_until(process: subprocess.Popen[str], met: Callable[[], bool]) -> None:
    """While the process runs; what it says shows if that never comes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if met():
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"it did not come to pass: {process.communicate()[1][-2000:]}")


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until metrics.csv has reached a step."""

    def reached() -> bool:
        path = run / "metrics.csv"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return len(lines) > 1 and int(lines[-1].split(",")[0]) >= step

    wait_until(process, reached)


LONG = {"training": {"steps": 160, "save_every": 5, "log_every": 1, "validate_every": 100, "accumulate": 2}}


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_at_the_same_weights(tmp_path):
    values = mapping(tmp_path, LONG)
    train(configuration(tmp_path, LONG), tmp_path / "whole")
    rng, run, reached = random.Random(0), tmp_path / "run", 0
    arguments = [*options(values), f"--out={run}"]
    for _ in range(3):
        with started(command(*arguments)) as process:
            wait_for_step(process, run, reached + rng.randint(5, 25))
        newest = latest_checkpoint(run)
        assert newest is not None
        reached = int(newest.name[-8:])
        glissando.load(run)
        arguments = [f"--resume={run}"]
    assert reached < 160
    resume(run)
    assert_same_run(run, tmp_path / "whole")


@pytest.mark.slow  # a program; the tests of signals below are quick, and call the same
def test_first_interrupt_saves_and_tells_how_to_go_on(tmp_path):
    changed = {"training": {"steps": 150, "save_every": 10**6, "validate_every": 10**6, "log_every": 7}}
    train(configuration(tmp_path, changed), tmp_path / "whole")
    run = tmp_path / "run"
    with started(command(*options(mapping(tmp_path, changed)), f"--out={run}")) as process:
        wait_for_step(process, run, 14)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    step = last_checkpoint(run).step
    assert 14 <= step < 150
    assert f"stopped and saved at step {step}; continue with: glissando train --resume {run}" in error
    assert process.returncode == 130  # a script's `train && evaluate` must not go on with half a run
    assert "Traceback" not in error
    glissando.load(run)
    resume(run)
    assert_same_run(run, tmp_path / "whole")


def is_asked_to_stop(process: subprocess.Popen[str]) -> bool:
    """Whether the program has taken a first signal and left the second, as any other, to the system."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return not int(caught, 16) >> (signal.SIGUSR1 - 1) & 1


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc, which lists a program's handlers")
@pytest.mark.slow
def test_second_interrupt_ends_at_once(tmp_path):
    # the first interrupt takes effect at the end of a step, and these take minutes
    slow = {"data": {"batch_size": 16384, "seq_len": 512}, "model.hidden_size": 64}
    changed = {"training": {"steps": 1000, "accumulate": 8192, "save_every": 10**6, "validate_every": 10**6}}
    run = tmp_path / "run"
    with started(command(*options(mapping(tmp_path, slow, changed)), f"--out={run}")) as process:
        wait_until(process, lambda: not is_asked_to_stop(process))
        process.send_signal(signal.SIGINT)
        wait_until(process, lambda: is_asked_to_stop(process))
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 20  # a second, or several where every core is busy
    assert process.returncode == 130
    assert "Traceback" not in error
    assert latest_checkpoint(run) is None


def ask_in(monkeypatch, step, asking):
    """Send this process a signal while the given step is taken."""
    original = Progress.after_step

    def after_step(self, loop):
        original(self, loop)
        if loop.state.step == step - 1:
            os.kill(os.getpid(), asking)

    monkeypatch.setattr(Progress, "after_step", after_step)


@pytest.mark.parametrize("asking", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_says_how_to_go_on_and_sets_the_status(tmp_path, monkeypatch, capsys, asking):
    """As Ctrl-C, `kill`, batch systems and containers end a program."""
    ask_in(monkeypatch, 5, asking)
    before, run = signal.getsignal(asking), tmp_path / "run"
    each = {"training.log_every": 1}
    assert main(["train", *options(mapping(tmp_path, each)), f"--out={run}"]) == 128 + asking
    error = capsys.readouterr().err
    assert f"stopped and saved at step 5; continue with: glissando train --resume {run}" in error
    assert "Traceback" not in error
    assert signal.getsignal(asking) is before
    assert last_checkpoint(run).step == 5
    assert [row["step"] for row in metrics(run)] == ["1", "2", "3", "4", "5"]


def test_what_was_due_when_interrupted_is_not_lost(tmp_path, monkeypatch):
    """A validation may cut the rate of the next step: resuming begins there, so that it is done before saving."""
    changes = {"training": CASES["plateau"] | {"validate_every": 2, "sample_every": 4, "steps": 10}}
    train(configuration(tmp_path, changes), tmp_path / "whole")
    with monkeypatch.context() as patched:
        ask_in(patched, 8, signal.SIGINT)
        with pytest.raises(Stopped, match="step 8"):
            train(configuration(tmp_path, changes), tmp_path / "x")
    assert last_checkpoint(tmp_path / "x").schedule["cuts"] > 0
    resume(tmp_path / "x")
    assert_same_run(tmp_path / "x", tmp_path / "whole")


# ---------------------------------------------------------------------- trouble


def poison(monkeypatch, step, change):
    """Lets `change` spoil the loss or the model in a step."""
    original, calls = Objective.forward, itertools.count(1)

    def spoilt(self, *args):
        loss = original(self, *args)
        return change(self, loss) if next(calls) == step else loss

    monkeypatch.setattr(Objective, "forward", spoilt)


def assert_no_nan(run: Path, step: int) -> None:
    """The checkpoint of `step` is the last, it and the run's own weights are finite, and the run loads."""
    checkpoint = last_checkpoint(run)
    assert checkpoint.step == step
    kept = checkpoint.optimizer["embedding.weight"]["exp_avg"]
    for tensor in [*weights(run).values(), *checkpoint.model.values(), kept]:
        assert tensor.isfinite().all()
    glissando.load(run)
    assert "nan" not in (run / "metrics.csv").read_text()


def spoil_weights(objective, loss):
    """As if the step before had gone wrong, from the loss on."""
    objective.sums.loss = objective.sums.loss * float("nan")
    return loss * float("nan")


def spoil_one_gradient(objective, loss):
    weight = objective.model.depth.blocks[1].mlp.up.weight
    handle = weight.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])
    return loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil_weights, "the loss is nan in step 8; the gradient first in embedding"),
        (spoil_one_gradient, r"the gradient is not finite in step 8; .* depth\.blocks\.1\.mlp .*mlp\.up\.weight"),
    ],
)
def test_what_is_not_finite_stops_and_is_not_saved(tmp_path, monkeypatch, change, message):
    poison(monkeypatch, 8, change)
    with pytest.raises(TrainingError, match=message):
        train(configuration(tmp_path, {"training": {"save_every": 3, "validate_every": 1}}), tmp_path / "run")
    assert_no_nan(tmp_path / "run", 7)  # the latest best validation is a save, too


@pytest.mark.parametrize("rate", [1e38, 300.0])
def test_a_sample_of_a_diverged_model_ends_as_divergence(tmp_path, rate):
    """Weights that are no numbers, or that are and whose logits are none, before the loss of a next step tells."""
    training = {"optimizer": {"learning_rate": rate, "weight_decay": 0.0}, "steps": 30, "sample_every": 1, "clip": None}
    with pytest.raises(DivergenceError, match=r"not finite|loss is"):
        train(configuration(tmp_path, {"training": training}), tmp_path / "run")


def test_weights_that_overflow_are_not_saved(tmp_path):
    options = {"save_every": 1, "optimizer": {"learning_rate": 1e38, "weight_decay": 0.0}, "steps": 30}
    with pytest.raises(TrainingError, match=r"not finite|loss is"):
        train(configuration(tmp_path, {"training": options}), tmp_path / "run")
    if latest_checkpoint(tmp_path / "run") is not None:
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    original, saved = state.save_tensors, []

    def full(path, *args, **keywords):
        saved.append(path)
        if len(saved) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, *args, **keywords)

    monkeypatch.setattr(state, "save_tensors", full)
    with pytest.raises(TrainingError, match=r"could not save step \d+: .*No space left on device.*Free space"):
        train(configuration(tmp_path, {"training": {"save_every": 2, "validate_every": 10**6}}), tmp_path / "run")
    monkeypatch.undo()
    newest = last_checkpoint(tmp_path / "run").step
    assert newest in (2, 4)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    glissando.load(tmp_path / "run")
    train(configuration(tmp_path, {"training": {"save_every": 2}}), tmp_path / "whole")
    resume(tmp_path / "run")
    assert_same_tensors(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_metrics_that_cannot_be_written_are_a_clear_error(tmp_path, monkeypatch):
    original = Path.open

    def full(self, mode="r", *args, **keywords):
        if self.name == "metrics.csv" and mode == "ab":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, mode, *args, **keywords)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TrainingError, match=r"metrics\.csv: No space left on device"):
        train(configuration(tmp_path), tmp_path / "run")


def test_program_reports_trouble_in_one_line(tmp_path, capsys):
    bad = mapping(tmp_path, {"training": {"optimizer": {"learning_rate": 1e38}, "schedule.warmup_steps": 0}})
    assert main(["train", *options(bad), f"--out={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("glissando train: ")
    assert "Traceback" not in error
