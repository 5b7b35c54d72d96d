"""The delta rule's backends against its definition, and the mixer against its differential equation."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCE, assert_close, assert_tensors_close
from torch import Tensor
from without_float64 import standing_in

from glissando.errors import ConfigError, InputError, UnknownNameError
from glissando.mixers import Context, ContextError, Delta, DeltaConfig
from glissando.mixers.delta.scan import delta_rule
from glissando.testing import check_mixer

BACKENDS = ["chunked", "numba"]
NAMES = ["q", "k", "v", "g", "e", "b", "s0"]


def problem(steps: int, rows: int = 2, heads: int = 3, size: int = 4, width: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(rows, steps, heads, size), dim=-1) for _ in range(2))
    v, g = draw(rows, steps, heads, width), -F.softplus(draw(rows, steps, heads, 1) - 1)
    e, b = 2 * torch.sigmoid(draw(rows, steps, heads)), torch.sigmoid(draw(rows, steps, heads))
    return [q, k, v, g, e, b, draw(rows, heads, size, width)]


def outcome(backend: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    o, last = delta_rule(*leaves, backend=backend)
    weights = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=weights, dtype=torch.float64)).sum() for y in (o, last))
    grads = torch.autograd.grad(loss, leaves)
    return {"o": o.detach(), "last": last.detach(), **dict(zip(NAMES, grads, strict=True))}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=8)
@given(steps=st.integers(1, 40), rows=st.integers(1, 3), size=st.integers(1, 5), width=st.integers(1, 5))
def test_a_backend_is_the_definition(backend: str, steps: int, rows: int, size: int, width: int):
    inputs = problem(steps, rows=rows, size=size, width=width)
    assert_tensors_close(outcome(backend, inputs), outcome("reference", inputs), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [64, 65, 150])
def test_several_chunks(backend: str, steps: int):
    inputs = problem(steps)
    assert_tensors_close(outcome(backend, inputs), outcome("reference", inputs), backend)


@pytest.mark.parametrize(("size", "width"), [(9, 8), (33, 17), (32, 64), (64, 32)])
def test_sizes_about_the_kernels_blocks_on_several_threads(monkeypatch, size: int, width: int):
    monkeypatch.setattr("glissando.kernels.compiled._WORK_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    inputs = problem(70, size=size, width=width)
    assert_tensors_close(outcome("numba", inputs), outcome("reference", inputs), f"K {size}, V {width}")


def test_gradients_of_some_inputs_through_strides():
    q, k, v, g, e, b, s0 = problem(70, width=8)
    found = []
    for backend in ("numba", "reference"):
        wide = v.repeat_interleave(2, -1).requires_grad_()
        o, _ = delta_rule(q, k, wide[..., ::2], g, e, b, s0, backend=backend)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(o.transpose(1, 2)[..., ::3].square().sum(), wide)[0])
    assert_close(found[0], found[1], "v", TOLERANCE[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_precision_and_strong_decay(backend: str):
    """exp(-80) a token underflows within a chunk: nothing but zeros comes of it."""
    inputs = problem(100)
    inputs[3] = inputs[3] * torch.where(torch.arange(100) % 7 == 0, 80.0, 0.1)[None, :, None, None]
    got = {name: x.double() for name, x in outcome(backend, [x.float() for x in inputs]).items()}
    for name, expected in outcome("reference", inputs).items():
        assert_close(got[name], expected, name, TOLERANCE[torch.float32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients(backend: str):
    inputs = problem(70)
    for got, expected in zip(
        delta_rule(*inputs, backend=backend), delta_rule(*inputs, backend="reference"), strict=True
    ):
        assert_close(got, expected)


def test_the_state_that_is_given_stays():
    inputs = problem(9)
    before = inputs[-1].clone()
    delta_rule(*inputs)
    assert torch.equal(inputs[-1], before)


def test_wrong_use_is_refused():
    q, k, v, g, e, b, s = problem(5)
    with pytest.raises(ValueError, match="k must be"):
        delta_rule(q, k[:, :4], v, g, e, b, s)
    with pytest.raises(ValueError, match="T >= 1"):
        delta_rule(q[:, :0], k, v, g, e, b, s)
    with pytest.raises(ValueError, match="all float32 or all float64"):
        delta_rule(q, k, v.float(), g, e, b, s, backend="numba")
    with pytest.raises(UnknownNameError, match="numba"):
        delta_rule(q, k, v, g, e, b, s, backend="nubma")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one key a token"):
        DeltaConfig(keys="previous", writes=2)
    with pytest.raises(ConfigError, match="must be even"):
        Delta(12, transition="rotate", key_size=3)
    with pytest.raises(ConfigError, match="not a multiple"):
        Delta(10)


def test_the_laws_of_several_impulses_a_token():
    check_mixer(Delta, DeltaConfig(input="impulse", writes=2))


def test_it_compiles_whole():
    """No kernel under torch.compile: one graph, equal to the kernel's values and gradients."""
    torch.manual_seed(0)
    mixer, x = Delta(16).double(), torch.randn(2, 70, 16, dtype=torch.float64)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    outcomes = []
    for run in (mixer, compiled):
        mixer.zero_grad()
        y = run(x)[0]
        y.square().sum().backward()
        outcomes.append({"y": y.detach(), **{n: p.grad.clone() for n, p in mixer.named_parameters()}})
    assert_tensors_close(outcomes[1], outcomes[0])


