"""What a loop of a user's own over several processes needs of models; test_distributed.py compares gradients."""

from __future__ import annotations

import own_loop_worker
import torch
from torch import Tensor

from glissando.model import LanguageModel
from glissando.presets import load_preset, preset_names


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


def missed(name: str) -> list[str]:
    """Parameters of a preset's model that a backward pass does not come by, or without a dimension."""
    steps = {"n_steps": 3} if "n_steps" in load_preset(name)["model"]["depth"] else {"layers": 2}
    model = LanguageModel.from_preset(name, hidden_size=48, vocab_size=20, depth=steps)
    reached = in_graph(model(torch.randint(20, (1, 5)))[0])
    return [n for n, p in model.named_parameters() if id(p) not in reached or p.ndim == 0]


def test_a_backward_pass_comes_by_every_parameter_and_each_can_be_cut():
    """DistributedDataParallel waits for each, and fully_shard refuses one without a dimension."""
    assert {name: missing for name in preset_names() if (missing := missed(name))} == {}


def test_weights_of_an_absent_control_have_no_gradient():
    """One of 0 would let weight decay act on dials that are trained already."""
    model = own_loop_worker.model_of("flow")
    own_loop_worker.loss(model, 0, False).backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"depth.control.weight", "depth.control.bias"}
