"""Training goes on where growth left it: with no noise exactly as the small model would, and with noise nearby."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import build_one_layer as build
from subjects import random_ids
from torch import nn
from training_runs import assert_same_tensors, configuration, curve, last_checkpoint, metrics, rewind, weights

from glissando.checkpoints import latest_checkpoint, saved_optimizer
from glissando.config import from_dict
from glissando.errors import ConfigError, RunError
from glissando.growth import Growth, grow_by
from glissando.growth.runs import grow_moments, grow_run, record
from glissando.model import LanguageModel
from glissando.runs import OPTIMIZER, Run
from glissando.training.config import AdamWOptions, OptimizerOptions, RunConfig
from glissando.training.fit import resume, train
from glissando.training.language_task import LanguageTask
from glissando.training.optimizer import optimizer_groups, put_optimizer_state, set_rates
from glissando.training.shares import Moments, Share, read_moments, shares

RATE, DECAY, EPS, CLIP = 0.01, 0.5, 1e-3, 0.3


class Trainer:
    """AdamW with the factors that growth leaves, clipped, on random tokens: what glissando.training.loop does."""

    def __init__(self, model: LanguageModel, grown: dict[str, list[float]], moments: Moments) -> None:
        self.model, self.shares = model, shares(model, grown)
        self.optimizer = torch.optim.AdamW(optimizer_groups(model, grown, DECAY, EPS), lr=RATE, betas=(0.9, 0.95))
        put_optimizer_state(self.optimizer, moments)

    def steps(self, first: int, last: int) -> torch.Tensor:
        """Loss and gradient norm (steps, 2)."""
        return torch.tensor([self._step(step) for step in range(first, last)], dtype=torch.float64)

    def _step(self, step: int) -> tuple[float, float]:
        ids = random_ids(self.model, 2, 8, seed=step % 3)
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(ids)[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        named = [(n, p) for n, p in self.model.named_parameters() if p.grad is not None]
        norm = math.hypot(*(float(p.grad.norm()) * self.shares[n].norm for n, p in named))
        for _, parameter in named:
            parameter.grad *= min(1.0, CLIP / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * group["rate"]
        self.optimizer.step()
        return loss.item(), norm

    def moments(self) -> Moments:
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {names[id(p)]: dict(own) for p, own in self.optimizer.state.items()}


@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("preset:transformer-plus", {"width": 3, "heads": 2, "ffn": 1}),
        ("preset:minimal-transformer", {"heads": 3, "ffn": 2}),
        ("preset:gpt", {"width": 2}),
        ("preset:continuous-transformer", {"width": 2}),
        pytest.param("preset:continuous-transformer-nano", {"width": 2, "state": 3}, marks=pytest.mark.slow),
        ("preset:tauformer-nano", {"width": 2}),
        ("preset:hybrid-ode-nano", {"width": 2}),
        ("preset:liquid-ssm-nano", {"width": 2, "state": 3}),
        pytest.param("mixer:liquid-dense", {"width": 2}, marks=pytest.mark.slow),
        ("depth:discrete-shortcuts", {"width": 2}),
    ],
    ids=str,
)
def test_without_noise_training_is_exactly_the_small_models(case, by):
    """Losses and gradient norms of 4 clipped steps with weight decay after 3 of the small model, grown once, and
    then of 2 once more: in float64."""
    small = Trainer(build(case), {}, {})
    small.steps(0, 3)
    once = grow_by(copy.deepcopy(small.model), Growth(**by, noise=0.0))
    grown = Trainer(once.model, record(once, {}), grow_moments(small.moments(), once))
    expected = small.steps(3, 7)
    # Fourier bins that a tile does not have get gradients of rounding's size, which Adam magnifies.
    bound = 1e-9 if case != "preset:continuous-transformer" else 1e-6
    torch.testing.assert_close(grown.steps(3, 7), expected, rtol=bound, atol=bound)
    twice = grow_by(grown.model, Growth(width=2, noise=0.0))
    again = Trainer(twice.model, record(twice, record(once, {})), grow_moments(grown.moments(), twice))
    torch.testing.assert_close(again.steps(7, 9), small.steps(7, 9), rtol=10 * bound, atol=10 * bound)
    assert float((expected[-1] - expected[0]).abs().max()) > 0.01  # it was training


@pytest.mark.parametrize("part", ["rate", "eps", "norm", "moments"])
@pytest.mark.slow
def test_every_factor_is_needed(part, monkeypatch):
    """With any one of them left out the grown run goes elsewhere: the test above can fail."""
    small = Trainer(build("preset:transformer-plus"), {}, {})
    small.steps(0, 10)
    grown = grow_by(copy.deepcopy(small.model), Growth(width=2, noise=0.0))
    moments = grow_moments(small.moments(), grown)
    if part == "moments":
        moments = {}
    else:
        monkeypatch.setattr(Share, part, property(lambda self: 1.0))
    got = Trainer(grown.model, record(grown, {}), moments).steps(10, 40)
    assert float((got[:, 0] - small.steps(10, 40)[:, 0]).abs().max()) > 1e-4


def test_the_published_recipe_of_the_factors():
    """Width x 2: moments m / 2 and v / 4, the untied head's unscaled; half the rate and twice the decay for readers."""
    model = build("preset:gpt")
    grown = grow_by(model, Growth(width=2))
    kept = record(grown, {})
    assert kept["embedding.weight"] == [1.0, 2.0]
    assert kept["depth.blocks.0.mlp.up.weight"] == [0.5, 4.0]
    assert kept["depth.blocks.0.mlp.up.bias"] == [1.0, 2.0]
    assert kept["head.weight"] == [0.5, 2.0]
    share = Share(*kept["depth.blocks.0.mlp.up.weight"])
    assert (share.rate, share.eps, share.norm) == (0.5, 0.5, 1.0)
    groups = optimizer_groups(grown.model, kept, 0.1, 1e-8)
    readers = next(group for group in groups if "depth.blocks.0.mlp.up.weight" in group["names"])
    assert (readers["rate"], readers["weight_decay"]) == (0.5, 0.2)
    for name, ratio in (("depth.blocks.0.mlp.up.weight", 0.5), ("embedding.weight", 0.5), ("head.weight", 1.0)):
        ones = torch.ones_like(dict(model.named_parameters())[name])
        assert grown.moment(name, ones, 1).unique().tolist() == [ratio]
        assert grown.moment(name, ones, 2).unique().tolist() == [ratio**2]


