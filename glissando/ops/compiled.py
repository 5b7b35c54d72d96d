"""Kernels compiled for the CPU by Numba: when they run, what they are given, and on how many threads."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import ConfigError, unknown_name

#: how the kernels are compiled: fused multiply-add and reordering, but infinities and NaNs stay what they are
COMPILE: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "fastmath": {"contract", "nsz", "reassoc", "arcp"},
    "error_model": "numpy",
}

#: steps that a kernel sums in the working precision before it adds them to a float64 total
RUN = 256

#: Numbers that one thread should have before a second one helps. Handing work to a thread costs more than this many
#: numbers take, as PyTorch's own idle threads keep spinning for a while.
_WORK_A_THREAD = 1 << 22

_PARTS = {torch.complex64: np.float32, torch.complex128: np.float64}


def use_numba(operation: str, backend: str, x: Tensor) -> bool:
    """`numba` and `reference` as asked; `auto` is the kernel on a CPU and plain tensor code elsewhere.

    Raises UnknownNameError for another name, ConfigError for `numba` where the tensors are not on a CPU.
    """
    if backend == "auto":
        return x.device.type == "cpu"
    if backend not in ("numba", "reference"):
        raise unknown_name(f"{operation} backend", backend, ["auto", "numba", "reference"])
    if backend == "numba" and x.device.type != "cpu":
        raise ConfigError(f"{operation}: backend 'numba' runs on a CPU, the tensors are on {x.device}; use 'auto'")
    return backend == "numba"


def as_rows(tensor: Tensor, leading: int) -> Any:
    """A contiguous array with the leading dimensions kept and the features flat, complex numbers as pairs.

    It shares the tensor's memory where the tensor is contiguous already.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        array = tensor.resolve_conj().contiguous().numpy().view(_PARTS[tensor.dtype])
    else:
        array = tensor.resolve_neg().contiguous().numpy()
    if array.ndim == leading + 1:
        return array
    return array.reshape(*array.shape[:leading], math.prod(array.shape[leading:]))


def over_rows(kernel: Any, like: Tensor, *arrays: Any) -> None:
    """kernel(*arrays, first, last) over the rows of the batch, on several threads where the work is large."""
    batch = like.shape[0]
    if like.numel() == 0:
        return
    threads = min(torch.get_num_threads(), batch, like.numel() // _WORK_A_THREAD)
    if threads < 2:
        kernel(*arrays, 0, batch)
        return
    edges = [batch * i // threads for i in range(threads + 1)]
    parts = list(pairwise(edges))
    jobs = [_pool().submit(kernel, *arrays, first, last) for first, last in parts[1:]]
    kernel(*arrays, *parts[0])
    for job in jobs:
        job.result()


@cache
def _pool() -> Any:
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), thread_name_prefix="glissando-kernel")


if hasattr(os, "register_at_fork"):
    # A forked child has the pool but not its threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_pool.cache_clear)
