"""Subnormal numbers are 0 while a model is trained, and what they were before and after."""

from __future__ import annotations

import pytest
import torch
from training_runs import configuration

from glissando.precision import flushed_subnormals
from glissando.training.fit import train
from glissando.training.objective import Objective


def halved() -> float:
    return float(torch.tensor(torch.finfo(torch.float32).tiny).mul(0.5).view(torch.int32))


@pytest.fixture
def _kept():
    assert halved() != 0, "a test before this one has left subnormals off"
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
