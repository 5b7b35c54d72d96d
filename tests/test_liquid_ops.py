"""Diagonal liquid dynamics against definitions, closed forms and orders."""

from __future__ import annotations

import itertools

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.errors import UnknownNameError
from glissando.mixers.liquid.scan import Modes, liquid, time_constants

EXACT = 1e-10


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def some_modes(n: int = 5, adaptation: float = 0.5, state: bool = True, dtype: torch.dtype = torch.float64) -> Modes:
    """Modes from slow to fast, whose time constants move as far as `adaptation` lets them."""
    return Modes(
        torch.linspace(0.3, 0.9, n, dtype=dtype),
        torch.linspace(0.3, 30, n, dtype=dtype),
        torch.logspace(-3, -0.3, n, dtype=dtype),
        torch.linspace(0.1, 2, n, dtype=dtype),
        torch.full((n,), adaptation, dtype=dtype),
        2 * draw(n, 2, seed=1, dtype=dtype) if state else None,
    )


def problem(
    time: int, n: int = 5, batch: int = 2, is_complex: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """b, z, x0 and dt, some of whose steps take no time."""
    b = draw(batch, time, n, *((2,) if is_complex else ()), seed=2, dtype=dtype)
    dt = (draw(batch, time, seed=5, dtype=dtype) + 0.7).relu()
    return 3 * b, 2 * draw(batch, time, n, seed=3, dtype=dtype), draw(batch, n, 2, seed=4, dtype=dtype), dt


def outcome(
    backend: str,
    b: Tensor,
    z: Tensor,
    x0: Tensor,
    dt: Tensor | None,
    modes: Modes,
    coupled: bool,
    impulse: bool = False,
) -> dict:
    """The states, and the gradients of everything that goes in."""
    inputs = {"b": b, "z": z, "x0": x0, **({} if dt is None else {"dt": dt}), **modes._asdict()}
    leaves = {name: v.clone().requires_grad_() for name, v in inputs.items() if v is not None}
    of_modes = Modes(*(leaves.get(name) for name in Modes._fields))
    x = liquid(leaves["b"], leaves["z"], of_modes, leaves["x0"], leaves.get("dt"), coupled, backend, impulse=impulse)
    weights = draw(*x.shape, seed=6, dtype=x.dtype).to(x.device)
    grads = torch.autograd.grad((x * weights).sum(), list(leaves.values()))
    return {"x": x.detach(), **dict(zip(leaves, grads, strict=True))}


#: Each pair of options is in a quick one.
FORMS = [
    pytest.param(*form, steps, marks=() if (sum(form) + i) % 2 else pytest.mark.slow)
    for form in itertools.product((False, True), repeat=3)
    for i, steps in enumerate([("even", 66), ("even", 1), ("held", 66), ("impulse", 66), ("impulse", 1)])
]


@pytest.mark.parametrize(("coupled", "is_complex", "state", "steps"), FORMS)
def test_the_kernel_agrees_with_the_definition(coupled, is_complex, state, steps):
    """Values and all gradients; 66 steps are more than the fused kernel adds up at once."""
    timed, time = steps
    b, z, x0, dt = problem(time, is_complex=is_complex)
    arguments = (b, z, x0, None if timed == "even" else dt, some_modes(state=state), coupled, timed == "impulse")
    expected, got = outcome("reference", *arguments), outcome("numba", *arguments)
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert_close(got[name] / scale, value / scale, name, EXACT)


@pytest.mark.parametrize("impulse", [False, True], ids=["held", "impulse"])
def test_gradients_are_the_derivatives(impulse: bool):
    b, z, x0, dt = problem(6, n=2, batch=1, is_complex=True)
    leaves = [v.clone().requires_grad_() for v in (b, z, x0, dt, *some_modes(2))]

    def run(b: Tensor, z: Tensor, x0: Tensor, dt: Tensor, *vectors: Tensor) -> Tensor:
        return liquid(b, z, Modes(*vectors), x0, dt, True, "numba", impulse=impulse)

    dt_inside = leaves[3].detach().clamp_min(0.1).requires_grad_()  # a one-sided derivative at 0 is no derivative
    assert torch.autograd.gradcheck(run, (*leaves[:3], dt_inside, *leaves[4:]))


@pytest.mark.parametrize("impulse", [False, True], ids=["held", "impulse"])
def test_float32_keeps_slow_modes(impulse: bool):
    """exp(k zeta) - 1 of slow modes is a small number, not a difference of large ones."""
    b, z, x0, dt = problem(500, is_complex=True)
    exact = outcome("numba", b, z, x0, dt, some_modes(), False, impulse)
    single = [v.float() for v in (b, z, x0, dt)]
    got = outcome("numba", *single, some_modes(dtype=torch.float32), False, impulse)
    for name, value in exact.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert_close(got[name].double() / scale, value / scale, name, 2e-5)


def test_a_constant_input_reaches_the_closed_form():
    """x(t) = exp(zeta t) x0 + (exp(zeta t) - 1) / zeta b, with t the time that has passed in the mode's units."""
    modes = some_modes(state=False)
    dt = torch.rand(1, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b, z = (torch.full((1, 20, 5), value, dtype=torch.float64) for value in (0.7, 0.3))
    x0 = draw(1, 5, 2, seed=1)
    x = liquid(b, z, modes, x0, dt)
    tau = modes.tau * (1 + modes.adaptation * torch.tanh(z[0, 0]))
    zeta = torch.complex(-modes.decay - 1 / tau, modes.turn)
    passed = torch.exp(zeta * modes.step * dt.cumsum(1).unsqueeze(-1))
    expected = passed * torch.view_as_complex(x0).unsqueeze(1) + (passed - 1) / zeta * 0.7
    assert_close(x, torch.view_as_real(expected), "x", 1e-12)


@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
def test_impulses_are_sums_of_what_has_decayed(coupled: bool):
    """x(t) = sum_i exp(zeta (t - t_i)) c b_i with c = (exp(zeta step) - 1) / zeta, whatever lies between the t_i."""
    modes = some_modes(state=False)
    b, _, x0, dt = problem(20)
    z = torch.full_like(b, 0.3)
    x = liquid(b, z, modes, 0 * x0, dt, coupled, impulse=True)
    tau = modes.tau * (1 + modes.adaptation * torch.tanh(z[0, 0]))
    zeta = torch.complex(-modes.decay - 1 / tau, modes.turn)
    strength = (torch.exp(zeta * modes.step) - 1) / zeta / (tau if coupled else 1)
    times = dt.cumsum(1)
    assert (dt == 0).any()
    passed = (times[:, -1:] - times).unsqueeze(-1) * modes.step
    expected = (torch.exp(zeta * passed) * strength * b).sum(1)
    assert_close(x[:, -1], torch.view_as_real(expected), "x", 1e-12)


def test_at_one_unit_of_time_an_impulse_is_a_held_input():
    b, z, x0, dt = problem(20)
    for each, tolerance in ((None, 0), (torch.ones_like(dt), 1e-14)):
        held, impulse = (liquid(b, z, some_modes(), x0, each, True, impulse=impulse) for impulse in (False, True))
        assert_close(impulse, held, "x", tolerance)


def halved(value: Tensor) -> Tensor:
    return value.repeat_interleave(2, 1)


def test_two_half_steps_are_one_where_tau_sees_the_input_alone():
    b, z, x0, dt = problem(9)
    modes = some_modes(state=False)
    whole = liquid(b, z, modes, x0, dt, True)
    parts = liquid(halved(b), halved(z), modes, x0, halved(dt) / 2, True)
    assert_close(parts[:, 1::2], whole, "x", 1e-12)


def test_steps_converge_at_first_order_where_tau_sees_the_state():
    """tau is held over a step, so that the error at a fixed time halves with the step."""
    b, z, x0, _ = problem(4)
    modes, ends, n = some_modes()._replace(step=torch.full((5,), 0.5).double()), [], 9
    for level in range(n):
        parts = [v.repeat_interleave(2**level, 1) for v in (b, z)]
        dt = torch.full(parts[1].shape[:2], 0.5**level).double()
        ends.append(liquid(*parts, modes, x0, dt)[:, -1])
    errors = [float((end - ends[-1]).norm()) for end in ends[:-2]]
    orders = [float(torch.tensor(a / b).log2()) for a, b in itertools.pairwise(errors[3:])]
    assert all(0.85 < order < 1.3 for order in orders), (errors, orders)


def test_time_constants_stay_within_their_bounds_and_use_them():
    _, z, _, _ = problem(400)
    modes, past = some_modes(adaptation=0.9), draw(2, 400, 5, 2, seed=8)
    share = time_constants(z, past, modes) / modes.tau
    assert 0.1 < float(share.min()) < 0.15
    assert 1.85 < float(share.max()) < 1.9


def test_shapes_that_do_not_fit_are_refused():
    b, z, x0, dt = problem(4)
    modes = some_modes()
    for changed, name in (((b[:, :3], z, modes, x0), "b"), ((b, z, modes, x0[:1]), "x0")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            liquid(*changed)
    with pytest.raises(ValueError, match="state must be"):
        liquid(b, z, modes._replace(state=modes.tau), x0)
    with pytest.raises(ValueError, match="cannot be negative"):
        liquid(b, z, modes, x0, dt - 1)
    with pytest.raises(UnknownNameError, match="numba"):
        liquid(b, z, modes, x0, backend="nunba")


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_types_that_no_backend_computes_in_are_refused(backend: str):
    """Whole numbers were rounded towards 0 by the kernel, step after step, in silence."""
    b, z, x0, _ = problem(4)
    modes = some_modes()
    for changed in ((b.long(), z, modes, x0), (b, z.float(), modes, x0), (b, z, some_modes(dtype=torch.float32), x0)):
        with pytest.raises(ValueError, match="all float32 or all float64"):
            liquid(*changed, backend=backend)
    half = Modes(*(w.bfloat16() for w in modes if w is not None))
    with pytest.raises(ValueError, match="bfloat16"):
        liquid(b.bfloat16(), z.bfloat16(), half, x0.bfloat16(), backend=backend)


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1.0, "negative, got -1.0"), (float("nan"), r"finite, got nan at \[1, 2\]"), (float("inf"), "finite, got inf")],
)
def test_time_that_cannot_pass_is_refused(value: float, message: str):
    b, z, x0, dt = problem(4)
    dt[1, 2] = value
    with pytest.raises(ValueError, match=message):
        liquid(b, z, some_modes(), x0, dt)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128])
