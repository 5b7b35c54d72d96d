"""Muon with AdamW as one optimizer: each parameter moves as its own optimizer moves it."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from training_runs import PLAIN, configuration

from glissando.checkpoints import latest_checkpoint, saved_optimizer
from glissando.growth import Growth
from glissando.growth.runs import grow_run
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.runs import Run
from glissando.training.config import MuonOptions
from glissando.training.fit import train
from glissando.training.muon import Muon, growth_rate, orthogonal, steps, steps_by_squares
from glissando.training.optimizer import build_optimizer, put_optimizer_state, set_rates
from glissando.training.shares import Share, read_moments, remembered


def small() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel.from_preset("spectral-delta-nano", hidden_size=16, depth={"layers": 2}, tied_head=False)


def test_each_parameter_is_moved_by_its_own_optimizer():
    options = MuonOptions(learning_rate=0.01, weight_decay=0.3)
    model, alone = small(), small()
    optimizer = build_optimizer(model, options, {}, "32-true")
    maps = ("project.weight", "out.weight", "up.weight", "down.weight")
    by_muon = {name for name, _ in alone.named_parameters() if name.startswith("depth.") and name.endswith(maps)}
    others = {name: p for name, p in alone.named_parameters() if name not in by_muon}
    convolutions = [name for name in others if name.endswith("conv.weight")]
    decayed = [others.pop(name) for name in ("embedding.weight", "head.weight", *convolutions)]
    theirs = [
        torch.optim.Muon(
            [p for name, p in alone.named_parameters() if name in by_muon],
            0.005, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(decayed, 0.005, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, fused=True),
        torch.optim.AdamW(others.values(), 0.005, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True),
    ]  # fmt: skip
    set_rates(optimizer, options, 0, 0.005)
    for step in range(1):  # of later gradients the roundings below are a part
        ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(step))
        for each, optimizers in ((model, [optimizer]), (alone, theirs)):
            each.zero_grad()
            each(ids)[0].square().mean().backward()
            for own in optimizers:
                own.step()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        # PyTorch's Muon rounds to bfloat16 on its way.
        assert_close(parameter.detach(), expected[name].detach(), name, 2e-3 if name in by_muon else 1e-6)


def test_matrices_move_as_by_pytorchs():
    """Which computes in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (24, 8), (5, 16), (24, 8)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [weight.detach().clone().requires_grad_() for weight in ours]
    own = Muon([{"params": ours, "weight_decay": 0.3}], 0.01, 0.9)
    other = torch.optim.Muon(theirs, 0.01, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        own.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.detach(), b.detach(), "", 2e-3)
        assert_close(own.state[a]["momentum_buffer"], other.state[b]["momentum_buffer"], "", 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 16, 16), (2, 40, 16), (3, 7, 30)])
