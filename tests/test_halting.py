"""Tokens that halt on the grid of a flow: what they get, what it saves, and what does not change."""

from __future__ import annotations

import math

import pytest
import torch
from subjects import build, random_ids
from tolerances import assert_close
from torch import Tensor
from training_runs import configuration

import glissando
from glissando.data.base import Batch
from glissando.depth.halting import EvaluationCount, unroll_halting
from glissando.depth.solvers import unroll
from glissando.errors import ConfigError
from glissando.evaluation.scoring import counted
from glissando.model import LanguageModel
from glissando.training.fit import train
from research.halting import halting_table, measure_halting, plot_halting


class Plain:
    """A field in closed form that notes for which tokens it was asked."""

    def __init__(self, slopes) -> None:
        self.slopes, self.asked = slopes, []

    def __call__(self, tau: float, h: Tensor, *args: Tensor, active: Tensor | None = None) -> Tensor:
        self.asked.append(torch.ones(h.shape[:2], dtype=torch.bool) if active is None else active)
        return self.slopes(tau, h)

    def idle(self, active: Tensor) -> bool:
        return not bool(active.any())


def halted(field: Plain, h: Tensor, tolerance: float, n_steps: int = 6, method: str = "euler", **more) -> Tensor:
    return unroll_halting(field, h, n_steps=n_steps, method=method, tolerance=tolerance, **more)


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun", "rk4"])
def test_where_nothing_halts_it_is_the_plain_scheme(method):
    h = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    field = Plain(lambda tau, h: torch.sin(3 * tau + h))
    got = halted(field, h, 1e-12, method=method)
    assert_close(got, unroll(lambda tau, h: torch.sin(3 * tau + h), h, n_steps=6, method=method))
    assert all(bool(asked.all()) for asked in field.asked)


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun", "rk4"])
def test_slopes_on_a_straight_line_are_predicted_exactly(method):
    h = torch.ones(1, 2, 3, dtype=torch.float64)
    field = Plain(lambda tau, h: torch.full_like(h, 2.0 + 5.0 * tau))
    got = halted(field, h, 100.0, method=method)
    assert_close(got, unroll(lambda tau, h: torch.full_like(h, 2.0 + 5.0 * tau), h, n_steps=6, method=method))
    assert len(field.asked) == 2 * {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}[method]


@pytest.mark.parametrize("method", ["midpoint", "heun"])
def test_a_halted_token_is_attended_where_predicted(method):
    """At the stages in between, too: what the field is shown of it lies on its own straight line."""
    seen = []

    def slopes(tau: float, h: Tensor) -> Tensor:
        seen.append((tau, h.clone()))
        return torch.tensor([2.0, 9.0], dtype=h.dtype).view(1, 2, 1) * torch.tensor([1.0, math.sin(20 * tau)]).view(
            1, 2, 1
        )

    h = torch.ones(1, 2, 1, dtype=torch.float64)
    halted(Plain(slopes), h, 0.05, n_steps=5, method=method)
    for tau, at in seen:
        assert at[0, 0, 0].item() == pytest.approx(1 + 2 * tau, abs=1e-6)


def test_each_token_halts_by_its_own_error_alone():
    bend = torch.tensor([0.0, 40.0], dtype=torch.float64).view(1, 2, 1)
    h = torch.ones(1, 2, 4, dtype=torch.float64)
    field = Plain(lambda tau, h: (1.0 + bend * tau * tau).expand_as(h))
    count = EvaluationCount()
    halted(field, h, 0.05, count=count)
    assert [asked[0].tolist() for asked in field.asked] == [[True, True]] * 2 + [[False, True]] * 4
    assert (count.evaluations, count.tokens, count.per_token) == (8, 2, 4.0)


def test_padding_is_not_counted():
    count = EvaluationCount()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    halted(Plain(lambda tau, h: torch.sin(9 * tau + h)), torch.ones(2, 3, 4), 1e-9, mask=mask, count=count)
    assert (count.evaluations, count.tokens) == (18, 3)


@pytest.mark.parametrize("case", ["depth:flow-halting", "depth:flow-heun-halting"])
def test_the_subjects_of_the_laws_halt_somewhere_and_not_everywhere(case):
    model = build(case)
    control = torch.zeros(3, 1, dtype=torch.float64) if model.config.controls else None
    with torch.no_grad(), counted(model) as count:
        model(random_ids(model, 3, 11, seed=4), control=control)
    stages = 2 if "heun" in case else 1
    assert 2.1 * stages < count.per_token < 4.9 * stages


def test_leaving_out_the_mlp_where_nobody_reads_it_changes_nothing():
    model = build("depth:flow-halting")
    ids, control = random_ids(model, 3, 11, seed=4), torch.zeros(3, 1, dtype=torch.float64)
    fast = model(ids, control=control)[0]
    field = model.depth.field
    original = field.forward
    field.forward = lambda x, state, ctx, *, residual, active: original(x, state, ctx, residual=residual)
    everywhere = model(ids, control=control)[0]
    assert_close(fast, everywhere)
    weights = list(model.parameters())
    probe = torch.randn(fast.shape, dtype=fast.dtype, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad((fast * probe).sum(), weights, allow_unused=True)
    expected = torch.autograd.grad((everywhere * probe).sum(), weights, allow_unused=True)
    for one, other in zip(mine, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ({"tolerance": 0.0}, "depth.tolerance: .*greater than 0, got 0.0"),
        ({"tolerance": 0.1, "n_steps": 2}, "n_steps of at least 3, got 2"),
        ({"tolerance": 0.1, "backward": "reversible"}, "needs depth.backward `direct`"),
    ],
)
def test_mistakes(flow, message):
    depth = {"kind": "flow", "n_steps": 4, **flow}
    with pytest.raises(ConfigError, match=message):
        LanguageModel.from_config({"hidden_size": 16, "depth": depth})


def test_measuring_counts_every_setting_and_leaves_the_model_as_it_was(tmp_path):
    model = build("depth:flow-halting").float()
    ids = random_ids(model, 3, 11, seed=4)
    batches = [Batch(ids[:, :-1], ids[:, 1:], n_bytes=30)]
    before = model(ids)[0]
    points = measure_halting(model, batches, tolerances=(1e-9, 1e9))
    assert [(p.tolerance, p.n_steps, p.per_token) for p in points] == [
        (None, 5, 5.0), (1e-9, 5, 5.0), (1e9, 5, 2.0), *((None, n, float(n)) for n in range(1, 5)),
    ]  # fmt: skip
    assert points[0].perplexity == points[1].perplexity != points[2].perplexity
    assert torch.equal(model(ids)[0], before)
    with counted(model) as count:
        measure_halting(model, batches, tolerances=())
    assert count.tokens == 0, "variants are measured, and not the model itself"
    assert halting_table(points).count("\n") == 7
    assert plot_halting(points, tmp_path / "halting.png").stat().st_size > 1000


def test_what_has_no_flow_cannot_halt():
    with pytest.raises(ConfigError, match=r"depth\.kind flow"):
        measure_halting(LanguageModel.from_config({"hidden_size": 16}), [])


def test_a_run_trained_with_checkpoints_can_halt_when_it_is_read(tmp_path):
    depth = {"kind": "flow", "layers": 0, "n_steps": 4, "backward": "checkpoint"}
    run = train(configuration(tmp_path, {"model.depth": depth, "training.steps": 1}), tmp_path / "run").path
    model = glissando.load(run, {"depth.tolerance": 1e9})
    with counted(model) as count, torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64))
    assert count.per_token == 2.0
