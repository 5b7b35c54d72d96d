"""Subnormal numbers are 0 while a model is trained, in all threads of a program, and what they were after it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from training_runs import configuration, environment, mapping, options

from glissando.precision import flushed_subnormals
from glissando.training.fit import train
from glissando.training.objective import Objective


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


@pytest.mark.usefixtures("_kept")
def test_training_flushes_them_forward_and_backward(tmp_path, monkeypatch):
    seen: dict[str, set[float]] = {"forward": set(), "backward": set()}
    original = Objective.forward

    def forward(self, *arguments, **options):
        seen["forward"].add(halved())
        loss = original(self, *arguments, **options)
        loss.register_hook(lambda _: seen["backward"].add(halved()))
        return loss

    monkeypatch.setattr(Objective, "forward", forward)
    train(configuration(tmp_path, {"training": {"steps": 2}}), tmp_path / "run")
    assert seen == {"forward": {0}, "backward": {0}}
    assert halved() != 0


WORKERS = """
import sys, torch
from glissando.cli import main
from glissando.training.objective import Objective
original, halves = Objective.forward, []

def forward(self, *arguments, **options):
    tiny = torch.full((1 << 22,), torch.finfo(torch.float32).tiny)  # enough for every thread
    halves.append(int((tiny * 0.5).view(torch.int32).count_nonzero()))
    return original(self, *arguments, **options)

Objective.forward = forward
import glissando.threads
glissando.threads.min = lambda seconds, key: 2  # what is measured decides nothing
assert main(sys.argv[1:]) == 0
assert torch.get_num_threads() == 2
print(halves)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor, one thread")
@pytest.mark.usefixtures("_kept")
def test_every_thread_of_the_program_flushes_them(tmp_path):
    """The threads have started before training does, to measure how many are fastest."""
    arguments = [*options(mapping(tmp_path, {"training": {"steps": 2}})), f"--out={tmp_path / 'run'}"]
    free = {name: value for name, value in environment().items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, "train", *arguments], capture_output=True, text=True, env=free, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[0, 0]"
