"""The CPU stands in for a device without float64, such as Apple's GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glissando.kernels import precise


@contextmanager
def standing_in(device_type: str) -> Iterator[None]:
    """Devices of this type count as without float64 meanwhile, in every thread."""
    with mock.patch.object(precise, "_WITHOUT", {*precise._WITHOUT, device_type}):
        yield


@contextmanager
def no_float64() -> Iterator[None]:
    """Operations take the forms for such devices, Numba's kernels, which sum in float64, do not run, and PyTorch raises
    TypeError for any tensor of float64 or complex128."""
    with standing_in("cpu"), _Float64Raises():
        yield


class _Float64Raises(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            dtype = each.dtype if isinstance(each, Tensor) else each
            if dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func}: {dtype} on a device that stands in for one without float64")
        return result