@pytest.mark.slow
def test_copies_part_company_and_the_loss_does_not_jump():
    """500 steps after growth with noise no two copies are alike; without noise all are. Nearby for the first 50."""
    small = Trainer(build("preset:transformer-plus"), {}, {})
    small.steps(0, 20)
    runs = {}
    for noise in (0.2, 0.0):
        grown = grow_by(copy.deepcopy(small.model), Growth(width=2, noise=noise))
        runs[noise] = Trainer(grown.model, record(grown, {}), grow_moments(small.moments(), grown))
    gap = (runs[0.2].steps(20, 70) - small.steps(20, 70))[:, 0].abs().max()
    assert float(gap) < 0.03
    runs[0.2].steps(70, 520)
    runs[0.0].steps(20, 40)
    seen = torch.cat([random_ids(small.model, 2, 12, seed).flatten() for seed in range(3)]).unique()
    table = grow_by(small.model, Growth(width=2)).table
    for noise, trainer in runs.items():
        for name, value in trainer.model.named_parameters():
            for dim, lift in enumerate(table[name].lifts):  # type: ignore[union-attr]
                if lift.copies == 2:
                    order = lift.source.argsort(stable=True)
                    one, other = value.detach().index_select(dim, order).unflatten(dim, (-1, 2)).unbind(dim + 1)
                    gap = (one - other).abs()
                    gap = (
                        gap[seen] if name == "embedding.weight" else gap
                    )  # of tokens that never came nothing is learned
                    assert float(gap.min()) > 1e-9 if noise else float(gap.max()) < 1e-12, (noise, name, dim)


# ---------------------------------------------------------------------------- runs

STEADY: dict[str, Any] = {
    "model": {"block": {"mixer_dropout": 0.0, "mlp_dropout": 0.0}},
    "training": {
        "precision": "64-true",
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.5},
        "clip": 0.3,
        "log_every": 1,
        "validate_every": 10**6,
    },
}


