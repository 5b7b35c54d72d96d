"""A checkpoint is whole or not there; a killed process leaves a good one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from glissando.checkpoints import TRAINER, best_checkpoint, checkpoint_path, latest_checkpoint, point_to
from glissando.errors import RunError
from glissando.storage import MANIFEST, verify_manifest, write_manifest
from glissando.training.state import TrainState, restore_rng, rng_state
from glissando.training.task import Sums


def test_a_state_is_its_checkpoint(tmp_path):
    """Every field comes back, tensors bit by bit."""
    state = TrainState(step=7, tokens=99, flops=1e12, seconds=2.5, validation_seconds=0.5, best=1.5, best_step=4)
    state.waited, state.samples, state.unlogged = 2, 30, Sums(1.25, 64, 1e9, {"hits": 3.0})
    state.model = {"model.w": torch.randn(3, 2)}
    state.optimizer = {"w": {"step": torch.tensor(7.0), "exp_avg": torch.randn(3, 2)}}
    state.schedule, state.hooks = {"best": float("inf"), "cuts": 1}, {"Calibration": {"count": 1}}
    state.random, state.lanes = [rng_state()], [[torch.randn(2), torch.randn(2, 3)], [torch.randn(1), torch.randn(4)]]
    state.save(tmp_path / "c")
    names = [MANIFEST, "model.safetensors", "trainer.json", "trainer.safetensors"]
    assert sorted(os.listdir(tmp_path / "c")) == sorted(names)
    got = TrainState.load(tmp_path / "c")
    for name in ("step", "tokens", "flops", "seconds", "validation_seconds", "best", "best_step", "waited", "samples"):
        assert getattr(got, name) == getattr(state, name), name
    assert (got.unlogged, got.schedule, got.hooks) == (state.unlogged, state.schedule, state.hooks)
    assert torch.equal(got.model["model.w"], state.model["model.w"])
    assert torch.equal(got.optimizer["w"]["exp_avg"], state.optimizer["w"]["exp_avg"])
    for expected, loaded in zip(state.lanes, got.lanes, strict=True):
        assert all(torch.equal(*pair) for pair in zip(expected, loaded, strict=True))
    assert got.random[0]["torch"] == state.random[0]["torch"]


def test_random_numbers_go_on_where_they_were(tmp_path, caplog):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist()

    draw()
    saved = json.dumps(rng_state())
    expected = draw()
    assert draw() != expected
    restore_rng([json.loads(saved)], rank=0)
    assert draw() == expected
    restore_rng([json.loads(saved)], rank=1)
    assert "no random state for process 1" in caplog.text
    assert draw() != expected


def test_an_object_is_refused(tmp_path):
    with pytest.raises(TypeError, match="object is not JSON serializable"):
        TrainState(hooks={"mine": {"x": object()}}).save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_refused(tmp_path):
    torch.save({}, tmp_path / "old.ckpt")
    (tmp_path / "half").mkdir()
    TrainState().save(tmp_path / "other")
    (tmp_path / "other" / TRAINER).write_text("{}")
    write_manifest(tmp_path / "other")
    with pytest.raises(RunError, match=r"nothing.*is missing"):
        TrainState.load(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"old\.ckpt.*Not a directory"):
        TrainState.load(tmp_path / "old.ckpt")
    with pytest.raises(RunError, match=r"half.manifest\.json is missing: the directory is incomplete"):
        TrainState.load(tmp_path / "half")
    with pytest.raises(RunError, match=r"other was saved by another version.*--from"):
        TrainState.load(tmp_path / "other")


def save(run, step, value=None):
    path = checkpoint_path(run, step)
    TrainState(step=step, model={"w": torch.full((4,), value or step)}).save(path)
    return path


def damage(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_latest_names_is_the_latest(tmp_path):
    """What a crash left beyond it is not, and the next save deletes that."""
    assert latest_checkpoint(tmp_path) is None
    only = save(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == only  # killed between the first checkpoint and `latest`
    named, beyond = save(tmp_path, 2), save(tmp_path, 9)
    with pytest.raises(RunError, match=r"latest is missing\. This checkpoint is intact.*step-00000009 "):
        latest_checkpoint(tmp_path)
    point_to(tmp_path, 2, 1)
    assert (tmp_path / "latest").read_text() == "latest: step-00000002\nbest: step-00000001\n"
    assert (latest_checkpoint(tmp_path), best_checkpoint(tmp_path)) == (named, only)
    assert not beyond.exists()


def test_a_damaged_checkpoint_or_pointer_is_an_error_that_names_what_stands(tmp_path):
    good, newest = save(tmp_path, 2), save(tmp_path, 9)
    point_to(tmp_path, 9, -1)
    stands = rf"This checkpoint is intact and loads instead: {good} \(to resume from it, write the line `latest: step-0"
    damage(newest)
    with pytest.raises(RunError, match=rf"step-00000009/model\.safetensors is damaged.*{stands}"):
        TrainState.load(newest)
    for text in ("", "latest: step-00000009", "latest: ../../x\n", "latest: step-00000007\n"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(RunError, match=rf"(latest is damaged|step-00000007/manifest\.json is missing).*{stands}"):
            latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("latest: step-00000002\n")  # as the error advises
    assert latest_checkpoint(tmp_path) == good
    damage(good)
    with pytest.raises(RunError, match=r"No other checkpoint of .* is intact"):
        TrainState.load(good)


def test_the_newest_and_the_best_are_kept(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    point_to(tmp_path, 5, 2)
    assert sorted((tmp_path / "checkpoints").iterdir()) == [paths[1], *paths[3:]]
    point_to(tmp_path, 5, 5)
    assert sorted((tmp_path / "checkpoints").iterdir()) == paths[3:]


def test_replacing(tmp_path):
    path = save(tmp_path, 1)
    save(tmp_path, 1, value=5)
    assert TrainState.load(path).model["w"][0] == 5
    assert list(path.parent.iterdir()) == [path]


def save_without_end(directory: Path, step: int, saved: Connection) -> None:
    """Say each step to `saved` once it is the latest checkpoint."""
    while True:
        # Every step is saved twice, so that the kill also hits the replacing of a directory.
        for _ in range(2):
            TrainState(step=step, model={"w": torch.full((50_000,), step)}).save(checkpoint_path(directory, step))
        point_to(directory, step, -1)
        saved.send(step)
        step += 1


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path, kills):
    random.seed(0)
    step = 0
    for _ in range(kills):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        # A fork has torch loaded already.
        process = multiprocessing.get_context("fork").Process(target=save_without_end, args=(tmp_path, step, sender))
        process.start()
        sender.close()
        last = receiver.recv()
        time.sleep(random.uniform(0.0, 0.2))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                last = receiver.recv()
        receiver.close()
        process.close()
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        found = TrainState.load(newest).model["w"]
        assert found.eq(found[0]).all()
        assert found[0] >= last
        step = int(found[0])
    TrainState().save(checkpoint_path(tmp_path, step + 9))
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]
    verify_manifest(checkpoint_path(tmp_path, step + 9))
