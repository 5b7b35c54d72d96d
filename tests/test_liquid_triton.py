"""The Triton kernels of the liquid recurrence against its definition in float64: on CUDA, or interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from test_liquid_ops import outcome, problem, some_modes
from tolerances import assert_close
from torch import Tensor

from glissando.errors import ConfigError
from glissando.mixers.liquid.scan import Modes, _kernel, liquid

# Triton reads TRITON_INTERPRET when it is imported: test_interpreted runs this file again with it set.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not RUNS, reason="needs Triton, and CUDA or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _small_blocks_and_no_free_memory(monkeypatch):
    """Several blocks for a few modes; new memory holds NaN, which shows what is not written."""
    if not RUNS:
        return
    monkeypatch.setattr("glissando.mixers.liquid.triton._BLOCK", 4)
    plain = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: plain(*size, **options).fill_(torch.nan))


def agree(
    time: int, n: int, batch: int, *, dtype: torch.dtype, is_complex=True, coupled=True, timed=True, state=True,
    impulse=False, tolerance: float,
) -> None:  # fmt: skip
    """Values and all gradients, each beside its largest entry."""
    b, z, x0, dt = problem(time, n, batch, is_complex)
    modes = some_modes(n, 0.9, state)
    expected = outcome("reference", b, z, x0, dt if timed else None, modes, coupled, impulse)
    arguments = [v.to(DEVICE, dtype) for v in (b, z, x0, dt)]
    there = Modes(*(w if w is None else w.to(DEVICE, dtype) for w in modes))
    got = outcome("triton", *arguments[:3], arguments[3] if timed else None, there, coupled, impulse)
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert_close(got[name].double().cpu() / scale, value / scale, name, tolerance)


@runs
@pytest.mark.parametrize("impulse", [False, True], ids=["held", "impulse"])
def test_one_case(impulse: bool):
    """An odd length, modes that do not fill a block, complex inputs, uneven time."""
    agree(3, 5, 1, dtype=torch.float32, tolerance=1e-5, impulse=impulse)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("timed", ["even", "held", "impulse"])
@pytest.mark.parametrize("state", [False, True], ids=["tau(u)", "tau(x,u)"])
@pytest.mark.parametrize(("time", "n", "batch"), [(1, 1, 1), (2, 4, 1), (13, 5, 2)])
def test_equals_the_definition(coupled, is_complex, timed, state, time, n, batch):
    kind = {"is_complex": is_complex, "coupled": coupled, "state": state}
    kind |= {"timed": timed != "even", "impulse": timed == "impulse"}
    agree(time, n, batch, dtype=torch.float64, tolerance=1e-10, **kind)
    agree(time, n, batch, dtype=torch.float32, tolerance=5e-5 if timed == "impulse" else 2e-5, **kind)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("impulse", [False, True], ids=["held", "impulse"])
def test_slow_modes_and_sums_over_time_keep_their_digits(impulse: bool):
    agree(100, 4, 1, dtype=torch.float32, tolerance=2e-5, impulse=impulse)


@runs
def test_a_nan_is_never_swallowed():
    """It reaches its own mode from its own token on, and nothing else."""
    b, z, x0, _ = (v.to(DEVICE) for v in problem(6, 3, 1))
    z[0, 2, 1] = torch.nan
    x = liquid(b, z, Modes(*(w.to(DEVICE) for w in some_modes(3) if w is not None)), x0, backend="triton")
    broken = torch.zeros(6, 3, dtype=torch.bool)
    broken[2:, 1] = True
    assert torch.equal(x[0].isnan().all(-1).cpu(), broken)
    assert torch.equal(x[0].isnan().any(-1).cpu(), broken)


@runs
@pytest.mark.slow
def test_gradients_that_are_not_contiguous():
    b, z, x0, _ = (v.to(DEVICE) for v in problem(7, 3, 2))
    modes = Modes(*(w.to(DEVICE) for w in some_modes(3) if w is not None))
    grads = []
    for backend in ("reference", "triton"):
        leaf = z.clone().requires_grad_()
        x = liquid(b, leaf, modes, x0, backend=backend)
        grads.append(torch.autograd.grad(x.transpose(1, 2).flip(1), leaf, torch.ones_like(x).transpose(1, 2).cos())[0])
    assert_close(grads[1], grads[0], "z", 1e-10)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True], ids=["tau(u)", "tau(x,u)"])
def test_compiled_whole(state: bool):
    """One operation of the graph, forward and backward."""
    b, z, x0, dt = (v.to(DEVICE) for v in problem(5, 3, 2))
    modes = Modes(*(w if w is None else w.to(DEVICE) for w in some_modes(3, state=state)))

    def run(b: Tensor, z: Tensor) -> Tensor:
        return liquid(b, z, modes, x0, dt, backend="triton").square().sum()

    result = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [v.clone().requires_grad_() for v in (b, z)]
        result.append(torch.autograd.grad(function(*leaves), leaves))
    for plain, compiled in zip(*result, strict=True):
        torch.testing.assert_close(compiled, plain)


@runs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mixer_in_bfloat16(monkeypatch):
    """Weights and inputs are rounded to it, the recurrence is computed in float32: as the CPU's kernel does."""
    from glissando.mixers.liquid import Liquid

    mixer = Liquid(8, state_size=12).to(DEVICE, torch.bfloat16)
    inputs = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    result = []
    for form in ("triton", None):
        if form is not None or DEVICE == "cuda":
            monkeypatch.setattr("glissando.mixers.liquid.scan._kernel", lambda *_, form=form: form)
        else:
            monkeypatch.undo()
        y, _ = mixer(inputs)
        result.append((y, *torch.autograd.grad(y.float().square().sum(), list(mixer.parameters()))))
    for got, expected in zip(*result, strict=True):
        assert got.dtype == torch.bfloat16
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, atol=1e-2 * float(expected.detach().abs().max()), rtol=2e-2)


def test_automatic_choice(monkeypatch):
    """On CUDA the kernel, where it is installed."""

    class On(Tensor):
        is_cuda = True

    b = torch.zeros(1, 2, 3, device="meta").as_subclass(On)
    monkeypatch.setattr("glissando.mixers.liquid.scan.HAS_TRITON", True)
    assert _kernel("auto", b) == "triton"
    monkeypatch.setattr("glissando.mixers.liquid.scan.HAS_TRITON", False)
    assert _kernel("auto", b) is None


@pytest.mark.skipif(INTERPRETED, reason="it runs here")
def test_off_cuda_it_says_so():
    b, z, x0, _ = problem(2)
    with pytest.raises(ConfigError, match="needs CUDA" if HAS_TRITON else "pip install triton"):
        liquid(b, z, some_modes(), x0, backend="triton")


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="triton is not installed (or runs here already)")
@pytest.mark.parametrize("which", [pytest.param(which, marks=pytest.mark.slow) for which in ("not slow", "slow")])
def test_interpreted(which: str):
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-m", which]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
