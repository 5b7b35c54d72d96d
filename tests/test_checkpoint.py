"""Resuming is the same as never having stopped; a killed process leaves a good checkpoint."""

from __future__ import annotations

import collections
import enum
import logging
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from glissando.training.checkpoint import (
    RandomState,
    SafeCheckpointIO,
    checkpoint_path,
    keep_newest,
    latest_checkpoint,
    restore_rng,
    rng_state,
    to_plain,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from glissando.errors import RunError
from glissando.storage import MANIFEST, publish_directory, verify_manifest
from glissando.trees import load_tree, save_tree

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]


class Colour(enum.Enum):
    RED = "red"


class Tiny(pl.LightningModule):
    """Dropout, AdamW, a warm-up schedule, and hyper-parameters of odd types."""

    def __init__(self, width=4, odd=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        noise = random.random() + np.random.rand()
        return (self.net(batch) - noise).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Resumable:
    """A loader that knows where it is, as a training stream does."""

    def __init__(self, batches=12):
        self.data, self.position = torch.linspace(-1, 1, batches * 8).reshape(batches, 2, 4), 0

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def train(steps, loader, ckpt_path=None, callbacks=(), epochs=None):
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Tiny(odd={"colour": Colour.RED, "path": Path("x"), "number": np.float32(2), "thing": object})
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        accumulate_grad_batches=2,
        plugins=[SafeCheckpointIO()],
        callbacks=[RandomState(), *callbacks],
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def assert_same_training(one, two):
    assert one.global_step == two.global_step
    ours, theirs = one.model.state_dict(), two.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (trainer.optimizers[0].state_dict()["state"] for trainer in (one, two))
    assert len(ours) == len(theirs) == 4
    for index, state in ours.items():
        assert all(torch.equal(state[name], theirs[index][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert one.lr_scheduler_configs[0].scheduler.get_last_lr() == two.lr_scheduler_configs[0].scheduler.get_last_lr()


def shuffled():
    return DataLoader(torch.linspace(-1, 1, 48).reshape(12, 4), batch_size=2, shuffle=True)


def test_resuming_inside_an_epoch_is_training_straight_on(tmp_path):
    straight = train(6, Resumable())
    path = tmp_path / "checkpoints" / "step-00000003"
    train(3, Resumable()).save_checkpoint(path)
    expected = [MANIFEST, "model.json", "model.safetensors", "trainer.json", "trainer.safetensors"]
    assert sorted(os.listdir(path)) == sorted(expected)
    assert_same_training(straight, train(6, Resumable(), ckpt_path=path))


def test_resuming_between_shuffled_epochs_is_training_straight_on(tmp_path):
    straight = train(-1, shuffled(), epochs=3)
    train(-1, shuffled(), epochs=1).save_checkpoint(tmp_path / "c")
    assert_same_training(straight, train(-1, shuffled(), ckpt_path=tmp_path / "c", epochs=3))


def test_without_the_random_state_resuming_differs(tmp_path, monkeypatch):
    straight = train(6, Resumable())
    train(3, Resumable()).save_checkpoint(tmp_path / "c")
    monkeypatch.setattr(RandomState, "on_load_checkpoint", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_same_training(straight, train(6, Resumable(), ckpt_path=tmp_path / "c"))


def test_lightnings_own_checkpoint_callback_works(tmp_path):
    def saver():
        callback = ModelCheckpoint(
            tmp_path,
            filename="step-{step:08d}",
            auto_insert_metric_name=False,
            every_n_train_steps=2,
            save_top_k=-1,
        )
        callback.FILE_EXTENSION = ""
        return callback

    straight = train(6, Resumable(), callbacks=[saver()])
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (2, 4, 6)]
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-00000006"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        resumed = train(6, Resumable(), ckpt_path=tmp_path / "step-00000004", callbacks=[saver()])
    assert_same_training(straight, resumed)


def test_random_numbers_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist()

    draw()
    save_tree(tmp_path, rng_state())
    expected = draw()
    assert draw() != expected
    restore_rng(load_tree(tmp_path))
    assert draw() == expected


def test_values_without_pickle_are_converted():
    Point = collections.namedtuple("Point", "x y")
    plain = to_plain(
        {
            "default": collections.defaultdict(list, a=[np.int64(3)]),
            "point": Point(np.float64(1.5), np.bool_(True)),
            "set": {"b", "a"},
            "array": np.arange(3),
            "dtype": torch.bfloat16,
            "path": Path("a/b"),
            Colour.RED: Colour.RED,
        }
    )
    assert torch.equal(plain.pop("array"), torch.arange(3))
    assert plain == {
        "default": {"a": [3]},
        "point": (1.5, True),
        "set": ["a", "b"],
        "dtype": "torch.bfloat16",
        "path": "a/b",
        "red": "red",
    }
    assert type(plain["default"]) is dict
    assert type(plain["point"][0]) is float


def test_an_object_outside_the_hyper_parameters_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"checkpoint\['callbacks'\]\['mine'\]\[0\].*object"):
        SafeCheckpointIO().save_checkpoint({"callbacks": {"mine": [object()]}}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_refused(tmp_path):
    io = SafeCheckpointIO()
    torch.save({}, tmp_path / "old.ckpt")
    (tmp_path / "half").mkdir()
    with pytest.raises(RunError, match=r"no checkpoint at .*nothing"):
        io.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"old\.ckpt is a file.*Pickled checkpoints are refused"):
        io.load_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(RunError, match=r"half is not a complete checkpoint"):
        io.load_checkpoint(tmp_path / "half")


def save(directory, step, value=None):
    path = checkpoint_path(directory, step)
    SafeCheckpointIO().save_checkpoint({"state_dict": {"w": torch.full((4,), value or step)}}, path)
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
        SafeCheckpointIO().load_checkpoint(damaged)


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


def test_removing_and_replacing(tmp_path):
    path = save(tmp_path, 1)
    save(tmp_path, 1, value=5)
    assert SafeCheckpointIO().load_checkpoint(path, map_location="cpu")["state_dict"]["w"][0] == 5
    SafeCheckpointIO().remove_checkpoint(path)
    SafeCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


SAVER = """
import sys, torch
from pathlib import Path
from glissando.storage import publish_directory
from glissando.trees import save_tree
from glissando.runs import checkpoint_path, keep_newest
directory, step = Path(sys.argv[1]), int(sys.argv[2])
def fill(folder):
    save_tree(folder, {"w": torch.full((50_000,), step)})
while True:
    # Every step is saved twice, so that the kill also hits the replacing of a directory.
    for _ in range(2):
        publish_directory(checkpoint_path(directory, step), fill)
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
        found = load_tree(newest)["w"]
        assert found.eq(found[0]).all()
        assert found[0] >= printed[-1]
        step = int(found[0])
    publish_directory(checkpoint_path(tmp_path, step + 9), lambda directory: save_tree(directory, {}))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    verify_manifest(tmp_path / f"step-{step + 9:08d}")


DISTRIBUTED = """
import sys, torch, lightning.pytorch as pl
from pathlib import Path
from glissando.training.checkpoint import RandomState, SafeCheckpointIO, ShardedStrategy
sys.path.insert(0, sys.argv[3])
from test_checkpoint import Resumable
kind, out = sys.argv[1], Path(sys.argv[2])
class Model(pl.LightningModule):
    sharded = False
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    def configure_model(self):
        if kind == "sharded" and not self.sharded:
            from torch.distributed.fsdp import fully_shard
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.sharded = True
    def training_step(self, batch, index):
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
class Save(pl.Callback):
    def __init__(self, name):
        self.name = name
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index in (5, 11):
            for _ in range(2):
                trainer.save_checkpoint(out / f"{self.name}{trainer.global_step}")
def train(name, resume=None):
    sharded = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    trainer = pl.Trainer(
        max_steps=6, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False,
        strategy=ShardedStrategy(**sharded) if kind == "sharded" else "ddp",
        enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2,
        use_distributed_sampler=False, plugins=[SafeCheckpointIO()], callbacks=[RandomState(), Save(name)])
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(10 + trainer.global_rank)
    trainer.fit(model, Resumable(), ckpt_path=resume)
train("straight")
train("resumed", out / "straight3")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_two_processes_resume_as_if_never_stopped(tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    here = Path(__file__).parent
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(script), kind, str(tmp_path), str(here)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    straight, resumed = (SafeCheckpointIO().load_checkpoint(tmp_path / f"{name}6") for name in ("straight", "resumed"))
    assert len(straight["random_state"]) == 2
    assert not torch.equal(*(state["torch"] for state in straight["random_state"]))
    for name, weight in straight["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name])
    ours, theirs = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (straight, resumed))
    assert all(torch.equal(ours[index]["exp_avg_sq"], theirs[index]["exp_avg_sq"]) for index in ours)
