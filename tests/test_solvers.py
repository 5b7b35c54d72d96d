"""Solvers: every scheme converges at its stated order, and every way to its gradients gives the scheme's exact ones."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.depth.solvers import TABLEAUS, Tableau, integrate
from glissando.errors import ConfigError, UnknownNameError
from glissando.model import LanguageModel
from research import reversible

MODES = ("checkpoint", "reversible")
methods = pytest.mark.parametrize("method", TABLEAUS)


def closed_form(tau: float, h: Tensor) -> Tensor:
    """dh/dtau = (cos 3 tau - 0.5) h, whose solution at 1 is h exp(sin(3) / 3 - 0.5)."""
    return (math.cos(3 * tau) - 0.5) * h


@methods
@pytest.mark.parametrize("mode", ["direct", "reversible"])
def test_order_of_convergence(method: str, mode: str):
    h = torch.tensor([1.0, -2.0], dtype=torch.float64)
    exact = h * math.exp(math.sin(3) / 3 - 0.5)
    order, solve = TABLEAUS[method].order, integrate if mode == "direct" else reversible.integrate
    coarse = {1: 2048, 2: 256, 4: 128}[order]  # where the leading term rules, and rounding does not yet
    errors = [
        (solve(closed_form, h, n_steps=n, method=method) - exact).abs().max().item() for n in (coarse, 2 * coarse)
    ]
    assert abs(math.log2(errors[0] / errors[1]) - order) < 0.15, errors


class Wave(torch.nn.Module):
    """A field with weights, a control and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(4, 6).double(), torch.nn.Linear(6, 4).double()

    def forward(self, tau: float, h: Tensor, u: Tensor, mask: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(h + tau * u))) * mask


def gradients(method: str, mode: str, n_steps: int, plain: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    field, h = Wave(), torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    u, mask = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.ones(3, 1, dtype=torch.float64)
    if mode == "reversible":
        unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        own = {"params": (*field.parameters(), unused), "unrolled": plain}
        y = reversible.integrate(field, h, args=(u, mask), n_steps=n_steps, method=method, **own)
    else:
        y = integrate(field, h, args=(u, mask), n_steps=n_steps, method=method, checkpointed=not plain)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [h, u, *field.parameters()])]


@methods
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_steps", [1, 5, pytest.param(64, marks=pytest.mark.slow)])
def test_gradients_are_those_of_autograd_through_the_scheme(method: str, mode: str, n_steps: int):
    for got, expected in zip(
        gradients(method, mode, n_steps), gradients(method, mode, n_steps, plain=True), strict=True
    ):
        assert_close(got, expected, tolerance=1e-12)


def saved_bytes(mode: str, n_steps: int) -> int:
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    field, h = Wave(), torch.randn(500, 4, dtype=torch.float64).requires_grad_()
    u, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if mode == "reversible":
            y = reversible.integrate(field, h, args=(u, mask), params=list(field.parameters()), n_steps=n_steps)
        else:
            y = integrate(field, h, args=(u, mask), n_steps=n_steps, checkpointed=mode == "checkpoint")
    del y
    return sum(sizes.values())


def test_memory_of_the_reversible_mode_does_not_grow_with_steps():
    assert saved_bytes("reversible", 256) <= 1.02 * saved_bytes("reversible", 1)


