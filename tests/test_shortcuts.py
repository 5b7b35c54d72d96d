"""Shortcuts from the embedding: x <- x + c_s x_0 / rms(x_0) before each application of a block.

The laws are tried on them in every depth by tests/subjects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from subjects import random_ids
from tolerances import assert_close, assert_tensors_close

from glissando.config import merge
from glissando.growth import grow
from glissando.model import LanguageModel, ModelConfig
from glissando.presets import load_preset
from glissando.series import SeriesModel
from glissando.training.config import AdamWOptions, MuonOptions
from glissando.training.optimizer import build_optimizer, decayed_names

SIZE = {"vocab_size": 37, "hidden_size": 16}
DEPTHS: dict[str, dict[str, Any]] = {
    "discrete": {"kind": "discrete", "layers": 3},
    "gated": {"kind": "discrete", "layers": 2, "gated": [1]},
    "mean-gate": {"kind": "discrete", "layers": 2, "mean_gate": True},
    "tied": {"kind": "tied", "layers": 2, "n_steps": 5},
    "flow": {"kind": "flow", "layers": 3, "n_steps": 2, "control": ["a"]},
}
depths = pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)


def build(depth: dict[str, Any], **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel.from_config(SIZE | options | {"depth": depth | {"shortcuts": True}}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def assert_computes(model: LanguageModel, plainly: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Logits and the gradient of every parameter are those of `plainly`, which writes the depth out.

    plainly  the embedded tokens -> what the depth makes of them
    """
    ids = random_ids(model, 2, 9, 0)
    x = model.embedding(ids)
    expected = model.logits(model.norm(plainly(x if model.lift is None else model.lift(x))))
    assert_close(model(ids)[0], expected, "values")
    result = []
    for logits in (model(ids)[0], expected):
        model.zero_grad()
        logits.square().sum().backward()
        result.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert result[0].keys() == result[1].keys() >= {"embedding.weight", "depth.shortcuts"}
    assert_tensors_close(result[0], result[1], "gradient of")


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


@depths
def test_a_new_model_computes_what_one_without_shortcuts_does(depth: dict[str, Any]):
    torch.manual_seed(0)
    plain = LanguageModel.from_config(SIZE | {"depth": depth})
    torch.manual_seed(0)
    model = LanguageModel.from_config(SIZE | {"depth": depth | {"shortcuts": True}})
    ids = random_ids(model, 2, 9, 0)
    assert torch.equal(model(ids)[0], plain(ids)[0])
    assert set(model.state_dict()) - set(plain.state_dict()) == {"depth.shortcuts"}


@pytest.mark.parametrize("name", ["discrete", "tied"])
def test_the_equation_of_a_stack(name: str):
    model = build(DEPTHS[name], block={"conv_width": 3})
    depth: Any = model.depth

    def plainly(x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for s in range(len(depth.shortcuts)):
            block, bias = depth.blocks[s % len(depth.blocks)], depth.step_bias[s] if name == "tied" else 0.0
            x = block(x + depth.shortcuts[s] * unit(x0) + bias)[0]
        return x

    assert_computes(model, plainly)


def test_gates_act_behind_the_shortcut():
    """They scale what the block adds to x + c x_0 / rms(x_0)."""
    model = build(DEPTHS["gated"])
    depth: Any = model.depth

    def plainly(x0: torch.Tensor) -> torch.Tensor:
        x = depth.blocks[0](x0 + depth.shortcuts[0] * unit(x0))[0]
        x = x + depth.shortcuts[1] * unit(x0)
        return x + depth.gates[0] * (depth.blocks[1](x)[0] - x)

    assert_computes(model, plainly)


def test_the_equation_of_a_flow():
    """Rows: the block before, the field, the two blocks after."""
    model = build(DEPTHS["flow"])
    depth: Any = model.depth

    def plainly(x0: torch.Tensor) -> torch.Tensor:
        added = depth.shortcuts.unsqueeze(1).unsqueeze(1) * unit(x0)
        x = depth.before[0](x0 + added[0])[0]
        for step in range(2):
            at = x + added[1] + depth.time(x.new_full((1,), step / 2))
            x = x + depth.alpha * depth.field(at, residual=False)[0] / 2
        for row, block in zip(added[2:], depth.after, strict=True):
            x = block(x + row)[0]
        return x

    assert_computes(model, plainly)


@pytest.mark.parametrize("name", ["discrete", "tied", "flow"])
def test_gradient_checkpointing_has_the_same_gradients(name: str):
    result = []
    for checkpointing in (False, True):
        model = build(DEPTHS[name])
        model.depth.gradient_checkpointing = checkpointing  # type: ignore[assignment]
        model(random_ids(model, 2, 9, 0))[0].square().sum().backward()
        result.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_tensors_close(result[1], result[0], "gradient of")


@depths
def test_they_are_vectors_to_the_optimizer(depth: dict[str, Any]):
    """Neither decayed nor orthogonalised: D numbers an application, though written as a matrix."""
    model = build(depth)
    assert "depth.shortcuts" not in decayed_names(model)
    for options in (AdamWOptions(weight_decay=0.1), MuonOptions(weight_decay=0.1)):
        groups = build_optimizer(model, options, {}, "32-true").param_groups
        (group,) = [group for group in groups if "depth.shortcuts" in group["names"]]
        assert group["weight_decay"] == 0
        assert "depth.blocks.0.mlp.down.weight" not in group["names"]


@depths
def test_layers_that_are_added_start_without_a_shortcut(depth: dict[str, Any]):
    model = build(depth)
    grown = grow(model, **({"steps": 2} if depth["kind"] == "tied" else {"layers": 2}), width=2)
    ids = random_ids(model, 2, 9, 0)
    with torch.no_grad():
        assert_close(grown(ids)[0], model(ids)[0], "values")
    rows: Any = grown.depth.shortcuts
    assert len(rows) == len(model.depth.shortcuts) + 2  # type: ignore[arg-type]
    assert int((rows == 0).all(1).sum()) == 2


def test_shortcuts_of_complex_numbers_and_of_series():
    model = build(DEPTHS["discrete"], mixer="spectral", representation="complex", tied_head=False)

    def plainly(x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for row, block in zip(model.depth.shortcuts, model.depth.blocks, strict=True):
            x = block(x + row * unit(x0))[0]
        return x

    assert_computes(model, plainly)
    series = SeriesModel.from_config({"hidden_size": 8, "depth": {"shortcuts": True}, "inputs": 3, "outputs": 2})
    assert series.depth.shortcuts.shape == (4, 8)


@pytest.mark.parametrize("preset", ["spectral-delta-nano", "transformer-plus-nano", "hybrid-ode-nano"])
def test_every_preset_takes_them(preset: str):
    config = merge(
        ModelConfig, load_preset(preset)["model"], {"depth.shortcuts": True, "hidden_size": 32, "vocab_size": 37}
    )
    model = LanguageModel.from_config(config)
    model(random_ids(model, 2, 9, 0))[0].sum().backward()
    assert float(model.depth.shortcuts.grad.abs().max()) > 0
