"""What is computed in float32 at least, whatever the model's precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
