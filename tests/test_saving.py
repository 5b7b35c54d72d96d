"""Checkpoints that are written beside the training: what is seen of them, when, and what a failure does."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from pathlib import Path

import pytest
from training_runs import PLAIN, assert_same_tensors, configuration, crash_in, last_checkpoint, weights

import glissando
from glissando.checkpoints import latest_checkpoint
from glissando.errors import RunError, TrainingError
from glissando.training.fit import resume, train
from glissando.training.progress import Progress
from glissando.training.saving import Saving
from glissando.training.state import TrainState

EVERY_FOUR = {"training": {"steps": 12, "save_every": 4, "log_every": 1, "validate_every": 10**6}}


def delay(monkeypatch: pytest.MonkeyPatch, until: threading.Event) -> list[int]:
    """Saves begin to write once the event is set; returns the steps that have begun."""
    original, begun = TrainState.save, list[int]()

    def save(self, *args, **keywords):
        begun.append(self.step)
        assert until.wait(60)
        original(self, *args, **keywords)

    monkeypatch.setattr(TrainState, "save", save)
    return begun


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The checkpoint of step 4 is written after step 7, and holds what was there after step 4, its log included."""
    whole = train(configuration(tmp_path, PLAIN, EVERY_FOUR), tmp_path / "whole")
    released, saved = threading.Event(), list[tuple[int, list[str]]]()
    begun = delay(monkeypatch, released)
    folder = tmp_path / "run"

    class Watching(Progress):
        def after_step(self, loop):
            if loop.state.step == 7:
                assert begun == [4]
                assert latest_checkpoint(folder) is None
                released.set()

        def saved(self, loop):
            saved.append((loop.state.step, sorted(path.name for path in folder.glob("checkpoints/step-*"))))

    run = train(configuration(tmp_path, PLAIN, EVERY_FOUR), tmp_path / "run", Watching())
    assert begun == [4, 8, 12]
    assert saved[0][0] >= 7
    assert [names[-1] for _, names in saved] == ["step-00000004", "step-00000008", "step-00000012"]
    for step in (8, 12):
        name = f"step-{step:08d}"
        mine, expected = (TrainState.load(path / "checkpoints" / name) for path in (run.path, whole.path))
        assert_same_tensors(
            [mine.model, mine.optimizer, mine.random], [expected.model, expected.optimizer, expected.random]
        )
        assert (mine.step, mine.unlogged) == (expected.step, expected.unlogged)
        log = (run.path / "metrics.csv").read_bytes()[: mine.logged["size"]]
        assert hashlib.sha256(log).hexdigest() == mine.logged["sha256"]
        assert log.count(b"\n") == 1 + step
    assert_same_tensors(weights(run), weights(whole))


def test_an_error_waits_for_the_save_in_progress(tmp_path, monkeypatch):
    released = threading.Event()
    delay(monkeypatch, released)
    crash_in(monkeypatch, 6, ZeroDivisionError())
    threading.Timer(0.5, released.set).start()
    with pytest.raises(ZeroDivisionError):
        train(configuration(tmp_path, EVERY_FOUR), tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").step == 4
    glissando.load(tmp_path / "run")


def test_a_second_interrupt_does_not_wait_and_the_save_is_absent_or_whole(tmp_path, monkeypatch):
    released = threading.Event()
    delay(monkeypatch, released)
    crash_in(monkeypatch, 6, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(configuration(tmp_path, EVERY_FOUR), tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run") is None
    released.set()
    next(thread for thread in threading.enumerate() if thread.name == "saving").join()
    assert last_checkpoint(tmp_path / "run").step == 4


@pytest.mark.parametrize("step", [4, 12])
def test_a_write_that_fails_ends_the_training_and_the_run_resumes(tmp_path, monkeypatch, step):
    """One in the middle after the next step, one at the end before `train` returns."""
    original, reached = TrainState.save, list[int]()

    def fail(self, *args, **keywords):
        if self.step == step:
            raise RunError("could not write it: No space left on device")
        original(self, *args, **keywords)

    class Slow(Progress):
        def after_step(self, loop):
            reached.append(loop.state.step)
            time.sleep(0.05)

    with monkeypatch.context() as patched:
        patched.setattr(TrainState, "save", fail)
        with pytest.raises(TrainingError, match=rf"could not save step {step}: could not write it: No space left"):
            train(configuration(tmp_path, PLAIN, EVERY_FOUR), tmp_path / "run", Slow())
    assert reached[-1] <= step + 2
    if step == 12:
        assert last_checkpoint(tmp_path / "run").step == 8
        resume(tmp_path / "run")
        assert_same_tensors(weights(tmp_path / "run"), weights(train(configuration(tmp_path, PLAIN, EVERY_FOUR),
                                                                     tmp_path / "whole")))  # fmt: skip


@pytest.mark.parametrize(
    ("gone", "every"), [("run", {"log_every": 1}), ("run", {"save_every": 6}), ("run/metrics.csv", {"save_every": 6})]
)
def test_what_is_removed_under_a_training_is_named_with_what_to_do(gone, every, tmp_path):
    options = {"training": {"steps": 12, "validate_every": 10**6, "log_every": 100, "save_every": 100} | every}

    class Removes(Progress):
        def after_step(self, loop):
            if loop.state.step == 3:
                path = tmp_path / gone
                path.unlink() if path.is_file() else shutil.rmtree(path)

    with pytest.raises(TrainingError, match=rf"{gone} was removed or moved .* resume it where it is now; else train"):
        train(configuration(tmp_path, PLAIN, options), tmp_path / "run", Removes())


def test_a_failure_beside_another_error_is_reported(tmp_path, monkeypatch):
    lines = list[str]()

    def fail(self, *args, **keywords):
        time.sleep(0.3)
        raise RunError("the disk is full")

    class Listening(Progress):
        def message(self, line):
            lines.append(line)

    monkeypatch.setattr(TrainState, "save", fail)
    crash_in(monkeypatch, 5, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        train(configuration(tmp_path, EVERY_FOUR), tmp_path / "run", Listening())
    assert "could not save step 4: the disk is full" in lines


def test_the_best_and_the_latest_are_one_and_what_a_hook_keeps_is_copied(tmp_path, monkeypatch):
    begun, kept, original = list[str](), list[int](), TrainState.save

    def save(self, path: Path, *args, **keywords):
        begun.append(path.name)
        while self.step == 2 and len(kept) < 3:
            time.sleep(0.01)
        original(self, path, *args, **keywords)

    class Counting(Progress):
        def before_step(self, loop, batches):
            kept.append(loop.state.step)

        def state_dict(self):
            return {"steps": kept}

    monkeypatch.setattr(TrainState, "save", save)
    both = {"training": {"steps": 4, "save_every": 2, "validate_every": 2, "log_every": 1}}
    train(configuration(tmp_path, both), tmp_path / "run", Counting())
    assert begun == ["step-00000002", "step-00000004"]
    saved = TrainState.load(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert saved.hooks["Counting"]["steps"] == [0, 1]


def test_one_save_at_a_time_and_its_error_once():
    saving, done = Saving(), list[int]()
    saving.wait()
    saving.start(1, lambda: (time.sleep(0.1), done.append(1)))
    saving.wait()
    assert done == [1]
    saving.start(2, lambda: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(TrainingError, match="could not save step 2: full"):
        saving.wait()
    saving.wait()
    saving.start(3, lambda: [][0])
    with pytest.raises(IndexError):  # a defect is no trouble of the disk
        saving.wait()
