"""torch.compile takes every small preset whole, loss and gradients, and computes what the plain model does.

Slow, all of it: test_flow_compile.py compiles a model in `make test`.
"""

from __future__ import annotations

import pytest
import torch
from subjects import build
from tolerances import assert_close
from torch import Tensor
from torch.nn import functional as F

from glissando.presets import preset_names

SMALL = [name for name in preset_names() if name.endswith("-nano")]


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.parametrize("preset", SMALL)
def test_no_graph_breaks_in_training(preset: str):
    model = build(f"preset:{preset}").train()
    parameters = dict(model.named_parameters())
    ids = torch.randint(0, model.config.vocab_size, (2, 8))

    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())

    outcomes = []
    for run in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        torch.manual_seed(1)
        value = run(ids)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        outcomes.append({"loss": value.detach(), **dict(zip(parameters, grads, strict=True))})
    got, expected = outcomes
    for name, tensor in expected.items():
        if tensor is not None:
            assert_close(got[name], tensor, name, 1e-9)