# ---------------------------------------------------------------------- the differential equation


def one_head(variant: dict) -> tuple[Delta, Tensor, Tensor]:
    """A mixer of one head with weights far from their start, a token for it and a state."""
    torch.manual_seed(3)
    mixer = Delta(4, heads=1, key_size=4, horizons=[2, 2], **variant).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return mixer, torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 4, 4, dtype=torch.float64)


def after(mixer: Delta, x: Tensor, s: Tensor, time: float, pieces: int) -> Tensor:
    """The state after the same token in so many pieces of equal time."""
    state = mixer.init_state(1)._replace(s=s)
    ctx = Context(dt=torch.full((1, pieces), time / pieces, dtype=torch.float64))
    with torch.no_grad():
        return mixer(x.expand(1, pieces, 4), state, ctx)[1].s


def flow(mixer: Delta, x: Tensor, s: Tensor, time: float, steps: int = 500) -> Tensor:
    """dS/dt = (-1 / tau + Omega) S + beta k (v - S^T k)^T by the classical Runge-Kutta method, written anew."""
    with torch.no_grad():
        _, k, v, z, r, turn, _ = mixer.project(x[0, 0]).split(mixer.sizes)
        k, v = F.normalize(F.silu(k), dim=-1), F.silu(v)
        beta = torch.log1p(torch.exp(z + mixer.write_bias))
        rate = 8 / (1 + torch.exp(-(r + mixer.decay_bias[0]))) * mixer.log_rate[0].exp()
        turning = torch.zeros(4, 4, dtype=torch.float64)
        if mixer.omega is not None:
            rate = rate.repeat_interleave(4 // len(rate))
            for n, omega in enumerate(2 * torch.sigmoid(turn) * mixer.omega[0]):
                turning[2 * n + 1, 2 * n], turning[2 * n, 2 * n + 1] = omega, -omega

        def slope(s: Tensor) -> Tensor:
            return -rate.unsqueeze(-1) * s + turning @ s + beta * torch.outer(k, v - s.T @ k)

        s, h = s[0, 0], time / steps
        for _ in range(steps):
            a = slope(s)
            b = slope(s + h / 2 * a)
            c = slope(s + h / 2 * b)
            s = s + h / 6 * (a + 2 * b + 2 * c + slope(s + h * c))
        return s[None, None]


@pytest.mark.parametrize("time", [0.3, 1.0])
def test_a_step_is_exact(time: float):
    mixer, x, s = one_head({})
    assert_close(after(mixer, x, s, time, 1), flow(mixer, x, s, time), "against the flow", 1e-9)
    assert_close(after(mixer, x, s, time, 7), after(mixer, x, s, time, 1), "in pieces")


def test_the_splitting_is_of_second_order():
    mixer, x, s = one_head({"transition": "rotate"})
    expected = flow(mixer, x, s, 1.0)
    errors = [float((after(mixer, x, s, 1.0, n) - expected).abs().max()) for n in (8, 16, 32, 64)]
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert orders[-1] == pytest.approx(2, abs=0.1), (errors, orders)


@pytest.mark.slow
def test_long_time_stores_the_equilibrium():
    """S^T k settles at beta v / (beta + 1 / tau), whatever was stored."""
    mixer, x, s = one_head({})
    assert_close(after(mixer, x, s, 200.0, 1), flow(mixer, x, 0 * s, 200.0, 20000), tolerance=1e-8)


def test_a_reflection_has_the_eigenvalue_minus_one():
    mixer, x, s = one_head({"transition": "reflect"})
    with torch.no_grad():
        mixer.write_bias.fill_(50.0)
        mixer.log_rate.fill_(-50.0)
        mixer.project.weight[8:12] = 0  # v
        once = mixer(x, mixer.init_state(1)._replace(s=s))[1].s
        twice = mixer(x.expand(1, 2, 4), mixer.init_state(1)._replace(s=s))[1].s
    k = F.normalize(F.silu(x[0, 0] @ mixer.project.weight[4:8].T), dim=-1)
    assert_close(k @ once[0, 0], -(k @ s[0, 0]).detach())
    assert_close(twice, s)


def test_rotation_starts_at_the_rates_of_a_rotary_embedding():
    """With the write held off, what is stored is read back turned by omega dt, from 1 to 1 / 64 radians a token."""
    mixer = Delta(8, heads=2, key_size=6, transition="rotate", horizons=[2, 64]).double()
    s = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        mixer.write_bias.fill_(-50.0)
        mixer.log_rate.fill_(-50.0)
        mixer.project.weight.zero_()
        turned = mixer(torch.randn(1, 3, 8).double(), mixer.init_state(1)._replace(s=s))[1].s
    angle = 3 * torch.tensor([1.0, 1 / 8, 1 / 64]).double().view(3, 1)
    real, imaginary = s.unflatten(2, (3, 2)).unbind(3)
    expected = [angle.cos() * real - angle.sin() * imaginary, angle.sin() * real + angle.cos() * imaginary]
    assert_close(turned, torch.stack(expected, 3).flatten(2, 3))


# ---------------------------------------------------------------------- long gaps

#: horizons that forget within the gaps below, and that do not
FORGETFUL, LASTING = (16.0, 1024.0), (1e10, 1e11)


def in_two_precisions(dt: Tensor, cuts: tuple[int, ...] = (), **options: object) -> list[dict[str, Tensor]]:
    """Outputs and gradients of a float32 mixer that turns, and of the same parameters in float64."""
    torch.manual_seed(0)
    mixer, x = Delta(32, heads=2, transition="rotate", **options), torch.randn(*dt.shape, 32)
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        mixer = mixer.to(dtype)
        mixer.zero_grad()
        parts, state = [], mixer.init_state(len(x)) if cuts else None
        for a, b in itertools.pairwise((0, *cuts, dt.shape[1])):
            y, state = mixer(x[:, a:b].to(dtype), state, Context(dt=dt[:, a:b].to(dtype)))
            parts.append(y)
        y = torch.cat(parts, 1)
        y.square().sum().backward()
        assert mixer.omega is not None
        assert mixer.omega.grad is not None
        outcomes.append({"y": y.detach(), "omega": mixer.omega.grad, "weight": mixer.project.weight.grad})
    return outcomes


def require_near(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """|got - expected| / |expected|, norms of whole tensors."""
    for name, tensor in expected.items():
        error = float((got[name].detach().double() - tensor.detach()).norm() / tensor.detach().norm())
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("horizons", [FORGETFUL, LASTING], ids=["forgetful", "lasting"])
@pytest.mark.parametrize("gap", [1.0, 864_000.0, 4.9e8])
def test_turns_keep_their_phase_over_a_long_gap(horizons: tuple, gap: float):
    """omega starts at 1 and a pair turns at up to 2 omega: w dt reaches 1e9."""
    dt = torch.ones(2, 20)
    dt[:, 10] = gap
    require_near(*in_two_precisions(dt, horizons=horizons), 1e-5)


def test_turns_keep_their_phase_where_every_step_is_long():
    require_near(*in_two_precisions(torch.full((2, 70), 1e4), horizons=LASTING), 1e-5)


def test_a_long_gap_may_fall_between_two_calls():
    dt = torch.ones(2, 20)
    dt[:, 10] = 1e6
    (whole, expected), (parts, _) = (in_two_precisions(dt, cuts, horizons=LASTING) for cuts in ((), (10, 11)))
    require_near(parts, {name: tensor.double() for name, tensor in whole.items()}, 1e-5)
    require_near(parts, expected, 1e-5)


def test_turns_keep_their_phase_on_a_device_without_float64():
    dt = torch.ones(2, 70)
    dt[:, 10::7] = 1e5
    _, expected = in_two_precisions(dt, horizons=LASTING)
    with standing_in("cpu"):  # by chunks, too
        got, _ = in_two_precisions(dt, horizons=LASTING)
    require_near(got, expected, 1e-5)


def test_sums_of_a_chunk_keep_small_decays_beside_large_ones():
    q, k, v, g, e, b, s = (tensor.float() for tensor in problem(64))
    g[:, ::2] = -100
    expected, _ = delta_rule(*(tensor.double() for tensor in (q, k, v, g, e, b, s)), backend="reference")
    got, _ = delta_rule(q, k, v, g, e, b, s, backend="chunked", gaps=True)
    require_near({"o": got}, {"o": expected}, 1e-6)


def test_time_may_be_more_precise_than_the_mixer():
    """A float64 dt of a float32 mixer turns the state by all its digits."""
    torch.manual_seed(0)
    mixer, x = Delta(8, heads=2, transition="rotate", horizons=LASTING), torch.randn(1, 4, 8)
    dt = torch.tensor([[1.0, 123_456_789.3, 1.0, 2.0]], dtype=torch.float64)
    got = mixer(x, None, Context(dt=dt))[0]
    expected = mixer.double()(x.double(), None, Context(dt=dt))[0]
    require_near({"y": got}, {"y": expected}, 1e-5)


@pytest.mark.slow
def test_a_turn_beyond_what_is_resolved_needs_a_state_that_has_decayed():
    torch.manual_seed(0)
    mixer, x = Delta(8, heads=2, transition="rotate", horizons=LASTING), torch.randn(2, 6, 8)
    dt = torch.ones(2, 6)
    dt[1, 3] = 1e10
    message = r"up to 1e\+09 radians a token, and a dt of up to 1e\+10 .* at \[1, 3, 0, 0\] .*larger unit"
    with pytest.raises(InputError, match=message):
        mixer(x, None, Context(dt=dt))
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    assert compiled(x, None, Context(dt=dt))[0][1, 3:].isnan().any(), "a graph depends on no value, but a NaN is seen"
    dt[1, 3] = 1e14
    mixer(x, None, Context(mask=torch.arange(6) < torch.tensor([[6], [3]]), dt=dt))  # no time passes at padding
    y = mixer(x, None, Context(dt=dt))[0].detach()
    assert_close(y[1:, 3:], mixer(x[1:, 3:], None, Context(dt=dt[1:, 3:]))[0].detach(), "nothing is left", 1e-5)
    assert_close(y, mixer.double()(x.double(), None, Context(dt=dt.double()))[0].detach(), "in float64", 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", [{}, {"input": "impulse"}, {"transition": "rotate", "writes": 2}], ids=str)
def test_gradients_are_finite_where_outputs_are(backend: str, variant: dict):
    torch.manual_seed(0)
    mixer, x = Delta(12, heads=2, **variant), torch.randn(2, 20, 12, requires_grad=True)
    for gap in (1e14, 1e20, 3.4e38):
        dt = torch.ones(2, 20)
        dt[:, 10] = gap
        dt.requires_grad_()
        with standing_in("cpu") if backend == "chunked" else nullcontext():
            y, state = mixer(x, mixer.init_state(2), Context(dt=dt))
        assert state is not None
        grads = torch.autograd.grad(y.square().sum() + state.s.sum(), [x, dt, *mixer.parameters()])
        assert all(bool(tensor.isfinite().all()) for tensor in (y, state.s, *grads)), gap


def test_a_signal_without_meaning_is_refused():
    for variant in ({"transition": "reflect"}, {"keys": "previous"}):
        with pytest.raises(ContextError, match="'dt'"):
            Delta(8, **variant)(torch.randn(1, 2, 8), None, Context(dt=torch.ones(1, 2)))


def test_what_it_stores_it_finds():
    """Orthogonal keys, strong writes: every value comes back, the latest of a key that was written twice."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.eye(4).double(), torch.randn(5, 3, generator=generator).double()
    k = keys[[0, 1, 2, 1, 3]].view(1, 5, 1, 4)
    ones, zeros = torch.ones(1, 5, 1).double(), torch.zeros(1, 5, 1, 1).double()
    _, s = delta_rule(k, k, values.view(1, 5, 1, 3), zeros, ones, ones, torch.zeros(1, 1, 4, 3).double())
    assert_close(s[0, 0], values[[0, 3, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_queries_have_length_one_at_any_scale(dtype: torch.dtype):
    """Multiplying what is normalised by a power of two changes nothing; where it is 0, the query is 0."""
    mixer = Delta(32, heads=2, keys="previous").to(dtype)
    x = torch.randn(1, 9, 32, dtype=dtype)
    expected = mixer(x)[0]
    queries = mixer.project.weight.detach()[:32]
    for exponent in (-20, 20):
        scaled = queries * 2.0**exponent
        with torch.no_grad():
            mixer.project.weight[:32] = scaled
        assert_close(mixer(x)[0], expected)
    with torch.no_grad():
        mixer.project.weight[:32] = 0
    _, state = mixer(x, mixer.init_state(1, dtype=dtype))
    assert state.latest is not None
    assert not state.latest.any()
    assert not state.s.any()


def test_its_cost():
    assert Delta(128, key_size=32).flops(512) == (0, 6 * 4 * 32 * 32)
