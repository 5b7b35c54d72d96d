"""Small runs for the tests of training: configurations, runs and what they leave, and the program as a process."""

from __future__ import annotations

import contextlib
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glissando.checkpoints import latest_checkpoint
from glissando.config import from_dict, merge
from glissando.data.base import Batch
from glissando.data.corpora import build_corpus
from glissando.runs import Run
from glissando.series.task import SeriesRunConfig
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask
from glissando.training.loop import Loop
from glissando.training.progress import Progress
from glissando.training.state import TrainState

#: columns of metrics.csv that hold times
TIMING = ("seconds", "tokens_per_second")
#: packages that nobody needs to compute with a model
UNUSED = {"lightning", "pytorch_lightning", "torchmetrics", "transformers", "matplotlib", "pandas"}
#: weights of real size from the first step on, so that a run that goes wrong ends elsewhere
_BASE = {
    "model": {
        "hidden_size": 16,
        "depth": {"layers": 2},
        "mixer": {"kind": "attention", "heads": 2},
        "block": {"mixer_dropout": 0.2, "mlp_dropout": 0.2},
    },
    "data": {"kind": "text", "seq_len": 16, "batch_size": 4, "max_valid_bytes": 100},
    "training": {
        "steps": 12,
        "accelerator": "cpu",
        "precision": "32-true",
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 3},
        "validate_every": 6,  # the best validation is a save, too, and a save costs more than a step
        "save_every": 6,
        "sample_every": 10**6,
        "log_every": 3,
    },
}
SHIFT = {"data": {"kind": "shift", "seq_len": 32, "batch_size": 8, "valid_rows": 8}}
SERIES_TRAINING = {"precision": "32-true", "optimizer": {"weight_decay": 0.0}, "schedule": {"final_ratio": 0.05}}
PLAIN = {"model.block": {"mixer_dropout": 0.0, "mlp_dropout": 0.0}}


def text_file(folder: Path) -> Path:
    """A file of invented words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    path = folder / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=2000)))
    return path


def mapping(folder: Path, *updates: dict[str, Any]) -> dict[str, Any]:
    """The base configuration on a text file in `folder`, changed by `updates`."""
    return merge(RunConfig, _BASE, {"data.path": str(text_file(folder))}, *updates)


def configuration(folder: Path, *updates: dict[str, Any]) -> RunConfig:
    return from_dict(RunConfig, mapping(folder, *updates))


def loop_for(folder: Path, *updates: dict[str, Any]) -> Loop:
    """A loop of a small model with a clock of its own, not started."""
    config = configuration(folder, *updates)
    task = LanguageTask(config, build_corpus(config.data))
    return Loop(config, Run(folder / "run"), task, task.new_model(), [])


def train_series(values: dict[str, Any], out: Path) -> Run:
    return train(SeriesRunConfig.read(merge(SeriesRunConfig, {"training": SERIES_TRAINING}, values)), out)


def resume_series(path: Path) -> Run:
    return resume(path, kind=SeriesRunConfig)


def weights(run: Run | Path) -> dict[str, torch.Tensor]:
    return Run.open(run.path if isinstance(run, Run) else run).read_state_dict()


def last_checkpoint(run: Run | Path) -> TrainState:
    newest = latest_checkpoint(run.path if isinstance(run, Run) else run)
    assert newest is not None
    return TrainState.load(newest)


def rewind(run: Path, step: int) -> None:
    """Leaves the run as it was when it had just saved `step`."""
    for path in (run / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)
    for name in ("latest", "manifest.json", "model.safetensors", "summary.json"):
        (run / name).unlink()


def metrics(run: Run | Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without their times."""
    path = run.path if isinstance(run, Run) else run
    with (path / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMING} for row in csv.DictReader(file)]


def curve(run: Run | Path) -> torch.Tensor:
    return torch.tensor([float(row["train_loss"]) for row in metrics(run)], dtype=torch.float64)


def options(values: dict[str, Any], prefix: str = "--") -> list[str]:
    """A configuration as the options of `glissando train`."""
    listed = []
    for key, value in values.items():
        listed += options(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
    return listed


def command(*arguments: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "glissando", "train", *arguments]


def environment() -> dict[str, str]:
    """For a subprocess: one thread, and this copy of the library."""
    root = str(Path(__file__).parent.parent)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONWARNINGS": ""}


def crash_in(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Make training raise `error` before the given step, once: a power cut."""
    original = Progress.before_step

    def fail(self: Progress, loop: Loop, batches: list[Batch]) -> None:
        original(self, loop, batches)
        if loop.state.step + 1 == step:
            monkeypatch.setattr(Progress, "before_step", original)
            raise error

    monkeypatch.setattr(Progress, "before_step", fail)


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The running process; a test that fails does not leave it behind."""
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def call(arguments: list[str], timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """The finished process; if it hangs, it is ended with all that it has started."""
    process = subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"hangs: {process.communicate()[1][-3000:]}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def assert_same_tensors(got: Any, expected: Any, where: str = "") -> None:
    """Two trees are equal, tensors bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), where
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_same_tensors(got[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same_tensors(one, other, f"{where}/{index}")
    else:
        assert got == expected, where
