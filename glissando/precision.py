"""What is computed in float32 at least, whatever the model's precision; and subnormal numbers on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def upcast(values: Tensor) -> Tensor:
    """At least float32: what decays over thousands of tokens cannot be kept in 8 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_type(device: str) -> torch.dtype | None:
    """What autocast computes in on `device`, here and now; None where it is off."""
    # Asking what is available breaks a compiled graph before PyTorch 2.13; devices that compile have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if available and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: str) -> AbstractContextManager:
    """Autocast off. Entering its own context costs as much as two operations, and decoding has no use for it."""
    return nullcontext() if autocast_type(device) is None else torch.autocast(device, enabled=False)


def flush_subnormals() -> None:
    """From now on this thread, and every thread that it starts, takes numbers below the smallest normal one (1.2e-38 in
    float32) for 0, where the processor can. Threads that PyTorch has started before keep their mode.

    A forget gate gives distant keys such weights, and a processor takes much longer for each product of them: without
    this, the backward pass of `transformer-plus-nano` takes 3.2 times as long at 4,096 tokens.
    It is for whoever owns the process: programs that train call it before their first thread starts.
    """
    torch.set_flush_denormal(True)


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """`flush_subnormals` within alone: afterwards this thread has the mode that it had before."""
    before = not torch.tensor(torch.finfo(torch.float32).tiny).mul(0.5).is_nonzero()
    flush_subnormals()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def computes_bfloat16(accelerator: str) -> bool:
    """Whether the device that Fabric's `accelerator` (auto, cpu, cuda, ...) is here computes in bfloat16 by itself."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    instructions = torch.cpu.get_capabilities()  # of processors only those with these were measured
    return accelerator in ("auto", "cpu") and any(instructions.get(name) for name in ("avx512_bf16", "amx_bf16"))


def resolved_precision(precision: Any, accelerator: str) -> Any:
    """A training's precision, where `auto` is bf16-mixed if the device computes in bfloat16, else 32-true."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if computes_bfloat16(accelerator) else "32-true"
