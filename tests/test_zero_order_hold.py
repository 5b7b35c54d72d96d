"""Linear systems sampled in time and back, against closed forms; and LegS, for what it is meant to hold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tolerances import assert_close
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from glissando.mixers.liquid import discretize, hippo_legs, legs_modes
from research.matrix_logarithm import undiscretize

FLOAT64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=FLOAT64)


def stable(*shape: int, size: int = 4) -> Tensor:
    """Systems with eigenvalues of about -1 and imaginary parts."""
    return randn(*shape, size, size) / 2 - torch.eye(size, dtype=FLOAT64)


def legendre(values: Tensor, size: int) -> Tensor:
    """g_i = sqrt(2i + 1) P_i at values in [-1, 1]: (..., N)."""
    table = np.polynomial.legendre.legvander(values.numpy(), size - 1)
    return torch.from_numpy(table) * (2 * torch.arange(size, dtype=FLOAT64) + 1).sqrt()


def projection(f, edges: list[float], size: int) -> Tensor:
    """c_i = (1 / t) integral from 0 to t of f(x) g_i(2x / t - 1) dx: (N,). t the last edge, f smooth between them."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(40))
    t, total = edges[-1], torch.zeros(size, dtype=FLOAT64)
    for left, right in itertools.pairwise(edges):
        x = left + (right - left) * (nodes + 1) / 2
        total += (right - left) / 2 / t * (weights * f(x)) @ legendre(2 * x / t - 1, size)
    return total


# --------------------------------------------------------------------------------------------------- discretize


def test_diagonal_systems_have_the_closed_form():
    rates, B, dt = -torch.rand(3, 5, dtype=FLOAT64) * 30, randn(3, 5, 2), torch.tensor([0.01, 0.3, 2.0], dtype=FLOAT64)
    Ad, Bd = discretize(torch.diag_embed(rates), B, dt)
    assert_close(Ad, torch.diag_embed((rates * dt[:, None]).exp()), "Ad")
    assert_close(Bd, (torch.expm1(rates * dt[:, None]) / rates)[..., None] * B, "Bd")


def test_an_integrator_of_an_integrator_is_singular_and_exact():
    A, B = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=FLOAT64), torch.tensor([[0.0], [1.0]], dtype=FLOAT64)
    Ad, Bd = discretize(A, B, 3.0)
    assert_close(Ad, torch.tensor([[1.0, 3.0], [0.0, 1.0]], dtype=FLOAT64), "Ad")
    assert_close(Bd, torch.tensor([[4.5], [3.0]], dtype=FLOAT64), "Bd")


@pytest.mark.parametrize("push", [0.0, 1.0])
@pytest.mark.parametrize("angle", [0.04, 1.0, 20.0])
def test_a_rotation_alone_or_in_a_batch(angle, push):
    """0.04 without input is where PyTorch's exponential of a single matrix is wrong by 1e-10, and its gradient too."""
    w = torch.tensor(angle, dtype=FLOAT64, requires_grad=True)
    quarter, B = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=FLOAT64), torch.tensor([[push], [0.0]], dtype=FLOAT64)
    Ad, Bd = discretize(w * quarter, B, 1)
    cos, sin = math.cos(angle), math.sin(angle)
    assert_close(Ad, torch.tensor([[cos, -sin], [sin, cos]], dtype=FLOAT64), "Ad", 1e-13)
    assert_close(Bd[:, 0], push / angle * torch.tensor([sin, 1 - cos], dtype=FLOAT64), "Bd", 1e-13)
    (slope,) = torch.autograd.grad(Ad[1, 0], w)
    assert_close(slope, torch.tensor(cos, dtype=FLOAT64), "slope", 1e-13)
    together = discretize((w * quarter).expand(2, 2, 2), B, 1)[0]
    assert_close(together[1], Ad, "in a batch", 1e-13)


def test_no_time_is_no_step():
    Ad, Bd = discretize(stable(3), randn(3, 4, 2), 0)
    assert torch.equal(Ad, torch.eye(4, dtype=FLOAT64).expand(3, 4, 4))
    assert torch.equal(Bd, torch.zeros(3, 4, 2, dtype=FLOAT64))


