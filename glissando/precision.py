"""What is computed in float32 at least, whatever the model's precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def exact(values: Tensor) -> Tensor:
    """At least float32: what decays over thousands of tokens cannot be kept in 8 bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_type(device: str) -> torch.dtype | None:
    """What autocast computes in on `device`, here and now; None where it is off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: str) -> AbstractContextManager:
    """Autocast off. Entering its own context costs as much as two operations, and decoding has no use for it."""
    return nullcontext() if autocast_type(device) is None else torch.autocast(device, enabled=False)


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
