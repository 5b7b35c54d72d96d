"""A checkpoint is whole or not there; a killed process leaves a good one."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glissando.checkpoints import checkpoint_path, keep_newest, latest_checkpoint
from glissando.errors import RunError
from glissando.random_state import restore_rng, rng_state
from glissando.storage import MANIFEST, publish_directory, verify_manifest, write_manifest
from glissando.training.state import TrainState
from glissando.training.task import Sums
from glissando.trees import load_tree, save_tree


def reread(directory: Path) -> Any:
    """The tree in a directory whose files are as they are to be."""
    write_manifest(directory)
    return load_tree(directory)


def test_a_state_is_its_checkpoint(tmp_path):
    """Every field comes back, tensors bit by bit."""
    state = TrainState(step=7, tokens=99, flops=1e12, seconds=2.5, validation_seconds=0.5, best=1.5, best_step=4)
    state.waited, state.samples, state.unlogged = 2, 30, Sums(1.25, 64, 1e9, {"hits": 3.0})
    state.model = {"model.w": torch.randn(3, 2)}
    state.optimizer = {"w": {"step": torch.tensor(7.0), "exp_avg": torch.randn(3, 2)}}
    state.schedule, state.hooks = {"best": float("inf"), "cuts": 1}, {"Calibration": {"count": 1, "gradient": None}}
    state.random = [rng_state()]
    state.save(tmp_path / "c")
    names = [MANIFEST, "model.json", "model.safetensors", "trainer.json", "trainer.safetensors"]
    assert sorted(os.listdir(tmp_path / "c")) == sorted(names)
    got = TrainState.load(tmp_path / "c")
    for name in ("step", "tokens", "flops", "seconds", "validation_seconds", "best", "best_step", "waited", "samples"):
        assert getattr(got, name) == getattr(state, name), name
    assert (got.unlogged, got.schedule, got.hooks) == (state.unlogged, state.schedule, state.hooks)
    assert torch.equal(got.model["model.w"], state.model["model.w"])
    assert torch.equal(got.optimizer["w"]["exp_avg"], state.optimizer["w"]["exp_avg"])
    assert got.random[0]["torch"] == state.random[0]["torch"]


def test_random_numbers_go_on_where_they_were(tmp_path, caplog):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist()

    draw()
    save_tree(tmp_path, rng_state())
    expected = draw()
    assert draw() != expected
    restore_rng([reread(tmp_path)], rank=0)
    assert draw() == expected
    restore_rng([reread(tmp_path)], rank=1)
    assert "no random state for process 1" in caplog.text
    assert draw() != expected


def test_an_object_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"\['hooks'\]\['mine'\]\['x'\].*object"):
        TrainState(hooks={"mine": {"x": object()}}).save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_refused(tmp_path):
    torch.save({}, tmp_path / "old.ckpt")
    (tmp_path / "half").mkdir()
    publish_directory(
        tmp_path / "other", lambda folder: (save_tree(folder, {}, "model"), save_tree(folder, {}, "trainer"))
    )
    with pytest.raises(RunError, match=r"nothing.*is missing"):
        TrainState.load(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"old\.ckpt.*Not a directory"):
        TrainState.load(tmp_path / "old.ckpt")
    with pytest.raises(RunError, match=r"half.manifest\.json is missing: the directory is incomplete"):
        TrainState.load(tmp_path / "half")
    with pytest.raises(RunError, match=r"other was saved by another version.*--from"):
        TrainState.load(tmp_path / "other")


def save(directory, step, value=None):
    path = checkpoint_path(directory, step)
    TrainState(step=step, model={"w": torch.full((4,), value or step)}).save(path)
    return path


def damage(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_latest_complete_checkpoint_is_found(tmp_path, caplog):
    assert latest_checkpoint(tmp_path / "none") is None
    good, damaged, incomplete = (save(tmp_path, step) for step in (2, 9, 10))
    damage(damaged)
    (incomplete / MANIFEST).unlink()
    (tmp_path / "step-99999999.txt").touch()
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == good
    assert "step-00000009: " in caplog.text
    assert "model.safetensors is damaged" in caplog.text
    assert "step-00000010: " in caplog.text
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        TrainState.load(damaged)


def test_the_last_good_checkpoint_is_never_deleted(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    damage(paths[3])
    damage(paths[4])
    keep_newest(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == paths[2:]
    keep_newest(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == [paths[2], paths[4]]
    with pytest.raises(ValueError, match="at least 1"):
        keep_newest(tmp_path, 0)


def test_all_checkpoints_damaged_deletes_nothing(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2)]
    for path in paths:
        damage(path)
    keep_newest(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == paths


def test_replacing(tmp_path):
    path = save(tmp_path, 1)
    save(tmp_path, 1, value=5)
    assert TrainState.load(path).model["w"][0] == 5
    assert list(tmp_path.iterdir()) == [path]


SAVER = """
import sys, torch
from pathlib import Path
from glissando.checkpoints import checkpoint_path, keep_newest
from glissando.training.state import TrainState
directory, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    # Every step is saved twice, so that the kill also hits the replacing of a directory.
    for _ in range(2):
        TrainState(step=step, model={"w": torch.full((50_000,), step)}).save(checkpoint_path(directory, step))
    keep_newest(directory, 2)
    print(step, flush=True)
    step += 1
"""


def test_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    random.seed(0)
    step = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        printed = [step, *map(int, process.stdout.read().split())]
        process.stdout.close()
        process.wait()
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        found = TrainState.load(newest).model["w"]
        assert found.eq(found[0]).all()
        assert found[0] >= printed[-1]
        step = int(found[0])
    TrainState().save(checkpoint_path(tmp_path, step + 9))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    verify_manifest(tmp_path / f"step-{step + 9:08d}")
