"""The published liquid state-space model is what its authors describe, defects included."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.mixers.liquid import discretize, hippo_legs
from research.published.liquid_ssm import END, Core, PublishedLiquid, called_hippo

#: what the liquid part would learn, if it learned
DETACHED = ("core.A", "core.B", "core.log_tau", "core.a", "core.phi")


def small(hippo: bool = False) -> PublishedLiquid:
    torch.manual_seed(0)
    return PublishedLiquid(11, 16, 8, layers=2, length=12, hippo=hippo).double().eval()


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


def test_it_has_the_published_number_of_parameters():
    with torch.device("meta"):
        assert sum(p.numel() for p in PublishedLiquid().parameters()) == 2_711_669


def test_the_liquid_part_gets_no_gradient_and_the_rest_does():
    model = small().train()
    torch.nn.functional.cross_entropy(model(ids(3, 9)).flatten(0, 1), ids(3, 9).flatten()).backward()
    dead = {name for name, p in model.named_parameters() if p.grad is None}
    assert dead == {name for name, _ in model.named_parameters() if any(part in name for part in DETACHED)}
    assert len(dead) == 2 * (4 + 6)
    for name, p in model.named_parameters():
        assert p.grad is None or (p.grad.isfinite().all() and p.grad.abs().max() > 0), name


def test_the_last_token_changes_the_first_logits_by_the_gate():
    model, tokens = small(), ids(1, 9)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 11
    with torch.no_grad():
        assert (model(tokens) - model(changed))[0, 0].abs().max() > 1e-6
        model.gate[2].weight.zero_()
        # With a gate that reads nothing, nothing looks ahead.
        assert torch.equal(model(tokens)[0, :-1], model(changed)[0, :-1])


def test_rows_change_each_other():
    model, tokens = small(), ids(2, 9)
    with torch.no_grad():
        together, alone = model(tokens), torch.cat([model(tokens[:1]), model(tokens[1:])])
    gaps = (together - alone).abs().amax((1, 2))
    assert gaps.max() > 1e-6  # one of them has the least tau, most of the time


def test_ten_steps_hold_the_input_for_ten_dt():
    """Against the equation written out for one token, from a state that is not 0."""
    torch.manual_seed(0)
    core = Core(16, 8, hippo=False).double()
    state, u = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        core.A[2, 3] = 30  # beyond the bound
        read = torch.cat([state, u], -1)
        tau = 1 + 0.1 * core.phi(read)
        dt = (tau.min() / 10).clamp_max(0.1).item()
        got = core.step(state, u, core.tau(state, u))
        assert_close(core.tau(state, u), tau, "tau")
        for row in range(3):
            Ad, Bd = discretize((core.A - torch.diag(1 / tau[row])).clamp(-10, 10), core.B, 10 * dt)
            assert_close(got[row], Ad @ state[row] + Bd @ u[row], f"row {row}")


def test_time_constants_stay_within_their_bounds():
    core = Core(16, 8, hippo=False).double()
    state, u = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        for log_tau, bound in ((-9.0, 0.01), (9.0, 10.0)):
            core.log_tau.fill_(log_tau)
            core.a.fill_(-1)  # clamped to 0.001
            tau = core.tau(state, u)
            assert (tau / bound - 1).abs().max() < 2e-3
            assert 0.01 <= tau.min() <= tau.max() <= 10


def test_what_is_wrong_is_hidden():
    model, tokens = small(), ids(1, 12)
    with torch.no_grad():
        assert torch.equal(model(torch.cat([tokens, tokens], 1)), model(tokens))
        assert torch.equal(model(torch.full((1, 3), -7)), model(torch.zeros(1, 3, dtype=torch.int64)))
        assert torch.equal(model(torch.full((1, 3), 99)), model(torch.full((1, 3), 10)))
        model.head.bias[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        assert model(tokens)[0, 0, :3].tolist() == [0, 50, 50]


def test_its_hippo_fills_the_states_to_their_bound_and_legs_does_not():
    torch.manual_seed(0)
    core, u = Core(256, 128, hippo=True), torch.randn(1, 1, 128)
    with torch.no_grad():
        assert core.run(u)[0].abs().max() == 1e6
        core.A.copy_(0.1 * hippo_legs(128)[0])
        assert core.run(u)[0].abs().max() < 10
    grown = [torch.linalg.matrix_exp(0.1 * t * called_hippo(128).double()).abs().max() for t in (1, 3, 10)]
    assert max(grown) > 1e30


def test_generation_stops_at_token_2_and_takes_one_row():
    model = small()
    with torch.no_grad():
        model.head.bias[5] = 40
        assert model.generate(ids(1, 4), 3)[0, 4:].tolist() == [5, 5, 5]
        model.head.bias[END] = 50
    assert model.generate(ids(1, 4), 3)[0, 4:].tolist() == [END]
    with pytest.raises(RuntimeError, match="Tensor with 2 elements"):
        model.generate(ids(2, 4), 3)