def test_directions_are_nearly_orthogonal(shape, dtype):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrices, dtype))
    assert values.max() < 1.3
    assert values.median() > 0.6
    assert not orthogonal(torch.zeros(shape), dtype).any()
    assert_close(orthogonal(matrices, dtype), orthogonal(matrices, torch.float32), "", 0.03)


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-3)])
def test_steps_by_squares_are_the_steps(rank, dtype, tolerance):
    """They agree for gradients of low rank, too, whose other singular values are rounding."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 16, rank, generator=generator) @ torch.randn(3, rank, 80, generator=generator)
    x = (x / x.flatten(1).norm(dim=1).view(-1, 1, 1)).double()
    assert_close(steps_by_squares(x.to(dtype)), steps(x).to(dtype), "", tolerance)


@pytest.mark.parametrize(("dtype", "shape", "by_squares"), [
    (torch.float32, (2, 8, 16), True), (torch.float32, (2, 16, 8), True),
    (torch.float32, (2, 8, 12), False), (torch.bfloat16, (2, 8, 16), False),
])  # fmt: skip
def test_wide_and_tall_matrices_of_float32_step_by_squares(dtype, shape, by_squares, monkeypatch):
    taken = []
    for name in ("steps", "steps_by_squares"):
        monkeypatch.setattr(f"glissando.training.muon.{name}", lambda x, name=name: taken.append(name) or x)
    orthogonal(torch.ones(shape), dtype)
    assert taken == ["steps_by_squares" if by_squares else "steps"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_cpu_rounds_directions_only_in_mixed_precision_and_with_bfloat16_instructions(native, precision, monkeypatch):
    monkeypatch.setattr("glissando.training.muon.computes_bfloat16", lambda accelerator: native)
    optimizer = Muon([{"params": [torch.zeros(2, 2, requires_grad=True)]}], 0.1, 0.9, precision)
    assert (optimizer.on_cpu == torch.bfloat16) == (native and precision == "bf16-mixed")


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.slow
def test_a_grown_model_moves_as_the_smaller_one_would_have(momentum, tmp_path, capfd, monkeypatch):
    """Both sides of every matrix are doubled, and the optimizer's state with them: four more steps of each give the
    same logits, and not those of before. Without the state they do not."""
    monkeypatch.setattr(MuonOptions, "eps", 1e-12)
    changes = {"training": {"optimizer": {"kind": "muon"}, "precision": "64-true"}}
    run = train(configuration(tmp_path, PLAIN, changes), tmp_path / "run")
    grow_run(run.path, tmp_path / "grown", Growth(width=2, noise=0.0))
    assert "empty" not in capfd.readouterr().err
    large = Run.open(tmp_path / "grown")
    ids = torch.arange(24).view(2, 12)
    logits = []
    newest = latest_checkpoint(run.path)
    for model, record, moments in (
        (load(newest), {}, saved_optimizer(newest)),
        (load(large.path), remembered(large), read_moments(large)),
    ):
        options = MuonOptions(learning_rate=1e-4, weight_decay=0.0)
        optimizer = build_optimizer(model, options, record, "64-true")
        if momentum:
            put_optimizer_state(optimizer, moments)
        elif record:
            put_optimizer_state(optimizer, {name: own for name, own in moments.items() if "exp_avg" in own})
        else:
            put_optimizer_state(optimizer, moments)
        set_rates(optimizer, options, 0, options.learning_rate)
        before = model(ids)[0].detach()
        for _ in range(4):
            optimizer.zero_grad()
            model(ids)[0].log_softmax(-1)[..., 3].mean().backward()
            optimizer.step()
        logits.append((before, model(ids)[0].detach()))
    (before, after), (same, grown_after) = logits
    assert_close(same, before, "grown", 1e-9)
    moved, apart = (after - before).abs().max(), (grown_after - after).abs().max()
    assert apart < 0.02 * moved if momentum else apart > 0.1 * moved


@pytest.mark.slow
def test_another_optimizer_starts_with_an_empty_state(tmp_path, capfd):
    muon = {"training": {"optimizer": {"kind": "muon"}}}
    run = train(configuration(tmp_path, PLAIN, muon), tmp_path / "run")
    grown = grow_run(run.path, tmp_path / "grown", Growth(width=2))
    changes = {"start_from": str(grown.path), "model": Run.open(grown.path).read_config()["model"]}
    train(configuration(tmp_path, PLAIN, changes), tmp_path / "adamw")
    assert "was trained with muon; adamw starts with an empty state" in capfd.readouterr().err
    train(configuration(tmp_path, PLAIN, muon, changes), tmp_path / "muon")
    assert "empty" not in capfd.readouterr().err


def test_a_share_is_given_back():
    share = Share(0.5, 4.0)
    assert growth_rate(share) == pytest.approx(0.5 * 2**0.5)
    assert growth_rate(Share(0.5, 4.0, released=2.0)) == pytest.approx(1.0)
    assert growth_rate(Share()) == 1.0