def test_steps_compose():
    """A step of 0.7 is one of 0.2 and then one of 0.5, and undone by one of -0.7."""
    A, B = stable(2), randn(2, 4, 3)
    (A1, B1), (A2, B2), (A3, B3) = (discretize(A, B, dt) for dt in (0.2, 0.5, 0.7))
    assert_close(A2 @ A1, A3, "Ad")
    assert_close(A2 @ B1 + B2, B3, "Bd")
    half_A, half_B = discretize(A, B, 0.35)
    assert_close(half_A @ half_A, A3, "Ad of two halves")
    assert_close(half_A @ half_B + half_B, B3, "Bd of two halves")
    back_A, back_B = discretize(A, B, -0.7)
    assert_close(back_A @ A3, torch.eye(4, dtype=FLOAT64).expand(2, 4, 4), "back")
    assert_close(back_A @ B3 + back_B, torch.zeros(2, 4, 3, dtype=FLOAT64), "input taken back")


def test_a_step_by_token_of_one_system():
    A, B, dt = stable(), randn(4, 1), torch.rand(2, 5, dtype=FLOAT64)
    Ad, Bd = discretize(A, B, dt)
    assert (Ad.shape, Bd.shape) == ((2, 5, 4, 4), (2, 5, 4, 1))
    for got, expected in zip((Ad[1, 3], Bd[1, 3]), discretize(A, B, dt[1, 3].item()), strict=True):
        assert_close(got, expected, "one token")


def test_gradients_of_discretize():
    A, B, dt = stable(2), randn(2, 4, 2), torch.tensor([0.3, 1.1], dtype=FLOAT64)
    singular = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=FLOAT64)
    for inputs in ((A, B, dt), (singular, randn(2, 1), torch.tensor(0.0, dtype=FLOAT64))):
        inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
        assert gradcheck(discretize, inputs)
        assert gradgradcheck(discretize, inputs)


def test_half_precision_is_computed_in_float32():
    A, B = stable(2), randn(2, 4, 1)
    rounded = [tensor.bfloat16() for tensor in (A, B)]
    for got, expected in zip(discretize(*rounded, 0.5), discretize(*(t.double() for t in rounded), 0.5), strict=True):
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, "bfloat16 inputs", 1e-6)


@pytest.mark.parametrize(
    ("A", "B", "dt", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 1), 1.0, r"A must be \(\.\.\., N, N\)"),
        (torch.ones(2, 2), torch.ones(2), 1.0, r"a single input is \(N, 1\)"),
        (torch.ones(2, 2), torch.ones(2, 0), 1.0, r"got \(2, 2\) and \(2, 0\)"),
        (torch.ones(2, 2), torch.ones(3, 1), 1.0, r"got \(2, 2\) and \(3, 1\)"),
        (torch.ones(4, 2, 2), torch.ones(2, 1), torch.ones(3), "do not broadcast"),
        (torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 1), 1.0, r"use A\.double\(\)"),
    ],
)
def test_what_does_not_fit_is_reported(A, B, dt, message):
    with pytest.raises(ValueError, match=f"discretize: .*{message}"):
        discretize(A, B, dt)


# ------------------------------------------------------------------------------------------------- undiscretize

SYSTEMS = {
    "stable": lambda: (stable(3), randn(3, 4, 2), torch.tensor([0.1, 1.0, 4.0], dtype=FLOAT64)),
    "growing": lambda: (-stable(2), randn(2, 4, 1), 2.0),
    "singular": lambda: (randn(6, 2) @ randn(2, 6) / 6, randn(6, 2), 0.5),
    "nothing moves": lambda: (torch.zeros(3, 3, dtype=FLOAT64), randn(3, 1), 0.5),
    "no input": lambda: (stable(), torch.zeros(4, 1, dtype=FLOAT64), 1.0),
    "large input": lambda: (stable(), 1e8 * randn(4, 1), 1.0),
    "a Jordan block": lambda: (torch.eye(4, dtype=FLOAT64).roll(1, 1).triu() - torch.eye(4), randn(4, 1), 1.0),
    "LegS": lambda: (*hippo_legs(64), 0.01),
    "complex": lambda: (torch.complex(stable(), randn(4, 4)), torch.complex(randn(4, 1), randn(4, 1)), 0.5),
    "back in time": lambda: (stable(), randn(4, 1), -0.5),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_there_and_back(name):
    A, B, dt = SYSTEMS[name]()
    for got, expected in zip(undiscretize(*discretize(A, B, dt), dt), (A, B), strict=True):
        assert got.dtype == expected.dtype
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in (got, expected)]
        assert_close(*parts, name)


