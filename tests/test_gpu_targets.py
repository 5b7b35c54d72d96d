"""Every Triton kernel compiles to machine code for an A100 (sm_80) and an H100 (sm_90), without such a card."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from gpu_targets import compile_instead
from test_liquid_ops import problem, some_modes

from glissando.kernels.scan import scan
from glissando.mixers.liquid.scan import Modes, liquid
from glissando.mixers.tau.attention import tau_attention

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)


def run_liquid(dtype: torch.dtype = torch.float32, is_even: bool = True, is_complex: bool = False) -> None:
    b, z, x0, dt = (v.to(dtype) for v in problem(70, 40, 2, is_complex))
    z.requires_grad_()
    modes = Modes(*(w.to(dtype) for w in some_modes(40) if w is not None))
    x = liquid(b, z, modes, x0, None if is_even else dt, not is_even, "triton")
    torch.autograd.grad(x.sum(), z)


def run_liquid_in_other_forms() -> None:
    run_liquid(torch.float64)
    run_liquid(is_even=False, is_complex=True)


def run_scan() -> None:
    for dtype in (torch.float32, torch.complex64):
        a, x = torch.ones(2, 300, 40, dtype=dtype, requires_grad=True), torch.ones(2, 300, 40, dtype=dtype)
        torch.autograd.grad(scan(a, x, backend="triton")[0].abs().sum(), a)


def run_tau() -> None:
    for width, dtype in ((64, torch.float32), (256, torch.bfloat16)):
        q, k, v = torch.ones(1, 2, 100, requires_grad=True), torch.ones(1, 2, 100), torch.ones(1, 2, 100, width)
        torch.autograd.grad(tau_attention(q, k, v.to(dtype), 0.1, backend="triton").sum(), q)


LIQUID = {"_forward", "_backward"}
CASES = [
    pytest.param(run_liquid, LIQUID, 90, id="liquid, H100"),
    *(
        pytest.param(run, kernels, capability, id=f"{run.__name__}, sm_{capability}",
                     marks=pytest.mark.slow)
        for capability in (80, 90)
        for run, kernels in (
            (run_liquid_in_other_forms, LIQUID),
            (run_scan, {"_summarise", "_forward", "_backward"}),
            (run_tau, {"_forward", "_over_keys", "_over_queries"}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("run", "kernels", "capability"), CASES)
def test_compiles(monkeypatch, tmp_path, run, kernels, capability):
    monkeypatch.setattr("glissando.kernels.compiled._runs_triton", lambda _: True)
    compiled = compile_instead(monkeypatch, capability, tmp_path)
    run()
    assert set(compiled) == kernels
    for kernel in (one for several in compiled.values() for one in several):
        assert f"sm_{capability}" in kernel.asm["ptx"]
        assert kernel.asm["cubin"][:4] == b"\x7fELF"
