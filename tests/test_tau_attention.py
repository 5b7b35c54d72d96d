"""Attention by the distance of lambdas: the sorting form against the definition, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glissando.errors import ConfigError, UnknownNameError
from glissando.mixers.tau.attention import exponents, tau_attention

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
NAMES = ("o", "lambda_q", "lambda_k", "v", "key_bias", "cumulative_log_forget", "temperature")
#: batch, heads, queries, keys
SHAPES = {
    "one": (2, 2, 1, 1),
    "a block and one": (1, 4, 33, 33),
    "several blocks": (2, 3, 200, 200),
    "a past": (1, 2, 50, 130),
    "long": (1, 1, 700, 700),
}


def lambdas(kind: str, draw: Tensor) -> Tensor:
    if kind == "ties":
        return (draw * 4).round() / 4
    if kind == "equal":
        return torch.full_like(draw, 0.5)
    if kind == "clustered":
        return 0.3 + 1e-4 * draw + 0.4 * (draw > 0.5)
    if kind == "negative":
        return draw - 0.5
    return draw


def problem(kind: str, shape: tuple[int, ...], dtype: torch.dtype, temperature: float, size=5, seed=0) -> list[Tensor]:
    batch, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(seed)

    def uniform(*dims: int) -> Tensor:
        return torch.rand(*dims, generator=generator, dtype=torch.float64)

    q, k = lambdas(kind, uniform(batch, heads, queries)), lambdas(kind, uniform(batch, heads, keys))
    v = uniform(batch, heads, keys, size) * 2 - 1
    bias, forget = 4 * uniform(batch, heads, keys) - 2, -uniform(batch, heads, keys).cumsum(-1)
    spread = torch.linspace(1, 2, heads, dtype=torch.float64) * temperature
    return [*(x.to(dtype) for x in (q, k, v, bias)), forget, spread.to(dtype)]


def outcome(backend: str, inputs: list[Tensor], past: Tensor | None = None) -> dict[str, Tensor]:
    """Values, and the gradients of a loss of o."""
    q, k, v, bias, forget, temperature = leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = tau_attention(q, k, v, temperature, exponents(k, bias, forget), backend, past)  # type: ignore[arg-type]
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((o.double() * weights).sum(), leaves)
    return dict(zip(NAMES, (o.detach(), *grads), strict=True))


def agree(inputs: list[Tensor], past: Tensor | None = None) -> None:
    """fast against the definition in float64: relative L2 error.

    Where a gradient vanishes, rounding is left of it: those of lambda and T are differences of dv's size over T, and
    count from a thousandth of that; others from 1e-4 of the largest.
    """
    bound = BOUND[inputs[0].dtype]
    exact = outcome("reference", [x.double() for x in inputs], past)
    got = outcome("fast", inputs, past)
    largest = max(float(exact[name].norm()) for name in NAMES[1:])
    over_t = float(exact["v"].norm() / inputs[5].min())
    for name in NAMES:
        least = 1e-3 * over_t if name.startswith(("lambda", "temperature")) else 1e-4 * largest
        error = (got[name].double() - exact[name]).norm() / exact[name].norm().clamp_min(least)
        assert error <= bound, f"{name}: relative L2 error {error:.1e}, allowed {bound:.0e}"


KINDS = ["random", "ties", "equal", "clustered", "negative"]
TEMPERATURES = [1.0, 0.03, 5e-3, 1e-3]
#: every pair of a shape, a kind, a temperature and a type; half of them in `make test`, with each pair of the first two
PAIRS = [
    pytest.param(
        shape,
        kind,
        TEMPERATURES[(i + j + k) % 4],
        (torch.float64, torch.float32)[(i * j + k) % 2],
        marks=pytest.mark.slow if j // 2 % 2 != k else (),
    )
    for i, shape in enumerate(SHAPES)
    for j, kind in enumerate(KINDS)
    for k in (0, 1)
]


@pytest.mark.parametrize(("shape", "kind", "temperature", "dtype"), PAIRS)
def test_fast_equals_the_definition(shape: str, kind: str, temperature: float, dtype: torch.dtype):
    agree(problem(kind, SHAPES[shape], dtype, temperature))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 150), st.integers(0, 80), st.integers(0, 80), st.floats(-3, 0), st.integers(0, 99))
def test_rows_of_different_pasts(queries: int, first: int, second: int, log_temperature: float, seed: int):
    """Query i of row b sees the keys up to past_b + i, and keys beyond the last query's get no gradient."""
    keys = queries + max(first, second) + 3
    inputs = problem("ties", (2, 2, queries, keys), torch.float64, 10**log_temperature, seed=seed)
    agree(inputs, torch.tensor([first, second]))