def test_memory_of_the_checkpoint_mode_is_a_state_a_step():
    state = 500 * 4 * 8
    grown = saved_bytes("checkpoint", 65) - saved_bytes("checkpoint", 1)
    assert 64 * state <= grown <= 64 * state * 1.02
    assert saved_bytes("direct", 65) > 2 * saved_bytes("checkpoint", 65)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_the_same_when_computed_again(mode: str):
    """Gradients of a flow with dropout, computed again in two ways, against autograd through the same draws."""
    options = {"hidden_size": 8, "vocab_size": 11, "mixer.heads": 2, "mixer.dropout": 0.3}
    options |= {"depth": {"kind": "flow", "layers": 0, "n_steps": 3, "method": "heun"}}
    options |= {"block.mlp_dropout": 0.3}
    torch.manual_seed(0)
    model = LanguageModel.from_preset("transformer-nano", **options).double().train()
    ids = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
    if mode == "reversible":
        model.depth.__class__ = reversible.ReversibleFlow

    def run() -> list[Tensor]:
        torch.manual_seed(5)
        logits = model(ids)[0]
        return [logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    model.depth.gradient_checkpointing = mode == "checkpoint"
    got = run()
    model.depth.gradient_checkpointing, model.depth.unrolled = False, True  # the loop under autograd
    for one, other in zip(got, run(), strict=True):
        assert_close(one, other, tolerance=1e-12)
    model.eval()
    assert not torch.equal(model(ids)[0], got[0])


def test_tableaus_are_checked_where_they_are_built():
    with pytest.raises(ValueError, match="add up to 1"):
        Tableau(1, ((),), (0.9,))
    with pytest.raises(ValueError, match="row i"):
        Tableau(2, ((), (0.5, 0.1)), (0.0, 1.0))


def test_mistakes_are_reported():
    h = torch.zeros(1)
    with pytest.raises(UnknownNameError, match="'heun'"):
        integrate(closed_form, h, n_steps=1, method="huen")
    with pytest.raises(ConfigError, match="at least 1"):
        integrate(closed_form, h, n_steps=0)


def test_reversible_under_autocast_evaluates_backward_what_it_did_forward():
    """Training calls backward outside autocast; the gradients are those of a call inside it."""
    torch.manual_seed(0)
    depth = {"kind": "flow", "layers": 0, "n_steps": 4, "control": ["a"]}
    model = LanguageModel.from_config({"hidden_size": 16, "depth": depth})
    model.depth.__class__ = reversible.ReversibleFlow
    ids, control = torch.randint(0, 256, (2, 9)), torch.ones(2, 1)

    def gradients(inside: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, control=control)[0].float().square().mean()
            if inside:
                return list(torch.autograd.grad(loss, list(model.parameters())))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("n_steps", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_reversible_in_float32(n_steps: int):
    """Running the scheme backward rounds anew: to 1e-6 of the gradient's size at 64 steps."""
    torch.manual_seed(0)
    depth = {"kind": "flow", "layers": 0, "n_steps": n_steps, "control": ["a"]}
    model = LanguageModel.from_config({"hidden_size": 16, "depth": depth})
    model.depth.__class__ = reversible.ReversibleFlow
    ids, control = torch.randint(0, 256, (2, 9)), torch.ones(2, 1)

    def gradients(unrolled: bool) -> Tensor:
        model.depth.unrolled = unrolled
        loss = model(ids, control=control)[0].square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    fast, plain = gradients(False), gradients(True)
    assert (fast - plain).norm() <= 1e-6 * plain.norm()


def test_random_numbers_differ_from_one_evaluation_to_the_next():
    def drawn(seed: int, tau: float) -> Tensor:
        with reversible.seeded(seed, tau, torch.device("cpu")):
            return torch.rand(8)

    assert torch.equal(drawn(3, 0.25), drawn(3, 0.25))
    assert not torch.equal(drawn(3, 0.25), drawn(3, 0.5))
    assert not torch.equal(drawn(3, 0.25), drawn(4, 0.25))


@pytest.mark.parametrize(
    ("dtype", "few", "many"),
    [pytest.param(torch.float32, 1000, 2000, marks=pytest.mark.slow), (torch.bfloat16, 16, 256)],
)
def test_reversible_says_where_rounding_takes_its_gradients(dtype: torch.dtype, few: int, many: int):
    """Measured: wrong by more than 3 % where it warns, by less than 1 % where it does not."""
    draw = torch.Generator().manual_seed(0)
    w, h = (torch.randn(n, 16, generator=draw).mul(0.5).to(dtype).requires_grad_() for n in (16, 4))

    def gradients(integrated: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(integrated.sum(), (h, w))])

    def error(n_steps: int) -> float:
        got = gradients(reversible.integrate(field, h, params=[w], n_steps=n_steps))
        expected = gradients(reversible.integrate(field, h, n_steps=n_steps, unrolled=True))
        return float((got - expected).norm() / expected.norm())

    def field(tau: float, x: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    assert error(few) < 0.01
    with pytest.warns(RuntimeWarning, match=rf"{many} reversible steps in {str(dtype)[6:]}: rounding .* take fewer"):
        assert error(many) > 0.03
