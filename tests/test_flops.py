"""Cost per token: the formula against PyTorch's counter on plain references, closed forms, and budgets."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from slow import slow_where
from subjects import CASES, PRESETS, SHARED, build, random_ids
from torch.utils.flop_counter import FlopCounterMode
from training_runs import configuration, last_checkpoint, metrics, rewind

from glissando.depth.flow import FlowDepth
from glissando.depth.solvers import evaluations
from glissando.errors import ConfigError
from glissando.flops import Flops, block_flops, forward_flops, training_flops
from glissando.mixers.attention import layer as attention_module
from glissando.mixers.tau import layer as tau_module
from glissando.model import LanguageModel
from glissando.training.fit import resume, train


def counted(model: LanguageModel, batch: int, length: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """What PyTorch's counter finds for each token, every product in the open, less what a flow does once a call and
    what a window hides."""
    for module, name in ((attention_module, "attention"), (tau_module, "tau_attention")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), backend="reference"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(random_ids(model, batch, length, seed=1))
    depth, once = model.depth, 0
    if isinstance(depth, FlowDepth):
        first, _, second = depth.time
        n = evaluations(depth.config.method, depth.n_steps)
        once = 2 * n * (first.weight.numel() + second.weight.numel())
    hidden = sum(4 * times * _out_of_window(block.mixer, length) for block, times in depth.applications())
    return (counter.get_total_flops() - once) / (batch * length) - hidden


def _out_of_window(mixer: object, length: int) -> int:
    """Entries of the keys that a query of `attention` does not see, over its heads."""
    if not isinstance(mixer, attention_module.Attention) or mixer.config.window is None:
        return 0
    return mixer.heads * mixer.head_size * max(0, length - mixer.config.window)


@pytest.mark.parametrize("case", slow_where({*PRESETS, *SHARED} - {"mixer:attention-grouped"}, CASES))
def test_products_are_those_that_pytorch_counts(case, monkeypatch):
    model, length = build(case), 12
    assert forward_flops(model, length).products == counted(model, 3, length, monkeypatch)


def test_a_transformer_by_hand():
    """2 a weight of every linear map, the tied head, and 4 D T for attention."""
    model = LanguageModel.from_config(
        {"hidden_size": 8, "depth": {"layers": 3}, "mixer": {"kind": "attention", "heads": 2}}
    )
    block = 2 * (3 * 64 + 64 + 3 * 8 * 24) + 4 * 8 * 10
    assert forward_flops(model, 10) == Flops(3 * block + 2 * 8 * 256, 0)
    assert training_flops(model, 10) == 3 * (3 * block + 2 * 8 * 256)


def test_what_is_no_product_by_hand():
    """The published spectral operator: 6 applications of a recurrence and two transforms over 16 channels."""
    model = build("preset:continuous-transformer", torch.float32)
    n = model.config.hidden_size
    assert forward_flops(model, 7).other == pytest.approx(6 * (8 * n + 10 * n * math.log2(n)))


def test_tied_applications_and_solver_steps_count():
    tied = [build_with({"kind": "tied", "layers": 1, "n_steps": n}) for n in (1, 3)]
    flow = [build_with({"kind": "flow", "layers": 0, "n_steps": n, "method": "rk4"}) for n in (1, 3)]
    (block, _), *_ = tied[0].depth.applications()
    for small, large, more in ((*tied, 2), (*flow, 8)):
        assert forward_flops(large, 9).total - forward_flops(small, 9).total == more * block_flops(block, 9).total


def build_with(depth: dict) -> LanguageModel:
    return LanguageModel.from_config({"hidden_size": 8, "depth": depth, "mixer": {"kind": "attention", "heads": 2}})


def test_a_length_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        forward_flops(build_with({"layers": 1}), 0)


def test_a_budget_of_flops_ends_training_and_is_logged(tmp_path):
    per_step = 4 * 16 * training_flops(LanguageModel.from_config(configuration(tmp_path).model), 16)
    budget = {"training": {"steps": None, "flops": 6.5 * per_step, "log_every": 1}}
    run = train(configuration(tmp_path, budget), tmp_path / "run")
    rows = metrics(run)
    assert [float(row["flops"]) for row in rows] == pytest.approx([per_step * k for k in range(1, 8)], rel=1e-6)
    assert last_checkpoint(run).flops == pytest.approx(7 * per_step)


def test_flops_go_on_over_a_resumption(tmp_path, monkeypatch):
    """A run that is stopped half-way and goes on spends what the whole one does."""
    monkeypatch.setattr("glissando.checkpoints.KEPT", 3)
    per_step = 4 * 16 * training_flops(LanguageModel.from_config(configuration(tmp_path).model), 16)
    budget = {"training": {"steps": None, "flops": 6 * per_step, "save_every": 2}}
    run = train(configuration(tmp_path, budget), tmp_path / "run")
    whole = last_checkpoint(run).flops
    rewind(run.path, 4)
    assert last_checkpoint(run).flops == pytest.approx(4 * per_step)
    resume(run.path)
    assert last_checkpoint(run).flops == whole


def test_two_budgets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.steps.*\.flops; got steps and flops"):
        train(configuration(tmp_path, {"training.flops": 1e9}), tmp_path / "run")