def test_back_and_there_in_float32():
    A, B = stable(3).float(), randn(3, 4, 2).float()
    Ad, Bd = discretize(A, B, 0.5)
    for got, expected in zip(discretize(*undiscretize(Ad, Bd, 0.5), 0.5), (Ad, Bd), strict=True):
        assert got.dtype == torch.float32
        assert_close(got, expected, "float32", 1e-6)


def test_a_system_alone_equals_it_in_a_batch():
    """They need 3 and 6 square roots."""
    A, B = torch.stack([1e-3 * stable(), 8 * stable()]), randn(2, 4, 1)
    Ad, Bd = discretize(A, B, 0.5)
    together = undiscretize(Ad, Bd, 0.5)
    for row in range(2):
        alone = undiscretize(Ad[row], Bd[row], 0.5)
        for got, expected in zip(together, alone, strict=True):
            assert_close(got[row], expected, f"row {row}", 1e-13)


@pytest.mark.slow
def test_gradients_of_undiscretize():
    A = torch.stack([0.05 * stable(), stable()])
    Ad, Bd = discretize(A, randn(2, 4, 2), 0.8)
    dt = torch.tensor([0.8, 0.9], dtype=FLOAT64)
    inputs = tuple(tensor.detach().clone().requires_grad_() for tensor in (Ad, Bd, dt))
    assert gradcheck(undiscretize, inputs)
    assert gradgradcheck(undiscretize, inputs)


def test_the_derivative_there_and_back_is_one():
    """Sharper than finite differences: the Jacobian of undiscretize(discretize(.)) by autograd."""
    A, B = stable().requires_grad_(), randn(4, 1).requires_grad_()
    back = undiscretize(*discretize(A, B, 1.5), 1.5)
    weights = randn(4, 4), randn(4, 1)
    gradients = torch.autograd.grad(back, (A, B), weights)
    for got, expected, name in zip(gradients, weights, "AB", strict=True):
        assert_close(got, expected, name, 1e-11)


def test_frequencies_beyond_half_the_rate_of_sampling_are_reported_as_their_alias():
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=FLOAT64)
    B = torch.zeros(2, 1, dtype=FLOAT64)
    A, _ = undiscretize(*discretize((2 * math.pi - 1) * quarter, B, 1), 1)
    assert_close(A, -quarter, "the alias")


@pytest.mark.parametrize(
    ("Ad", "dt", "message"),
    [
        (torch.diag(torch.tensor([0.5, -0.5])), 1.0, r"1 eigenvalues at 0 or on the negative real axis, such as -0\.5"),
        (-torch.eye(2), 1.0, "2 eigenvalues"),
        (torch.zeros(2, 2), 1.0, "below rounding: sample with a smaller dt"),
        (torch.eye(2), 0.0, "every A fits"),
        (torch.full((2, 2), torch.nan), 1.0, "must be finite"),
        (torch.eye(2), float("nan"), "dt must be finite, got nan"),
        (torch.eye(2), float("inf"), "dt must be finite, got inf"),
        (torch.ones(2, 3), 1.0, r"Ad must be \(\.\.\., N, N\)"),
    ],
)
def test_what_has_no_logarithm_is_reported(Ad, dt, message):
    for dtype in (torch.float32, FLOAT64):
        with pytest.raises(ValueError, match=f"undiscretize: .*{message}"):
            undiscretize(Ad.to(dtype), torch.ones(2, 1, dtype=dtype), dt)


def test_what_is_out_of_reach_is_reported():
    """LegS forgets its last states at exp(-32): nothing of them is left beside the others."""
    with pytest.raises(ValueError, match=r"ill-conditioned.*smaller dt|below rounding"):
        undiscretize(*discretize(*hippo_legs(32), 1.0), 1.0)
    A, B = hippo_legs(32)
    with pytest.raises(ValueError, match=r"no logarithm reached 1e-09 in float64 for 1 systems"):
        undiscretize(*discretize(A, B, torch.tensor([0.01, 0.2])), torch.tensor([0.01, 0.2]))


# -------------------------------------------------------------------------------------------------------- LegS


