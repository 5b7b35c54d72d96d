"""The Triton kernels of the block scan against its definition: on CUDA where there is one, or interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from glissando.errors import ConfigError
from glissando.ops.block_scan import adjoint, block_scan

# Triton reads TRITON_INTERPRET when it is imported: test_interpreted runs this file again with it set.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not RUNS, reason="needs Triton, and CUDA or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _short_chunks_and_no_free_memory(monkeypatch):
    """Several chunks and two levels of them in a few steps; new memory holds NaN, which shows what is not written."""
    if not RUNS:
        return
    monkeypatch.setattr("glissando.ops.block_scan_triton._CHUNK", 2)
    plain = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: plain(*size, **options).fill_(torch.nan))


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def agree(batch: int, time: int, channels: int, dtype: torch.dtype, tolerance: float) -> None:
    shape = (batch, time, channels, 2)
    inputs = [0.6 * draw(*shape, 2, seed=1, dtype=dtype), draw(*shape, seed=2, dtype=dtype)]
    inputs.append(draw(batch, channels, 2, seed=3, dtype=dtype))
    results = []
    for backend, device, kind in (("reference", "cpu", torch.float64), ("triton", DEVICE, dtype)):
        leaves = [x.to(device, kind).requires_grad_() for x in inputs]
        h, last = block_scan(*leaves, backend=backend)  # type: ignore[arg-type]
        weights = [draw(*y.shape, seed=seed, dtype=kind).to(device) for seed, y in enumerate((h, last), 4)]
        grads = torch.autograd.grad((h * weights[0]).sum() + (last * weights[1]).sum(), leaves)
        results.append([y.detach().cpu() for y in (h, last, *grads)])
    for name, expected, got in zip(("h", "last", "a", "x", "h0"), *results, strict=True):
        assert_close(got.double(), expected, name, tolerance)


@runs
def test_one_case():
    agree(2, 9, 3, torch.float32, 1e-6)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 2, 4, 5, 6, 13, 31])
@pytest.mark.parametrize("channels", [1, 65])
def test_equals_the_definition(time: int, channels: int):
    agree(3, time, channels, torch.float64, 1e-11)


@runs
@pytest.mark.slow
def test_the_adjoint_of_gradients_that_are_not_contiguous():
    a, grad = 0.6 * draw(2, 7, 3, 2, 2, seed=1, dtype=torch.float64), draw(2, 3, 7, 2, seed=2, dtype=torch.float64)
    a, grad = a.to(DEVICE), grad.to(DEVICE).transpose(1, 2)
    for got, expected in zip(adjoint(a, grad, "triton"), adjoint(a, grad, "doubling"), strict=True):
        assert_close(got, expected, "adjoint", 1e-11)


@pytest.mark.skipif(INTERPRETED, reason="it runs here")
def test_off_cuda_it_says_so():
    a, x = torch.zeros(1, 2, 1, 2, 2), torch.zeros(1, 2, 1, 2)
    with pytest.raises(ConfigError, match="needs CUDA" if HAS_TRITON else "pip install triton"):
        block_scan(a, x, backend="triton")


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="triton is not installed (or runs here already)")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(which: str):
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-m", which]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
