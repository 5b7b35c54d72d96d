"""Which way an operation is computed: by a kernel compiled for the CPU, or by plain tensor code."""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.errors import ConfigError, unknown_name

#: numbers below which calling a kernel costs more than a handful of tensor operations: decoding, mostly
_SMALL = 1 << 14


def use_numba(operation: str, backend: str, x: Tensor) -> bool:
    """`numba` and `reference` as asked; `auto` is the kernel on a CPU, unless x is small and needs no gradient.

    Raises UnknownNameError for another name, ConfigError for `numba` where the tensors are not on a CPU.
    """
    if backend == "auto":
        return x.device.type == "cpu" and (torch.is_grad_enabled() or x.numel() >= _SMALL)
    if backend not in ("numba", "reference"):
        raise unknown_name(f"{operation} backend", backend, ["auto", "numba", "reference"])
    if backend == "numba" and x.device.type != "cpu":
        raise ConfigError(f"{operation}: backend 'numba' runs on a CPU, the tensors are on {x.device}; use 'auto'")
    return backend == "numba"