def test_legs_is_what_the_paper_writes():
    A, B = hippo_legs(3)
    root = math.sqrt
    expected = [[-1, 0, 0], [-root(3), -2, 0], [-root(5), -root(15), -3]]
    assert_close(A, torch.tensor(expected, dtype=FLOAT64), "A", 1e-15)
    assert_close(B[:, 0], torch.tensor([1, root(3), root(5)], dtype=FLOAT64), "B", 1e-15)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_legs_contracts(size):
    A, B = hippo_legs(size)
    assert_close(A + A.T, -(torch.eye(size, dtype=FLOAT64) + B @ B.T), "A + A'", 1e-14)
    growth = [torch.linalg.matrix_norm(discretize(A, B, t)[0], 2).item() for t in (0.01, 0.1, 1.0)]
    assert max(growth) < 1
    assert growth == sorted(growth, reverse=True)


@pytest.mark.parametrize("degree", [0, 1, 4, 7])
def test_legs_holds_the_coefficients_of_a_polynomial(degree):
    """c_i = m_i t^k follows x^k, so that k m = A m + B; and with all coefficients below N, the polynomial is exact."""
    size, t = 8, 1.7
    A, B = hippo_legs(size)
    m = torch.linalg.solve(degree * torch.eye(size, dtype=FLOAT64) - A, B)[:, 0]
    c = m * t**degree
    assert_close(c, projection(lambda x: x**degree, [0.0, t], size), "coefficients")
    x = torch.linspace(0, t, 23, dtype=FLOAT64)
    assert_close(legendre(2 * x / t - 1, size) @ c, x**degree, "the history")


def test_the_legs_equation_follows_a_polynomial():
    """dc/ds = A c + B p(exp s) in s = log t from t = 1 to 5, with the powers exp(k s) as states of their own."""
    size, p = 8, randn(6)
    A, B = hippo_legs(size)
    powers = torch.diag(torch.arange(6, dtype=FLOAT64))
    joint = torch.cat([torch.cat([A, B * p], 1), torch.cat([torch.zeros(6, size, dtype=FLOAT64), powers], 1)])

    def f(x: Tensor) -> Tensor:
        return x.unsqueeze(-1) ** torch.arange(6) @ p

    start = torch.cat([projection(f, [0.0, 1.0], size), torch.ones(6, dtype=FLOAT64)])
    Ad, _ = discretize(joint, torch.zeros(len(joint), 1, dtype=FLOAT64), math.log(5))
    c = (Ad @ start)[:size]
    assert_close(c, projection(f, [0.0, 5.0], size), "coefficients")
    x = torch.linspace(0, 5, 23, dtype=FLOAT64)
    assert_close(legendre(2 * x / 5 - 1, size) @ c, f(x), "the history")


def test_legs_held_steps_project_a_history_of_steps():
    """A piecewise constant history needs no more than discretize over the steps of log t."""
    size, edges, levels = 12, [0.0, 1.0, 1.5, 2.0, 3.7, 3.9, 8.0], randn(6)
    A, B = hippo_legs(size)
    c = projection(lambda x: torch.full_like(x, levels[0]), edges[:2], size)
    for left, right, level in zip(edges[1:], edges[2:], levels[1:], strict=False):
        Ad, Bd = discretize(A, B, math.log(right / left))
        c = Ad @ c + Bd[:, 0] * level

    def history(x: Tensor) -> Tensor:
        return levels[torch.bucketize(x, torch.tensor(edges[1:-1], dtype=FLOAT64))]

    assert_close(c, projection(history, edges, size), "coefficients")


@pytest.mark.parametrize("size", [2, 8, 64])
def test_modes_are_those_of_the_normal_part(size):
    A, B = hippo_legs(size)
    normal, modes = A + B @ B.T / 2, legs_modes(size)
    assert_close(normal @ normal.T, normal.T @ normal, "normal", 1e-12)
    assert modes.dtype == torch.complex128
    assert modes.shape == (size // 2,)
    assert (modes.real == -0.5).all()
    assert (modes.imag > 0).all()
    assert (modes.imag.diff() > 0).all()
    values = torch.linalg.eigvals(normal)
    assert_close(values.imag[values.imag > 0].sort().values, modes.imag, "imaginary parts", 1e-11)
    assert_close(values.real, torch.full((size,), -0.5, dtype=FLOAT64), "real parts", 1e-10)


def test_sizes_that_have_no_meaning_are_reported():
    for size in (0, 1, 7):
        with pytest.raises(ValueError, match=f"even and at least 2, got {size}"):
            legs_modes(size)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        hippo_legs(0)