def test_time_is_a_real_number(dtype: torch.dtype):
    b, z, x0, dt = problem(4)
    with pytest.raises(ValueError, match=f"a real number for each step; got {dtype}"):
        liquid(b, z, some_modes(), x0, dt.to(dtype))


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.parametrize(
    ("state", "impulse"), [(False, False), (True, True)], ids=["tau(u), held", "tau(x,u), impulse"]
)
def test_torch_compile_takes_the_kernel_as_one_operation(monkeypatch, state, impulse):
    """It cannot follow the kernel, which is the fastest by far."""
    monkeypatch.setattr("glissando.mixers.liquid.scan._step", None)
    b, z, x0, dt = problem(20)
    modes = some_modes(state=state)

    def run(b: Tensor, z: Tensor) -> Tensor:
        return liquid(b, z, modes, x0, dt, impulse=impulse)

    leaves, again = ([v.clone().requires_grad_() for v in (b, z)] for _ in range(2))
    expected = run(*leaves)
    torch._dynamo.reset()
    got = torch.compile(run, fullgraph=True, backend="eager")(*again)
    assert torch.equal(got, expected)
    for plain, compiled in zip(*map(torch.autograd.grad, (expected.sum(), got.sum()), (leaves, again)), strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("adaptation", [0.0, 1e-9])
def test_time_constants_that_do_not_adapt(adaptation: float, coupled: bool):
    """The derivative by the state is nothing there, and not 0 / 0."""
    arguments = (*problem(20), some_modes(adaptation=adaptation), coupled)
    expected = outcome("reference", *arguments)
    for name, value in outcome("numba", *arguments).items():
        assert_close(value, expected[name], name, EXACT)


def test_without_a_kernel_the_loop_runs_and_says_so_once(monkeypatch):
    """As on a device for which there is no kernel, such as MPS."""
    from glissando.kernels import compiled
    from glissando.mixers.liquid import scan as module

    b, z, x0, dt = problem(9)
    expected = liquid(b, z, some_modes(), x0, dt)
    monkeypatch.setattr(module, "use_numba", lambda *_: False)
    compiled._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="no kernel runs on cpu here"):
        assert_close(liquid(b, z, some_modes(), x0, dt), expected, "x", EXACT)
    liquid(b, z, some_modes(), x0, dt)  # a second warning would be an error
    without = some_modes(state=False)
    assert_close(liquid(b, z, without, x0, dt), liquid(b, z, without, x0, dt, backend="numba"), "x", EXACT)