@pytest.fixture(scope="module", autouse=True)
def large_eps():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OptimizerOptions, "eps", 1e-3)
        yield


@pytest.fixture(autouse=True)
def unsampled(monkeypatch):
    """Sampled text takes longer than these trainings."""
    monkeypatch.setattr(LanguageTask, "sample", lambda self, model: "")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return train(configuration(folder, STEADY, {"training.sample_every": 10**6}), folder / "run").path


def gone_on(start: Path, folder: Path, *updates: dict[str, Any], out: str) -> Path:
    """More training, as `glissando train --from` does with the options of `start`."""
    model = {"model": Run.open(start).read_config()["model"]}
    config = configuration(folder, STEADY, model, {"training.steps": 8, "start_from": str(start)}, *updates)
    return train(config, folder / out).path


def test_a_grown_run_trains_on_exactly(small, tmp_path):
    """From checkpoint to run to Lightning and back; stopped half-way and resumed, to the same weights."""
    same = grow_run(small, tmp_path / "same", Growth()).path
    large = grow_run(small, tmp_path / "large", Growth(width=2, noise=0.0)).path
    alone = gone_on(same, tmp_path, out="alone")
    grown = gone_on(large, tmp_path, {"training.save_every": 4}, out="grown")
    assert float((curve(alone) - curve(grown)).abs().max()) < 1e-6  # of seven digits that are logged
    for one, other in zip(metrics(alone), metrics(grown), strict=True):
        assert float(other["grad_norm"]) == pytest.approx(float(one["grad_norm"]), rel=1e-5)
    factors = Run.open(grown).read_config()["grown"]
    assert factors == Run.open(large).read_config()["grown"]
    whole, optimizer = weights(grown), last_checkpoint(grown).optimizer
    rewind(grown, 4)
    resume(grown)
    assert_same_tensors(weights(grown), whole)
    assert_same_tensors(last_checkpoint(grown).optimizer, optimizer)


def test_what_a_grown_run_holds(small, tmp_path):
    grown = grow_run(small, tmp_path / "grown", Growth(width=2, layers=1))
    newest = latest_checkpoint(small)
    assert newest is not None
    before, after = saved_optimizer(newest), read_moments(Run.open(grown.path))
    assert before.keys() == after.keys()
    assert set(weights(grown.path)) - after.keys() == {n for n in weights(grown.path) if ".blocks.2." in n}
    name = "depth.blocks.0.mlp.down.weight"
    mean = before[name]["exp_avg"]
    assert after[name]["exp_avg"].shape == weights(grown.path)[name].shape
    torch.testing.assert_close(after[name]["exp_avg"][:16, : mean.shape[1]], mean / 2)
    assert int(after[name]["step"]) == 12
    assert weights(grown.path)[name].dtype == torch.float64  # as it was trained


def test_a_run_that_has_grown_grows_again(small, tmp_path):
    once = grow_run(small, tmp_path / "once", Growth(width=2)).path
    trained = gone_on(once, tmp_path, {"training.steps": 2}, out="trained")
    twice = grow_run(trained, tmp_path / "twice", Growth(width=2)).path
    assert Run.open(twice).read_config()["grown"]["depth.blocks.0.mlp.up.weight"] == [0.25, 16.0]


def test_grown_twice_in_a_row_keeps_the_state_of_its_optimizer(small, tmp_path, capsys):
    once = grow_run(small, tmp_path / "once", Growth(width=2)).path
    twice = grow_run(once, tmp_path / "twice", Growth(ffn=2)).path
    assert "anew" not in capsys.readouterr().err
    before, after = read_moments(Run.open(once)), read_moments(Run.open(twice))
    assert before.keys() == after.keys()
    assert int(after["embedding.weight"]["step"]) == 12
    assert torch.equal(after["embedding.weight"]["exp_avg"], before["embedding.weight"]["exp_avg"])
    up = "depth.blocks.0.mlp.up.weight"
    assert len(after[up]["exp_avg"]) == 2 * len(before[up]["exp_avg"])


