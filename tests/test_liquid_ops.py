"""Diagonal liquid dynamics, the block scan and Newton's method against definitions, closed forms and orders."""

from __future__ import annotations

import itertools

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.errors import UnknownNameError
from glissando.ops import newton
from glissando.ops.block_scan import adjoint, block_scan
from glissando.ops.liquid import Modes, liquid, time_constants

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


def outcome(backend: str, b: Tensor, z: Tensor, x0: Tensor, dt: Tensor | None, modes: Modes, coupled: bool) -> dict:
    """The states, and the gradients of everything that goes in."""
    inputs = {"b": b, "z": z, "x0": x0, **({} if dt is None else {"dt": dt}), **modes._asdict()}
    leaves = {name: v.clone().requires_grad_() for name, v in inputs.items() if v is not None}
    of_modes = Modes(*(leaves.get(name) for name in Modes._fields))
    x, _ = liquid(leaves["b"], leaves["z"], of_modes, leaves["x0"], leaves.get("dt"), coupled, backend)
    weights = draw(*x.shape, seed=6, dtype=x.dtype).to(x.device)
    grads = torch.autograd.grad((x * weights).sum(), list(leaves.values()))
    return {"x": x.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("backend", ["newton", "numba"])
@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("timed", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("state", [False, True], ids=["tau(u)", "tau(x,u)"])
@pytest.mark.parametrize("time", [1, 70])
def test_backends_agree_with_the_definition(backend, coupled, is_complex, timed, state, time):
    """Values and all gradients; 70 steps are more than the fused kernel adds up at once."""
    b, z, x0, dt = problem(time, is_complex=is_complex)
    given = (b, z, x0, dt if timed else None, some_modes(state=state), coupled)
    expected, got = outcome("reference", *given), outcome(backend, *given)
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert_close(got[name] / scale, value / scale, name, EXACT)


@pytest.mark.parametrize("adaptation", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("time", [300, 8192])
def test_newton_equals_the_sequence_at_length(adaptation: float, time: int):
    """1e-9 in float64, values and gradients, where tau moves little and much."""
    b, z, x0, _ = problem(time, n=3, batch=1)
    given = (b, z, x0, None, some_modes(3, adaptation), True)
    expected, got = outcome("numba", *given), outcome("newton", *given)
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert_close(got[name] / scale, value / scale, name, 1e-9)


def test_gradients_are_the_derivatives():
    b, z, x0, dt = problem(6, n=2, batch=1, is_complex=True)
    leaves = [v.clone().requires_grad_() for v in (b, z, x0, dt, *some_modes(2))]

    def run(b: Tensor, z: Tensor, x0: Tensor, dt: Tensor, *vectors: Tensor) -> Tensor:
        return liquid(b, z, Modes(*vectors), x0, dt, True, "numba")[0]

    dt_inside = leaves[3].detach().clamp_min(0.1).requires_grad_()  # a one-sided derivative at 0 is no derivative
    assert torch.autograd.gradcheck(run, (*leaves[:3], dt_inside, *leaves[4:]))


def test_float32_keeps_slow_modes():
    """exp(k zeta) - 1 of slow modes is a small number, not a difference of large ones."""
    b, z, x0, dt = problem(500, is_complex=True)
    for backend in ("numba", "newton"):
        exact = outcome(backend, b, z, x0, dt, some_modes(), False)
        single = [v.float() for v in (b, z, x0, dt)]
        got = outcome(backend, *single, some_modes(dtype=torch.float32), False)
        for name, value in exact.items():
            scale = value.abs().max().clamp_min(1e-6)
            assert_close(got[name].double() / scale, value / scale, f"{backend} {name}", 2e-5)


def test_a_constant_input_reaches_the_closed_form():
    """x(t) = exp(zeta t) x0 + (exp(zeta t) - 1) / zeta b, with t the time that has passed in the mode's units."""
    modes = some_modes(state=False)
    dt = torch.rand(1, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b, z = (torch.full((1, 20, 5), value, dtype=torch.float64) for value in (0.7, 0.3))
    x0 = draw(1, 5, 2, seed=1)
    x, _ = liquid(b, z, modes, x0, dt)
    tau = modes.tau * (1 + modes.adaptation * torch.tanh(z[0, 0]))
    zeta = torch.complex(-modes.decay - 1 / tau, modes.turn)
    passed = torch.exp(zeta * modes.step * dt.cumsum(1).unsqueeze(-1))
    expected = passed * torch.view_as_complex(x0).unsqueeze(1) + (passed - 1) / zeta * 0.7
    assert_close(x, torch.view_as_real(expected), "x", 1e-12)


@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
def test_the_jacobian_by_hand_is_the_derivative(coupled: bool):
    from glissando.ops import liquid as module

    b, z, _, dt = problem(20, is_complex=True)
    given = (b, z, dt, *some_modes(adaptation=0.9))
    past = draw(2, 20, 5, 2, seed=9)
    expected = newton.by_differentiation(module._step(coupled))(past, *given)
    for got, wanted, what in zip(module._linearised(coupled)(past, *given), expected, ("x", "J"), strict=True):
        assert_close(got, wanted, what, 1e-12)


def halved(value: Tensor) -> Tensor:
    return value.repeat_interleave(2, 1)


def test_two_half_steps_are_one_where_tau_sees_the_input_alone():
    b, z, x0, dt = problem(9)
    modes = some_modes(state=False)
    whole, _ = liquid(b, z, modes, x0, dt, True)
    parts, _ = liquid(halved(b), halved(z), modes, x0, halved(dt) / 2, True)
    assert_close(parts[:, 1::2], whole, "x", 1e-12)


def test_steps_converge_at_first_order_where_tau_sees_the_state():
    """tau is held over a step, so that the error at a fixed time halves with the step."""
    b, z, x0, _ = problem(4)
    modes, ends, n = some_modes()._replace(step=torch.full((5,), 0.5).double()), [], 9
    for level in range(n):
        parts = [v.repeat_interleave(2**level, 1) for v in (b, z)]
        dt = torch.full(parts[1].shape[:2], 0.5**level).double()
        ends.append(liquid(*parts, modes, x0, dt)[0][:, -1])
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
    with pytest.raises(UnknownNameError, match="newton"):
        liquid(b, z, modes, x0, backend="newtom")


@pytest.mark.parametrize("backend", ["numba", "newton", "reference"])
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
@pytest.mark.parametrize("state", [False, True], ids=["tau(u)", "tau(x,u)"])
def test_torch_compile_takes_the_kernel_as_one_operation(monkeypatch, state):
    """It can follow neither the kernel nor Newton's method, and the kernel is the fastest by far."""
    monkeypatch.setattr(newton, "solve", None)
    monkeypatch.setattr("glissando.ops.liquid._linear", None)
    b, z, x0, dt = problem(20)
    modes = some_modes(state=state)
    expected = liquid(b, z, modes, x0, dt)[0]
    torch._dynamo.reset()
    got = torch.compile(lambda b, z: liquid(b, z, modes, x0, dt)[0], fullgraph=True, backend="eager")(b, z)
    assert torch.equal(got, expected)


# ---------------------------------------------------------------------- block scan


@pytest.mark.parametrize("backend", ["numba", "doubling"])
@pytest.mark.parametrize("time", [1, 2, 37])
def test_block_scan_is_its_definition(backend: str, time: int):
    a, x, h0 = 0.6 * draw(2, time, 3, 2, 2, seed=1), draw(2, time, 3, 2, seed=2), draw(2, 3, 2, seed=3)
    results = []
    for chosen in ("reference", backend):
        leaves = [v.clone().requires_grad_() for v in (a, x, h0)]
        h, last = block_scan(*leaves, backend=chosen)
        loss = (h * draw(*h.shape, seed=4)).sum() + (last * draw(*last.shape, seed=5)).sum()
        results.append((h, last, *torch.autograd.grad(loss, leaves)))
    for name, expected, got in zip(("h", "last", "a", "x", "h0"), *results, strict=True):
        assert_close(got, expected, name, EXACT)


@pytest.mark.parametrize("backend", ["numba", "doubling"])
def test_the_adjoint_is_the_gradient(backend: str):
    a, x, h0 = 0.6 * draw(2, 9, 3, 2, 2, seed=1), draw(2, 9, 3, 2, seed=2), draw(2, 3, 2, seed=3)
    leaves, grad = [v.requires_grad_() for v in (x, h0)], draw(2, 9, 3, 2, seed=4)
    expected = torch.autograd.grad((block_scan(a, *leaves, backend="reference")[0] * grad).sum(), leaves)
    for name, got, wanted in zip(("x", "h0"), adjoint(a, grad, backend), expected, strict=True):
        assert_close(got, wanted, name, EXACT)


def test_a_block_scan_of_rotations_is_a_complex_scan():
    from glissando.ops.scan import scan

    a, x = torch.view_as_complex(draw(1, 50, 3, 2, seed=1)) / 3, torch.view_as_complex(draw(1, 50, 3, 2, seed=2))
    blocks = torch.stack([a.real, -a.imag, a.imag, a.real], -1).unflatten(-1, (2, 2))
    h, _ = block_scan(blocks, torch.view_as_real(x))
    assert_close(h, torch.view_as_real(scan(a, x)[0]), "h", EXACT)


def test_block_scan_says_what_does_not_fit():
    a, x = draw(2, 4, 3, 2, 2, seed=1), draw(2, 4, 3, 2, seed=2)
    with pytest.raises(ValueError, match=r"x must be \(batch"):
        block_scan(a, x[..., :1])
    with pytest.raises(ValueError, match="a must be"):
        block_scan(a[:, :3], x)
    for other in (torch.float32, torch.bfloat16, torch.int64):
        with pytest.raises(ValueError, match="all float32 or all float64"):
            block_scan(a.to(other), x)
    with pytest.raises(ValueError, match="bfloat16"):
        block_scan(a.bfloat16(), x.bfloat16())
    with pytest.raises(UnknownNameError, match="doubling"):
        block_scan(a, x, backend="dubling")


# ---------------------------------------------------------------------- Newton's method


def logistic(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(w * x + u)


@pytest.mark.parametrize("k", [1, 2])
def test_newton_solves_any_step(k: int):
    """Channels of one number and of two: values, and the gradients of inputs, weights and the start."""
    u, w, x0 = draw(3, 40, 4, k, seed=1), 1.5 * draw(4, k, seed=2), draw(3, 4, k, seed=3)

    def step(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
        return logistic(x + 0.5 * x.flip(-1), u, w)

    results = []
    for solve in (lambda *a: newton.sequential(step, *a), lambda *a: newton.solve(step, *a)[0]):
        leaves = [v.clone().requires_grad_() for v in (x0, u, w)]
        x = solve(leaves[0], [leaves[1]], [leaves[2]])
        results.append((x, *torch.autograd.grad((x * draw(*x.shape, seed=4)).sum(), leaves)))
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, tolerance=EXACT)


def test_rows_know_nothing_of_each_other():
    """A row takes the iterations that it takes alone, and comes out the same to the last bit."""
    b, z, x0, dt = problem(60, batch=4)
    b = b * torch.tensor([0.0, 0.1, 1.0, 10.0]).double().view(4, 1, 1)
    x, report = liquid(b, z, some_modes(adaptation=0.9), x0, dt, backend="newton")
    assert len(set(report.iterations.tolist())) > 1
    assert float(report.residual.max()) < 1e-11
    assert not report.sequential.any()
    for row in range(4):
        one = slice(row, row + 1)
        alone, own = liquid(b[one], z[one], some_modes(adaptation=0.9), x0[one], dt[one], backend="newton")
        assert torch.equal(alone[0], x[row])
        assert own.iterations[0] == report.iterations[row]


def expanding(x: Tensor, u: Tensor) -> Tensor:
    """The logistic map: chaotic, and far from a contraction."""
    return 3.9 * x * (1 - x) + 0 * u


def test_what_does_not_converge_is_computed_in_sequence_and_said():
    x0, u = torch.full((2, 1, 1), 0.3).double(), torch.zeros(2, 200, 1, 1).double()
    with pytest.warns(RuntimeWarning, match="2 of 2 sequences had not converged after 3 iterations"):
        x, report = newton.solve(expanding, x0, [u], max_iterations=3)
    assert report.sequential.all()
    assert_close(x, newton.sequential(expanding, x0, [u]), "x", 1e-12)


def steep(x: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(3 * x) + u


def test_damping_reaches_what_full_steps_do_not():
    """A step whose undamped iterates leave the finite numbers: slopes of 12 multiply over the sequence."""
    x0, u = torch.full((1, 2, 1), 0.1).double(), draw(1, 400, 2, 1, seed=3)
    x, report = newton.solve(steep, x0, [u], max_iterations=400)
    assert int(report.iterations) < 20  # a hundred where a row is not begun again, 400 without damping
    assert not report.sequential.any()
    assert_close(x, newton.sequential(steep, x0, [u]), "x", 1e-9)


def test_the_residual_is_what_the_equation_leaves():
    """Stopped early, with the tolerance wide: relative to the largest entry of the row, at least 1."""
    x0, u = draw(2, 3, 1, seed=1), 3 * draw(2, 30, 3, 1, seed=2)
    w = torch.full((3, 1), 0.9).double()

    def step(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
        return 3 * logistic(x, u, w)

    x, report = newton.solve(step, x0, [u], [w], tolerance=0.3)
    past = torch.cat([x0.unsqueeze(1), x[:, :-1]], 1)
    expected = (step(past, u, w) - x).flatten(1).abs().amax(1) / x.flatten(1).abs().amax(1).clamp_min(1)
    assert float(expected.min()) > 1e-6
    assert_close(report.residual / expected, torch.ones(2).double(), "residual", 1e-9)


def test_newton_without_a_jacobian_in_inference_mode():
    x0, u, w = draw(2, 3, 1, seed=1), draw(2, 20, 3, 1, seed=2), draw(3, 1, seed=3)
    expected = newton.solve(logistic, x0, [u], [w])[0]
    with torch.inference_mode():
        assert torch.equal(newton.solve(logistic, x0, [u], [w])[0], expected)
        assert torch.equal(newton.solve(logistic, x0.clone(), [u.clone()], [w.clone()])[0], expected)


def test_newton_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"newton: at least one step is needed, got inputs of shape \(2, 0, 3, 1\)"):
        newton.solve(logistic, torch.zeros(2, 3, 1), [torch.zeros(2, 0, 3, 1)])
    with pytest.raises(ValueError, match="1 or 2"):
        newton.solve(logistic, torch.zeros(2, 3, 3), [torch.zeros(2, 4, 3, 3)])
    with pytest.raises(ValueError, match="one length"):
        newton.solve(logistic, torch.zeros(2, 3, 1), [torch.zeros(2, 4, 3, 1), torch.zeros(2, 5, 3, 1)])
    with pytest.raises(ValueError, match=r"x0 torch\.bfloat16"):
        newton.solve(logistic, torch.zeros(2, 3, 1).bfloat16(), [torch.zeros(2, 4, 3, 1)])


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("adaptation", [0.0, 1e-9])
def test_time_constants_that_do_not_adapt(adaptation: float, coupled: bool):
    """The derivative by the state is nothing there, and not 0 / 0."""
    given = (*problem(20), some_modes(adaptation=adaptation), coupled)
    expected = outcome("reference", *given)
    for backend in ("newton", "numba"):
        for name, value in outcome(backend, *given).items():
            assert_close(value, expected[name], f"{backend}, {name}", EXACT)
