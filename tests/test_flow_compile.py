"""torch.compile takes a flow whole, without a graph break, and computes what the plain model does."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.model import LanguageModel


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch._dynamo.reset()


def small(preset: str, **flow: object) -> LanguageModel:
    """The preset's kind of blocks, few and narrow, and without dropout."""
    depth = {"layers": 2, "n_steps": 2, **flow}
    none = {"mixer.dropout": 0.0, "block.mlp_dropout": 0.0}
    return LanguageModel.from_preset(preset, hidden_size=16, vocab_size=11, depth=depth, **none).double()


def inputs(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """Tokens and a control for each of them."""
    return torch.randint(0, 11, (2, 9)), torch.randn(2, 9, len(model.config.depth.control), dtype=torch.float64)


@pytest.mark.slow
def test_evaluation():
    model = small("hybrid-ode").eval()
    ids, control = inputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(ids, control=control)[0], model(ids, control=control)[0], tolerance=1e-12)


@pytest.mark.parametrize(
    ("preset", "mode"),
    [
        ("hybrid-ode", "direct"),
        pytest.param("hybrid-ode-nano", "direct", marks=pytest.mark.slow),
        pytest.param("hybrid-ode-nano", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_training(preset: str, mode: str):
    """One graph, logits and the gradient of every weight, a control given: learned positions, LayerNorm, GELU and
    biases; and RoPE, RMSNorm, SwiGLU, a convolution and a forget gate."""
    model = small(preset, method="heun").train()
    model.depth.gradient_checkpointing = mode == "checkpoint"
    ids, control = inputs(model)
    outcomes = []
    for run in (torch.compile(model, fullgraph=True, backend="eager"), model):
        logits = run(ids, control=control)[0]
        outcomes.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for got, expected in zip(*outcomes, strict=True):
        assert_close(got, expected, tolerance=1e-12)


@pytest.mark.slow
def test_dropout_of_the_direct_mode():
    """Drawn from PyTorch's generator: the same again for the same seed, others for another."""
    options = {"mixer.dropout": 0.3, "block.mlp_dropout": 0.3}
    depth = {"layers": 0, "n_steps": 2}
    model = LanguageModel.from_preset("hybrid-ode", hidden_size=16, vocab_size=11, depth=depth, **options).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = torch.randint(0, 11, (2, 9))

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(ids)[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
