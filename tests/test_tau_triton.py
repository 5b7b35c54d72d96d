"""The Triton kernels of tau attention against the definition in float64: on CUDA where there is one, or interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from test_tau_attention import NAMES, problem
from torch import Tensor

from glissando.errors import ConfigError
from glissando.mixers.tau.attention import _form, exponents, tau_attention

# Triton reads TRITON_INTERPRET when it is imported: test_interpreted runs this file again with it set.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not RUNS, reason="needs Triton, and CUDA or TRITON_INTERPRET=1")

#: relative L2 error in float32. Where a gradient vanishes, rounding is left of it: an error counts from a hundredth of
#: the largest gradient, those of lambda and T from a hundredth of dv's size over T.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def _small_tiles_and_no_free_memory(monkeypatch):
    """Several tiles in a few tokens; and new memory holds NaN, so that what no program writes is seen."""
    if not RUNS:
        return
    monkeypatch.setattr("glissando.mixers.tau.triton._TILE", 16)
    plain = Tensor.new_empty

    def poisoned(self: Tensor, *size, **options) -> Tensor:
        new = plain(self, *size, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def outcome(backend: str, inputs: list[Tensor], past: Tensor | None = None) -> dict[str, Tensor]:
    """Values, and the gradients of a loss of o."""
    device = DEVICE if backend == "triton" else "cpu"
    q, k, v, bias, forget, temperature = leaves = [x.detach().clone().to(device).requires_grad_() for x in inputs]
    o = tau_attention(q, k, v, temperature, exponents(k, bias, forget), backend, past)  # type: ignore[arg-type]
    # What arrives at o is rounded to its type: these weights need no rounding.
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(device)
    grads = torch.autograd.grad((o.double() * weights).sum(), leaves)
    return dict(zip(NAMES, (x.detach().cpu() for x in (o, *grads)), strict=True))


def agree(inputs: list[Tensor], past: Tensor | None = None, bound: float = BOUND) -> None:
    exact = outcome("reference", [x.double() for x in inputs], past)
    got = outcome("triton", inputs, past)
    largest = max(float(exact[name].norm()) for name in NAMES[1:])
    over_t = float(exact["v"].norm() / inputs[5].double().min())
    for name in NAMES:
        least = 1e-2 * over_t if name.startswith(("lambda", "temperature")) else 1e-2 * largest
        error = (got[name].double() - exact[name]).norm() / exact[name].norm().clamp_min(least)
        assert error <= bound, f"{name}: relative L2 error {error:.1e}, allowed {bound:.0e}"


@runs
def test_one_case():
    """Two tiles and one token, a past, a width that is no power of two."""
    agree(problem("ties", (2, 2, 18, 21), torch.float32, 0.03))


@runs
def test_one_case_of_different_pasts_in_half_precision():
    q, k, v, *rest = problem("random", (2, 1, 17, 22), torch.float32, 0.1, size=3)
    agree([q, k, v.bfloat16(), *rest], torch.tensor([0, 5]), 5e-3)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.03, 1e-3])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "clustered", "negative"])
@pytest.mark.parametrize(
    "shape", [(2, 2, 1, 1), (1, 4, 33, 33), (2, 3, 40, 40), (1, 2, 20, 60), (3, 1, 16, 49)], ids=str
)
def test_equals_the_definition(shape: tuple[int, ...], kind: str, temperature: float):
    agree(problem(kind, shape, torch.float32, temperature))


@runs
@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 16, 24, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widths_and_types(width: int, dtype: torch.dtype):
    q, k, v, *rest = problem("random", (1, 2, 19, 35), torch.float32, 0.1, size=width)
    agree([q, k, v.to(dtype), *rest], bound=BOUND if dtype == torch.float32 else 5e-3)


@runs
@pytest.mark.slow
def test_rows_of_different_pasts():
    inputs = problem("ties", (3, 2, 25, 60), torch.float32, 0.05)
    agree(inputs, torch.tensor([0, 13, 30]))


@runs
@pytest.mark.slow
def test_large_exponents_at_small_temperatures():
    """Logits of tens of thousands, as a gate makes them over many tokens: what decides is left where they cancel."""
    q, k, v, bias, forget, temperature = problem("random", (1, 2, 70, 70), torch.float32, 1e-3)
    agree([q, k, v, bias * 10, forget - 1000 * torch.arange(70.0, dtype=torch.float64), temperature])
    steady = torch.linspace(-4e6, -4e6 - 3, 70, dtype=torch.float64).expand_as(forget)
    agree([q, k, v, bias, steady, temperature])


@runs
@pytest.mark.slow
def test_a_gradient_of_temperature_far_from_every_key():
    q, *rest = problem("clustered", (1, 2, 40, 40), torch.float32, 1e-3)
    exact = outcome("reference", [x.double() for x in (q + 0.3, *rest)])["temperature"]
    got = outcome("triton", [q + 0.3, *rest])["temperature"]
    assert (got.double() - exact).norm() < 1e-4 * exact.norm()


@runs
@pytest.mark.slow
def test_keys_behind_the_last_query_have_no_weight():
    """Nor need what no query sees be a number."""
    q, k, v, bias, _, temperature = problem("random", (1, 2, 20, 50), torch.float32, 0.1)
    past = torch.tensor([10], device=DEVICE)
    q, k, v, bias, temperature = (x.to(DEVICE) for x in (q, k, v, bias, temperature))
    o = tau_attention(q, k, v, temperature, bias, backend="triton", past=past)
    v[:, :, 32:], k[..., 32:] = torch.nan, torch.nan
    assert torch.equal(o, tau_attention(q, k, v, temperature, bias, backend="triton", past=past))
    assert torch.isfinite(o).all()


@runs
@pytest.mark.slow
@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_nan_is_never_swallowed(broken: int):
    q, k, v, bias, forget, temperature = inputs = problem("random", (1, 1, 40, 40), torch.float32, 0.1)
    inputs[broken][0, 0, 20] = torch.nan
    q, k, v, bias, forget, temperature = (x.to(DEVICE) for x in inputs)
    o = tau_attention(q, k, v, temperature, exponents(k, bias, forget), backend="triton")
    assert o[0, 0, 20:].isnan().any(-1).all()
    assert o[0, 0, :16].isfinite().all()  # of its own tile of keys a NaN may reach earlier queries


@runs
@pytest.mark.slow
def test_compiled_whole():
    """A custom operation: torch.compile neither looks into it nor breaks the graph, forward or backward."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, forget: Tensor, temperature: Tensor) -> Tensor:
        return tau_attention(q, k, v, temperature, exponents(k, bias, forget), "triton").square().sum()

    inputs = [x.to(DEVICE) for x in problem("random", (1, 2, 18, 18), torch.float32, 0.1)]
    result = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = function(*leaves)
        result.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for plain, compiled in zip(*result, strict=True):
        torch.testing.assert_close(compiled, plain)


