"""The sorted form of tau attention in tensor code against the definition in float64, values and all gradients."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from test_tau_attention import BOUND, NAMES, SHAPES, outcome, problem
from torch import Tensor

from glissando.ops import tau_sorted
from glissando.ops.precise import wide, wide_to_double
from glissando.ops.tau_attention import _inverse, attend, exponents, tau_attention
from glissando.ops.tau_sorted import _cuts, _running, _Split
from glissando.testing import no_float64

#: blocks of 64, so that these have one cut, several, and parts of blocks
LONG = {"a cut": (2, 2, 1, 65, 65), "three": (1, 2, 2, 300, 300), "a past": (2, 2, 1, 150, 200)}


def errors(got: dict[str, Tensor], exact: dict[str, Tensor], temperature: Tensor) -> dict[str, float]:
    """Relative L2 errors. Where a gradient vanishes, rounding is left of it: errors count from what test_tau_attention
    counts them from, that of T from a hundredth of dv's size over T."""
    largest = max(float(exact[name].norm()) for name in NAMES[2:])
    over_t = float(exact["v"].norm() / temperature.double().min())
    least = dict.fromkeys(NAMES, 1e-4 * largest)
    least |= {"lambda_q": 1e-3 * over_t, "lambda_k": 1e-3 * over_t, "temperature": 1e-2 * over_t}
    return {
        name: float((got[name].double() - exact[name]).norm() / exact[name].norm().clamp_min(least[name]))
        for name in got
    }


def require(got: dict[str, Tensor], exact: dict[str, Tensor], temperature: Tensor) -> None:
    """Errors of at most 1e-9 in float64. In float32 1e-5 for values, 3e-5 for gradients of lambda, and 1e-3 for those
    that vanish.

    The gradient of T is a sum of ds |q - k| / T^2, in which ds is rounded to float32 and nearly all cancels: its error
    is some eps / T^2, counted from dv's size over T, hence 2e-6 / T.
    """
    double = temperature.dtype == torch.float64
    of_t = max(2e-5, 2e-6 / float(temperature.min()))
    loose = {"temperature": of_t, "key_bias": 1e-3, "cumulative_log_forget": 1e-3, "lambda_q": 3e-5, "lambda_k": 3e-5}
    for name, error in errors(got, exact, temperature).items():
        bound = 1e-9 if double else loose.get(name, 1e-5)
        assert error <= bound, f"{name}: relative L2 error {error:.1e}, allowed {bound:.0e}"


def agree(inputs: list[Tensor], past: Tensor | None = None) -> None:
    for of_lse in (False, True):
        exact = outcome("reference", [x.double() for x in inputs], past, of_lse)
        require(outcome("sorted", inputs, past, of_lse), exact, inputs[5])


@pytest.mark.parametrize("temperature", [1.0, 0.03, 1e-3])
@pytest.mark.parametrize("kind", ["random", "ties", "clustered"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", LONG)
def test_equals_the_definition(shape: str, dtype: torch.dtype, kind: str, temperature: float):
    agree(problem(kind, LONG[shape], dtype, temperature))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.03, 5e-3, 1e-3])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "clustered", "negative"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES.values(), *LONG.values(), (1, 1, 1, 4096, 4096)], ids=str)
def test_equals_the_definition_everywhere(shape, dtype, kind, temperature):
    agree(problem(kind, shape, dtype, temperature))


def test_equal_lambdas_give_each_other_no_gradient():
    inputs = problem("equal", (1, 1, 1, 150, 150), torch.float64, 0.05)
    got = outcome("sorted", inputs)
    assert not got["lambda_q"].any()
    assert not got["lambda_k"].any()
    assert not got["temperature"].any()


