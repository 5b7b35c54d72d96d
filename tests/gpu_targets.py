"""Triton kernels compiled for GPUs that are not there: launched, they are compiled down to machine code."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
}  # fmt: skip


def compile_instead(monkeypatch: pytest.MonkeyPatch, capability: int, cache: Any) -> dict[str, list[Any]]:
    """From here on, every launch of a kernel compiles it for sm_`capability` and leaves its results unwritten.

    Returns a dict, filled as kernels are launched: name -> what was compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))  # nothing compiled before is taken for compiled now
    compiled: dict[str, list[Any]] = {}

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        names = [parameter.name for parameter in self.params]
        options = {name: value for name, value in given.items() if name not in names}
        values = inspect.signature(self.fn).bind(*args, **{n: v for n, v in given.items() if n in names}).arguments
        constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else _kind(values[name]) for name in names}
        source = ASTSource(fn=self, signature=signature, constexprs=constants)
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.setdefault(self.fn.__name__, []).append(done)

    monkeypatch.setattr(triton.JITFunction, "run", launch)
    return compiled


def _kind(value: Any) -> str:
    return f"*{_TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"