@runs
@pytest.mark.slow
def test_the_operation_is_well_formed():
    """Its fake implementation, gradients and schema, by PyTorch's own checks."""
    from glissando.mixers.tau import triton as tau_triton

    q, k, v, *_ = (x.to(DEVICE) for x in problem("random", (1, 2, 5, 6), torch.float32, 0.1))
    e = torch.zeros_like(k, dtype=torch.float64)
    inverse = torch.tensor([10.0, 20.0], dtype=torch.float64, device=DEVICE)
    past = torch.ones(1, dtype=torch.int64, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, e, inverse)]
    torch.library.opcheck(tau_triton.forward, (*leaves, past, True))


@runs
def test_what_it_cannot_run():
    q, k, v, *_ = problem("random", (1, 1, 4, 4), torch.float64, 0.1)
    q, k, v = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    with pytest.raises(ConfigError, match="computes in float32, got float64"):
        tau_attention(q, k, v, 0.1, backend="triton")
    with pytest.raises(ConfigError, match="up to 256 wide, got 300"):
        tau_attention(q.float(), k.float(), v.new_zeros(1, 1, 4, 300).float(), 0.1, backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="it runs here")
def test_off_cuda_it_says_so():
    q, k, v, *_ = problem("random", (1, 1, 4, 4), torch.float32, 0.1)
    with pytest.raises(ConfigError, match="needs CUDA" if HAS_TRITON else "pip install triton"):
        tau_attention(q, k, v, 0.1, backend="triton")


def test_automatic_choice(monkeypatch):
    """On CUDA the kernel, where it is installed and can; the matrix for a step of decoding, float64 and wide values."""

    class On(Tensor):
        is_cuda = True

    def chosen(backend: str = "auto", dtype=torch.float32, queries: int = 2, width: int = 256) -> bool:
        q = torch.zeros(1, 1, queries, dtype=dtype).as_subclass(On)
        return _form(backend, q, q, torch.zeros(1, 1, 2, width)) == "triton"

    module = sys.modules["glissando.mixers.tau.attention"]  # its function has the same name
    monkeypatch.setattr(module, "HAS_TRITON", True)
    assert chosen()
    assert not chosen(dtype=torch.float64)
    assert not chosen(queries=1)
    assert not chosen(width=257)
    assert not chosen("reference")
    monkeypatch.setattr(module, "HAS_TRITON", False)
    assert not chosen()


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="triton is not installed (or runs here already)")
@pytest.mark.parametrize("which", [pytest.param(which, marks=pytest.mark.slow) for which in ("", "slow")])
def test_interpreted(which: str):
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-m", which or "not slow"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
