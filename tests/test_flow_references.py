"""The flow beside an independent implementation (torchdiffeq), and the flow's benchmarks on small models.

torchdiffeq's `rk4` is the 3/8 rule, which is put among our tableaus here; its classical step, which its solvers do not
use on a fixed grid, is put among its solvers.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch
from tolerances import assert_close
from torch import Tensor
from torchdiffeq import odeint, odeint_adjoint
from torchdiffeq._impl.fixed_grid import RK4
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.rk_common import rk4_step_func

from benchmarks import flow as bench
from benchmarks.rows import ROWS
from glissando.depth.flow import FlowDepth
from glissando.depth.solvers import TABLEAUS, Tableau, integrate
from glissando.errors import GlissandoError
from glissando.mixers import Context
from glissando.model import LanguageModel

EXACT = 1e-12
THEIRS = {"euler": "euler", "midpoint": "midpoint", "heun": "heun2", "rk4": "classical", "three-eighths": "rk4"}
THREE_EIGHTHS = Tableau(4, ((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (1 / 8, 3 / 8, 3 / 8, 1 / 8))
methods = pytest.mark.parametrize("method", THEIRS)


class Classical(RK4):
    """torchdiffeq's classical Runge-Kutta step on its fixed grid."""

    def _step_func(self, func, t0, dt, t1, y0):
        slope = func(t0, y0)
        return rk4_step_func(func, t0, dt, t1, y0, f0=slope), slope


@pytest.fixture(autouse=True)
def _schemes(monkeypatch):
    monkeypatch.setitem(SOLVERS, "classical", Classical)
    monkeypatch.setitem(TABLEAUS, "three-eighths", THREE_EIGHTHS)


def grid(n_steps: int) -> Tensor:
    return torch.linspace(0, 1, n_steps + 1, dtype=torch.float64)


def test_every_scheme_of_ours_has_a_reference():
    assert set(THEIRS) == set(TABLEAUS)


@methods
@pytest.mark.parametrize("n_steps", [1, 3, 16])
def test_a_field_given_by_a_formula(method: str, n_steps: int):
    h = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def field(tau: float | Tensor, h: Tensor) -> Tensor:
        return (math.cos(3 * tau) - 0.5) * h.sin()

    got = integrate(field, h, n_steps=n_steps, method=method)
    assert_close(got, odeint(field, h, grid(n_steps), method=THEIRS[method])[-1], tolerance=EXACT)


def small(method: str, n_steps: int) -> tuple[FlowDepth, Tensor, Tensor]:
    """A flow of attention and MLP whose field is as large as what flows, its input and its control."""
    depth = bench.flow_depth(8, n_steps=n_steps, method=method, alpha=1.0).double()
    x, u = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 8), (1, 4)))
    return depth, x, u


def outcome(y: Tensor, of: list[Tensor]) -> list[Tensor | None]:
    """y, and the gradient of a random weighting of it."""
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), of, allow_unused=True)]


@methods
@pytest.mark.parametrize(("n_steps", "mode"), [(1, "direct"), (4, "checkpoint")])
def test_values_and_gradients_of_a_flow(method: str, n_steps: int, mode: str):
    depth, x, u = small(method, n_steps)
    depth.gradient_checkpointing = mode == "checkpoint"
    inputs = [x, u, *depth.parameters()]
    actual = outcome(depth(x, None, Context(control=u[:, 0]))[0], inputs)
    reference = outcome(odeint(bench.Equation(depth, u), x, grid(n_steps), method=THEIRS[method])[-1], inputs)
    for got, expected in zip(actual, reference, strict=True):
        assert got is not None
        assert expected is not None
        assert_close(got, expected, tolerance=EXACT)


@pytest.mark.parametrize("every_state", [True, False])
def test_the_adjoint_method_is_wrong_for_few_steps(every_state: bool):
    """Its gradients of the weights are off by per cents at 4 Euler steps and the control gets none; ours are exact."""
    depth, x, u = small("euler", 4)
    weights = list(depth.parameters())
    actual = outcome(depth(x, None, Context(control=u[:, 0]))[0], [u, *weights])[2:]
    equation, times = bench.Equation(depth, u), grid(4) if every_state else grid(1)
    plain = outcome(odeint(equation, x, grid(4), method="euler")[-1], [u, *weights])[2:]
    options = {} if every_state else {"options": {"step_size": 0.25}}
    _, of_control, *adjoint = outcome(odeint_adjoint(equation, x, times, method="euler", **options)[-1], [u, *weights])
    assert of_control is None
    assert apart(actual, plain) < EXACT
    assert apart(adjoint, plain) > 1e-2


def apart(got: list[Tensor], expected: list[Tensor]) -> float:
    """|got - expected| / |expected| over all tensors together."""
    one, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (got, expected))
    return ((one - other).norm() / other.norm()).item()


# ------------------------------------------------------------------------------------------------- benchmarks


def test_multiplications_are_counted():
    """A block has 12 D^2 a token and 2 T D for its attention; a step also embeds tau: D + D^2; the head D V."""
    size, length, batch, vocab = 8, 16, 2, 11
    options = {"hidden_size": size, "vocab_size": vocab, "max_length": length}
    flow = LanguageModel.from_preset("hybrid-ode", **options).eval()
    blocks = LanguageModel.from_preset("gpt", **options).eval()
    tokens, tau, head = batch * length, size + size * size, size * vocab
    block = tokens * (12 * size * size + 2 * length * size)
    whole = bench.Case(batch, 0, head=False)
    assert bench.multiplications(bench._call(blocks, whole)) == 6 * block
    assert bench.multiplications(bench._call(flow, whole)) == 8 * block + 4 * tau
    assert (
        bench.multiplications(bench._call(flow, bench.Case(batch, 0, head=True))) == 8 * block + 4 * tau + tokens * head
    )
    # Token by token behind 12: the attention of each reads as many keys as there are.
    read = sum(12 * size * size + 2 * seen * size for seen in range(13, length + 1))
    assert bench.multiplications(bench._call(flow, bench.Case(1, 12, head=True))) == 8 * read + 4 * (4 * tau + head)


def test_the_published_baseline_of_the_latency():
    with torch.device("meta"):
        assert LanguageModel.from_preset("gpt").num_parameters() == 30_503_424


@pytest.mark.slow
def test_rows_of_latency(capsys):
    assert [name for name in ROWS if name.startswith("flow-latency-")] == [f"flow-latency-{c}" for c in bench.CASES]
    options = {"hidden_size": 8, "vocab_size": 11, "max_length": 16}
    flow, blocks = (LanguageModel.from_preset(name, **options).eval() for name in ("hybrid-ode", "gpt"))
    row = bench.compare("decoding-trunk", flow, blocks, bench.Case(1, 8, head=False), rounds=1)
    assert row.ratio == pytest.approx(row.ours / row.peer)
    assert row.met is (row.ratio <= 1.05)
    assert "multiplications" in capsys.readouterr().out


def test_memory_by_way_and_steps(monkeypatch):
    few, many = 2, 32
    table = bench.memory_table((few, many), hidden_size=8, length=4)
    state = 4 * 8 * 4
    assert table["reversible"] == [2 * state] * 2
    assert table["checkpoint"][1] - table["checkpoint"][0] == (many - few) * state
    assert table["direct"][1] > 10 * table["checkpoint"][1]
    ends, every = table["torchdiffeq adjoint, the two ends"], table["torchdiffeq adjoint, a state a step, as published"]
    assert ends[0] == ends[1]
    assert every[1] - every[0] >= (many - few) * state
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(GlissandoError, match="pip install torchdiffeq"):
        bench.memory_table((1,))
