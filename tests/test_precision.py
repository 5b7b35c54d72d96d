"""Subnormal numbers are 0 while a model is trained, in all threads of a program, and what they were after it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from training_runs import configuration, crash_in, environment, mapping, options, train_series

from glissando.compare.speed import trainer
from glissando.precision import flushed_subnormals
from glissando.training.fit import resume, train
from glissando.training.task import Objective


def halved() -> float:
    return float(torch.tensor(torch.finfo(torch.float32).tiny).mul(0.5).view(torch.int32))


@pytest.fixture
def _kept():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_kept")
def test_they_are_flushed_within_and_restored():
    with flushed_subnormals():
        assert halved() == 0
        with flushed_subnormals():
            assert halved() == 0
        assert halved() == 0
    assert halved() != 0
    with pytest.raises(KeyError), flushed_subnormals():
        raise KeyError
    assert halved() != 0


@pytest.fixture
def seen(_kept, monkeypatch) -> dict[str, list[float]]:
    """Half of the smallest normal number, in each forward and backward pass of a training of text or series."""
    seen: dict[str, list[float]] = {"forward": [], "backward": []}

    def watched(function):
        def loss_of(*arguments, **options):
            seen["forward"].append(halved())
            loss = function(*arguments, **options)
            loss.register_hook(lambda _: seen["backward"].append(halved()))
            return loss

        return loss_of

    monkeypatch.setattr(Objective, "forward", watched(Objective.forward))
    return seen


def test_training_flushes_them_forward_and_backward(seen, tmp_path, monkeypatch):
    crash_in(monkeypatch, 2, RuntimeError("a power cut"))
    with pytest.raises(RuntimeError, match="a power cut"):
        train(configuration(tmp_path, {"training": {"steps": 2, "save_every": 1}}), tmp_path / "run")
    assert seen == {"forward": [0], "backward": [0]}
    assert halved() != 0
    resume(tmp_path / "run")
    assert seen == {"forward": [0, 0], "backward": [0, 0]}
    assert halved() != 0


def test_training_on_series_flushes_them(seen, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("t,a\n" + "".join(f"{n},{n % 3}\n" for n in range(60)))
    model = {"hidden_size": 8, "depth": {"layers": 1}, "mixer": {"kind": "liquid", "state_size": 8}}
    data = {"path": str(table), "time": "t", "window": 16}
    train_series({"model": model, "data": data, "training": {"steps": 2}}, tmp_path / "run")
    assert seen == {"forward": [0, 0], "backward": [0, 0]}
    assert halved() != 0


@pytest.mark.usefixtures("_kept")
def test_training_speed_is_measured_with_them_flushed():
    model, result = torch.nn.Embedding(5, 5), []
    model.register_forward_hook(lambda *_: result.append(halved()))
    trainer(model, torch.zeros(1, 3, dtype=torch.long))()
    assert result == [0]
    assert halved() != 0


WORKERS = """
import sys, torch
from glissando.cli import main
from glissando.training.task import Objective
original, halves = Objective.forward, []

def forward(self, *arguments, **options):
    tiny = torch.full((1 << 22,), torch.finfo(torch.float32).tiny)  # enough for every thread
    halves.append(int((tiny * 0.5).view(torch.int32).count_nonzero()))
    return original(self, *arguments, **options)

Objective.forward = forward
import glissando.threads
glissando.threads.min = lambda seconds, key: 2  # what is measured decides nothing
assert main(sys.argv[1:]) == 0
assert halves
assert torch.get_num_threads() == 2
print(halves)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor, one thread")
@pytest.mark.usefixtures("_kept")
@pytest.mark.slow
def test_every_thread_of_the_program_flushes_them(tmp_path):
    """The threads have started before training does, to measure how many are fastest."""
    run, free = tmp_path / "run", {name: text for name, text in environment().items() if not name.startswith("OMP_")}
    first = [*options(mapping(tmp_path, {"training": {"steps": 2}})), f"--out={run}"]
    more = [f"--from={run}", f"--out={tmp_path / 'more'}", "--training.steps=4"]
    for arguments, steps in ((first, 2), (more, 4)):
        command = [sys.executable, "-c", WORKERS, "train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=free, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1] == str([0] * steps)