@pytest.mark.slow
def test_shares_of_the_rate_are_given_back(small, tmp_path):
    """Held for `release` steps and gone after as many again; rate times weight decay is the same throughout."""
    large = grow_run(small, tmp_path / "large", Growth(width=2, noise=0.0)).path
    alone = gone_on(grow_run(small, tmp_path / "same", Growth()).path, tmp_path, out="alone")
    trained = gone_on(large, tmp_path, {"training.optimizer.release": 3}, out="trained")
    apart = (curve(alone) - curve(trained)).abs()
    assert float(apart[:3].max()) < 1e-6
    assert float(apart[5:].min()) > 1e-5
    name = "depth.blocks.0.mlp.up.weight"
    twice = grow_run(trained, tmp_path / "twice", Growth(width=2)).path
    remembered = Share(*Run.open(twice).read_config()["grown"][name])
    assert (remembered.share, remembered.copies, remembered.rate) == (0.25, 16.0, 0.5)
    further = gone_on(trained, tmp_path, {"training.steps": 2}, out="further")  # and stay so where training goes on
    remembered = Share(*Run.open(further).read_config()["grown"][name])
    assert (remembered.share, remembered.copies, remembered.rate) == (0.5, 4.0, 1.0)


def test_rates_of_a_step():
    """A share of 0.5 is held for 4 steps, 0.5 ** 0.5 half-way through as many again; decay falls as the rate rises."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(optimizer_groups(model, {"weight": [0.5, 4.0]}, 0.1, 1e-8))
    grown = next(group for group in optimizer.param_groups if group["names"] == ["weight"])
    for step, rate in ((0, 0.5), (4, 0.5), (6, 0.5**0.5), (8, 1.0)):
        set_rates(optimizer, AdamWOptions(release=4, weight_decay=0.1), step, 0.01)
        assert grown["lr"] == pytest.approx(0.01 * rate)
        assert grown["lr"] * grown["weight_decay"] == pytest.approx(0.01 * 0.1)


def test_a_fused_optimizer_counts_steps_where_its_weights_are():
    """The count of moments that were read from a file is on the host, and a fused kernel on a device cannot read it."""
    model = nn.Linear(2, 2, device="meta")
    moments = {"weight": {"step": torch.tensor(3), "exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2)}}
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.AdamW(optimizer_groups(model, {}, 0.1, 1e-8))
        for group in optimizer.param_groups:
            group["fused"] = fused
        put_optimizer_state(optimizer, moments)
        assert optimizer.state[model.weight]["step"].device.type == device


def test_a_configuration_stays_as_it_was_given(small, tmp_path):
    """What a run finds out about itself is not the caller's, who may train another with it."""
    large = grow_run(small, tmp_path / "large", Growth(width=2)).path
    given = replace(configuration(tmp_path), start_from=str(large))
    given.model = from_dict(RunConfig, {"model": Run.open(large).read_config()["model"]}).model
    before = copy.deepcopy(given)
    train(given, tmp_path / "a")
    assert given == before


def test_how_much_of_the_shares_is_held():
    held = AdamWOptions(release=100).held
    assert [held(step) for step in (0, 100, 150, 200, 10**6)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert AdamWOptions().held(10**6) == 1.0


def test_mistakes(small, tmp_path):
    with pytest.raises(RunError, match="not empty"):
        grow_run(small, small, Growth(width=2))
    with pytest.raises(ConfigError, match="vocabulary is its tokenizer's"):
        grow_run(small, tmp_path / "out", Growth(vocab=300))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="start from that with --from"):
        train(replace(configuration(tmp_path), grown={"embedding.weight": [1.0, 2.0]}), tmp_path / "run")
    large = grow_run(small, tmp_path / "large", Growth(width=2)).path
    with pytest.raises(ConfigError, match="fsdp"):
        gone_on(large, tmp_path, {"training.strategy": "fsdp"}, out="sharded")
    with pytest.raises(ConfigError, match="is no parameter of this model"):
        shares(build("preset:gpt"), {"depth.blocks.9.mlp.up.weight": [0.5, 4.0]})
    (large / OPTIMIZER).write_bytes(b"broken")
    with pytest.raises(RunError):
        gone_on(large, tmp_path, out="damaged")