def test_the_reference_is_the_formula():
    q, k, v, bias, forget, temperature = problem("random", (1, 2, 6, 6), torch.float64, 0.2)
    o = tau_attention(q, k, v, temperature, exponents(k, bias, forget), backend="reference")
    for h in range(2):
        for i in range(6):
            logits = [
                bias[0, h, j] + forget[0, h, i] - forget[0, h, j] - abs(q[0, h, i] - k[0, h, j]) / temperature[h]
                for j in range(i + 1)
            ]
            weights = torch.stack(logits).softmax(0)
            torch.testing.assert_close(o[0, h, i], weights @ v[0, h, : i + 1])


def test_equal_lambdas_give_each_other_no_gradient():
    """abs'(0) = 0: with all lambdas equal attention is an average and lambda has no gradient at all."""
    inputs = problem("equal", (1, 1, 100, 100), torch.float64, 0.05)
    got = outcome("fast", inputs)
    assert not got["lambda_q"].any()
    assert not got["lambda_k"].any()
    assert not got["temperature"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_exponents_neither_overflow_nor_vanish(dtype: torch.dtype):
    """Importances of hundreds and a gate that falls by 50 a token: the sums stay finite."""
    q, k, v, bias, forget, temperature = problem("random", (1, 2, 300, 300), dtype, 1e-3)
    bias = bias * 300
    inputs = [q, k, v, bias, forget * 100, temperature]
    got = outcome("fast", inputs)
    assert all(tensor.isfinite().all() for tensor in got.values())
    exact = outcome("reference", [x.double() for x in inputs])
    assert (got["o"].double() - exact["o"]).norm() / exact["o"].norm() < BOUND[dtype]


@pytest.mark.parametrize("broken", ["key", "key_bias", "cumulative_log_forget", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_is_never_swallowed(dtype: torch.dtype, broken: str):
    """Whoever sees a key that is not a number says so."""
    inputs = dict(
        zip(
            ("q", "key", "v", "key_bias", "cumulative_log_forget", "t"),
            problem("random", (1, 1, 200, 200), dtype, 0.1),
            strict=True,
        )
    )
    where = inputs[broken][0, 0, 50]
    where.fill_(torch.nan)
    e = exponents(inputs["key"], inputs["key_bias"], inputs["cumulative_log_forget"])
    o = tau_attention(inputs["q"], inputs["key"], inputs["v"], inputs["t"], e, backend="fast")
    assert o[0, 0, 50:].isnan().any(-1).all()
    assert o[0, 0, :50].isfinite().all()


def test_a_number_is_a_temperature_for_all_heads():
    q, k, v, *_ = problem("random", (1, 3, 80, 80), torch.float64, 0.1)
    each = torch.full((3,), 0.07, dtype=torch.float64)
    assert torch.equal(tau_attention(q, k, v, 0.07), tau_attention(q, k, v, each))


def test_half_precision_is_computed_in_float32():
    q, k, v, *_ = problem("random", (1, 2, 90, 90), torch.float32, 0.1)
    o = tau_attention(q, k, v.bfloat16(), 0.1)
    assert o.dtype == torch.bfloat16
    exact = tau_attention(q, k, v.bfloat16().float(), 0.1)
    assert torch.equal(o, exact.bfloat16())


def test_threads_compute_the_same(monkeypatch):
    monkeypatch.setattr("glissando.kernels.compiled._WORK_A_THREAD", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    agree(problem("ties", (2, 4, 150, 150), torch.float64, 0.05))


@pytest.mark.slow
def test_steep_temperatures_stay_exact_at_length():
    """Decays over thousands of sorted keys, in float32, at the smallest temperature and with a gate."""
    inputs = problem("random", (1, 1, 2500, 2500), torch.float32, 1e-3)
    agree([*inputs[:4], inputs[4] / 100, inputs[5]])


@pytest.mark.parametrize("backend", ["fast", "reference"])
def test_a_gradient_of_temperature_far_from_every_key(backend):
    """All distances are hundreds of T: what their small differences tell of T must not drown in rounding."""
    q, k, v, bias, forget, temperature = problem("clustered", (1, 2, 60, 60), torch.float64, 1e-3)
    given = [q + 0.3, k, v, bias, forget, temperature]
    exact = outcome("reference", given)["temperature"]
    got = outcome(backend, [x.float() for x in given[:4]] + [forget, temperature.float()])
    rounded = outcome("reference", [x.float().double() for x in given])["temperature"]
    assert (exact - rounded).norm() < 0.2 * exact.norm()  # the problem itself is well conditioned in float32
    assert (got["temperature"].double() - rounded).norm() < 1e-4 * rounded.norm()


@pytest.mark.parametrize("ties", [False, True])
def test_the_matrix_in_float32_at_a_small_temperature(ties: bool):
    """What weighs may be hundreds of T away: beyond keys that are long forgotten."""
    q, k, v, bias, forget, temperature = problem("random", (2, 2, 33, 33), torch.float32, 1e-3)
    q, k = ((x * 40).round() / 40 if ties else x for x in (q, k))
    inputs = [q, k, v, bias, 3 * forget, temperature]
    exact = outcome("reference", [x.double() for x in inputs])
    got = outcome("reference", inputs)
    for name in NAMES:
        assert (got[name].double() - exact[name]).norm() <= 1e-5 * exact[name].norm(), name


def test_gradients_of_lambda_where_only_ties_weigh():
    """Equal keys take all the weight and have no sign: rounding of D_i must not stand for the far ones."""
    inputs = problem("ties", SHAPES["long"], torch.float32, 0.01)
    exact = outcome("reference", [x.double() for x in inputs])
    got = outcome("fast", inputs)
    for name in ("lambda_q", "lambda_k"):
        assert (got[name].double() - exact[name]).norm() <= 3e-6 * exact[name].norm(), name


def test_mistakes_are_named():
    q, k, v, *_ = problem("random", (1, 2, 8, 8), torch.float64, 0.1)
    with pytest.raises(ValueError, match=r"k must be \(1, 2, 8\), got \(1, 1, 8\)"):
        tau_attention(q, k[:, :1], v, 0.1)
    with pytest.raises(ValueError, match=r"v must be \(1, 2, 8, 5\), got \(1, 2, 7, 5\)"):
        tau_attention(q, k, v[:, :, 1:], 0.1)
    with pytest.raises(ValueError, match=r"e must be \(1, 2, 8\), got \(1, 1, 8\)"):
        tau_attention(q, k, v, 0.1, k[:, :1])
    with pytest.raises(UnknownNameError, match="tau_attention backend"):
        tau_attention(q, k, v, 0.1, backend="quick")  # type: ignore[arg-type]
    meta = [x.to("meta") for x in (q, k, v)]
    with pytest.raises(ConfigError, match="runs on a CPU"):
        tau_attention(*meta, 0.1, backend="fast")


def test_weights_fall_by_the_temperature():
    """Two keys at distances 0 and T: their weights are as e to 1."""
    q, k = torch.tensor([[[0.2, 0.2]]]).double(), torch.tensor([[[0.2, 0.3]]]).double()
    v = torch.tensor([[[[1.0], [0.0]]]]).double()
    o = tau_attention(q, k, v, 0.1)
    assert o[0, 0, 1, 0].item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_the_definition_is_exact_under_autocast():
    """It stands in for the sorting form where there are few keys, and where that cannot run."""
    inputs = [x.requires_grad_() for x in problem("random", (2, 2, 40, 40), torch.float32, 0.1)]
    q, k, v, bias, forget, temperature = inputs
    exact = outcome("reference", [x.double() for x in inputs])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = tau_attention(q, k, v, temperature, exponents(k, bias, forget), backend="reference")
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    result = [o, *torch.autograd.grad((o.double() * weights).sum(), inputs)]
    for name, got in zip(NAMES, result, strict=True):
        error = (got.double() - exact[name]).norm() / exact[name].norm()
        assert error <= BOUND[torch.float32], f"{name}: relative L2 error {error:.1e}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
def test_compiled_whole():
    """The kernels are one operation of the graph, forward and backward, and no T x T matrix is formed."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, temperature: Tensor) -> Tensor:
        return tau_attention(q, k, v, temperature, bias).square().sum()

    inputs = [x for x in problem("random", (1, 2, 256, 256), torch.float32, 0.1) if x.dtype is torch.float32]
    torch._dynamo.reset()
    result = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        result.append(torch.autograd.grad(function(*leaves), leaves))
    for plain, compiled in zip(*result, strict=True):
        assert torch.equal(plain, compiled)


def test_the_operation_is_well_formed():
    """Its fake implementations and schema, by PyTorch's own checks."""
    from glissando.mixers.tau import numba as tau_kernels

    q, k, v, bias, _, temperature = problem("random", (1, 2, 70, 80), torch.float32, 0.1)
    inputs = [x.requires_grad_() for x in (q, k, v, bias.double(), temperature.double())]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(tau_kernels.differentiable, (*inputs, torch.tensor([10])), test_utils=tests)
