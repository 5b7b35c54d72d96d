"""One table of tolerances by dtype, and comparisons that raise."""

from __future__ import annotations

import torch
from torch import Tensor

#: largest difference allowed, relative to the largest expected magnitude (at least 1)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}


def assert_close(got: Tensor, expected: Tensor, what: str = "", tolerance: float | None = None) -> None:
    """max |got - expected| <= tolerance(dtype) * max(1, max |expected|); a NaN on either side fails."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    bound = (TOLERANCE[expected.dtype] if tolerance is None else tolerance) * max(1.0, expected.abs().max().item())
    gap = (got.double() - expected.double()).abs().max().item()
    assert gap <= bound, f"{what}: differs by {gap:.3e}, allowed {bound:.3e}"


def assert_tensors_close(got: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """assert_close, name by name."""
    assert got.keys() == expected.keys(), f"{what}: {sorted(got.keys() ^ expected.keys())}"
    for name, tensor in expected.items():
        assert_close(got[name], tensor, f"{what} {name}")