def test_rows_of_different_pasts():
    agree(problem("ties", (2, 2, 1, 120, 300), torch.float64, 0.05), torch.tensor([13, 170]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_exponents_neither_overflow_nor_vanish(dtype: torch.dtype):
    """Logits of tens of thousands: what decides is left where they cancel."""
    q, k, v, bias, forget, temperature = problem("random", (1, 2, 2, 300, 300), dtype, 1e-3)
    inputs = [q, k, v, bias * 300, forget * 1000, temperature]
    got = outcome("sorted", inputs)
    assert all(tensor.isfinite().all() for tensor in got.values())
    exact = outcome("reference", [x.double() for x in inputs])
    for name in ("o", "v"):
        assert (got[name].double() - exact[name]).norm() / exact[name].norm() < BOUND[dtype]


def test_hidden_keys_have_no_weight():
    q, k, v, bias, _, temperature = problem("random", (1, 2, 2, 200, 200), torch.float64, 0.1)
    bias[..., 5:140] = -torch.inf
    o = tau_attention(q, k, v, temperature, bias, backend="sorted")
    assert (o - tau_attention(q, k, v, temperature, bias, backend="reference")).abs().max() < 1e-12
    v[:, :, 5:140] = 1e6
    assert torch.equal(o, tau_attention(q, k, v, temperature, bias, backend="sorted"))


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_nan_is_never_swallowed(broken: int):
    """Of its own block of 64 it may reach earlier queries too."""
    inputs = problem("random", (1, 1, 1, 300, 300), torch.float32, 0.1)
    inputs[broken][0, 0, 100] = torch.nan
    q, k, v, bias, forget, temperature = inputs
    o = tau_attention(q, k, v, temperature, bias, forget, backend="sorted")
    assert o[0, 0, 100:].isnan().any(-1).all()
    assert o[0, 0, :64].isfinite().all()


@pytest.mark.parametrize("kind", ["random", "ties"])
def test_without_float64(kind: str):
    """Exponents are pairs of float32."""
    q, k, v, bias, forget, temperature = problem(kind, (1, 2, 1, 200, 200), torch.float32, 0.01)
    steep = (40 * forget).float()
    inputs = [q, k, v, bias, steep, temperature]
    exact = outcome("reference", [x.double() for x in inputs], hears_lse=False)
    # those of `outcome`
    weights = torch.randn(exact["o"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).float()
    with no_float64():
        leaves = [x.clone().requires_grad_() for x in inputs]
        e = exponents(leaves[1], leaves[3], leaves[4])
        o, lse = attend(leaves[0], leaves[1], leaves[2], leaves[5], e, "sorted")
        assert lse.shape == (*q.shape, 2)
        gradients = torch.autograd.grad((o * weights).sum(), leaves)
    found = wide_to_double(lse.detach())
    assert (found - exact["lse"]).abs().max() < 1e-6 * exact["lse"].abs().max()
    require(dict(zip(NAMES, (o.detach(), found, *gradients), strict=True)), exact, temperature)


def test_a_running_sum_is_its_definition():
    """Groups, what they carry over, and lengths that are no multiple of a group."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 16, 40, 512):
        a = 50 * torch.randn(2, length, generator=generator, dtype=torch.float64)
        values = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
        for reverse in (False, True):
            top, sums = _running(_Split(a, None), values, reverse)
            seen = torch.ones(length, length, dtype=torch.bool)
            weights = a.unsqueeze(-2).masked_fill(seen.tril(-1) if reverse else seen.triu(1), -torch.inf)
            assert torch.equal(top, weights.amax(-1))
            torch.testing.assert_close(sums, (weights - top.unsqueeze(-1)).exp() @ values, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [64, 128, 192, 448, 704, 1024])
def test_cuts_cover_every_earlier_block_once(length: int):
    pairs = torch.zeros(length, length, dtype=torch.int64)
    for left, right, times in _cuts(length):
        for i in range(times):
            shift = i * 2 * (left.stop - left.start)
            pairs[right.start + shift : right.stop + shift, left.start + shift : left.stop + shift] += 1
    block = torch.arange(length) // 64
    assert torch.equal(pairs, (block.unsqueeze(-1) > block).long())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
def test_compiled_whole():
    """In the place of the T x T matrix, without a graph break, forward and backward."""
    q, k, v, bias, _, temperature = problem("random", (1, 2, 1, 256, 256), torch.float32, 0.1)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, temperature: Tensor, backend: Any = "auto") -> Tensor:
        return tau_attention(q, k, v, temperature, bias, backend=backend).square().sum()

    torch._dynamo.reset()
    found = []
    for function in (partial(run, backend="sorted"), torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias, temperature)]
        found.append(torch.autograd.grad(function(*leaves), leaves))
    for plain, compiled in zip(*found, strict=True):
        assert (plain - compiled).norm() < 1e-5 * plain.norm()


def largest(length: int) -> int:
    """Bytes of the largest tensor that is made, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(tensor, Tensor):
                    self.most = max(self.most, tensor.untyped_storage().nbytes())
            return made

    q, k, v, *_ = (x.requires_grad_() for x in problem("random", (1, 1, 1, length, length), torch.float32, 0.1, size=1))
    inverse, past = _inverse(0.1, q), torch.zeros(1, dtype=torch.int64)
    with Watch() as watch:
        o, _ = tau_sorted.forward(q, k, v, wide(torch.zeros_like(k)), inverse, past)
        torch.autograd.grad(o.sum(), (q, k, v))
    return watch.most


def test_memory_grows_slower_than_the_matrix():
    assert largest(4096) <= 4.5 * largest(1024)  # 16 times where it grows with T^2


def test_automatic_choice(monkeypatch):
    """Where no kernel runs: from 256 keys on, most of them with queries of their own."""
    module, seen = sys.modules["glissando.ops.tau_attention"], []
    monkeypatch.setattr(module, "_use_fast", lambda *_: False)
    run = tau_sorted.forward
    monkeypatch.setattr(tau_sorted, "forward", lambda *given: seen.append(given[0].shape[2]) or run(*given))
    for queries, keys, is_sorted in ((255, 255, False), (256, 256, True), (127, 256, False), (128, 256, True)):
        seen.clear()
        q, k, v, *_ = problem("random", (1, 1, 1, queries, keys), torch.float64, 0.1)
        tau_attention(q, k, v, 0.1)
        assert seen == ([queries] if is_sorted else [])
