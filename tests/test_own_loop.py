"""A loop of a user's own over several processes: every preset's gradients are those of the whole batch."""

from __future__ import annotations

import json
import sys

import own_loop_worker
import pytest
import torch
from tolerances import TOLERANCE
from torch import Tensor
from training_runs import call

from glissando.model import LanguageModel
from glissando.presets import load_preset, preset_names


def test_gradients_of_two_processes_are_those_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # autograd's threads of a GPU cannot be forked
    done = call([sys.executable, own_loop_worker.__file__, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        gaps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {case: gap for case, gap in gaps.items() if not gap <= TOLERANCE[torch.float64]} == {}


def in_graph(of: Tensor) -> set[int]:
    """ids of the parameters that a backward pass comes by, with a gradient or without."""
    seen, waiting, result = set(), [of.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
            result |= {id(node.variable)} if hasattr(node, "variable") else set()
    return result


@pytest.mark.parametrize("name", preset_names())
def test_a_backward_pass_comes_by_every_parameter_and_each_can_be_cut(name):
    """DistributedDataParallel waits for each, and fully_shard refuses one without a dimension."""
    steps = {"n_steps": 3} if "n_steps" in load_preset(name)["model"]["depth"] else {"layers": 2}
    model = LanguageModel.from_preset(name, hidden_size=48, vocab_size=20, depth=steps)
    reached = in_graph(model(torch.randint(20, (1, 5)))[0])
    assert [n for n, p in model.named_parameters() if id(p) not in reached or p.ndim == 0] == []


def test_weights_of_an_absent_control_have_no_gradient():
    """One of 0 would let weight decay act on dials that are trained already."""
    model = own_loop_worker.model_of("flow")
    own_loop_worker.loss(model, 0, False).backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"depth.control.weight", "depth.control.bias"}
