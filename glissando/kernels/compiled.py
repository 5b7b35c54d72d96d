"""Kernels compiled for the CPU by Numba: when they run, what they are given, on how many threads; and torch.compile."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import numba
import numpy as np
import torch
from numba import config, njit
from numba.core.serialize import dumps
from torch import Tensor

from glissando.cache_directory import cache_dir
from glissando.errors import ConfigError, DataError, unknown_name
from glissando.kernels.plain import plain
from glissando.kernels.precise import has_float64
from glissando.version import __version__

#: fused multiply-add and reordering, but infinities and NaNs stay what they are
_FAST = {"contract", "nsz", "reassoc", "arcp"}

#: Numbers that one thread should have before a second one helps. Handing work to a thread costs more than this many
#: numbers take, as PyTorch's own idle threads keep spinning for a while.
_WORK_A_THREAD = 1 << 22

#: What was compiled of other sources, and not read for a month, is deleted.
_UNUSED_SECONDS = 30 * 24 * 3600.0

#: Looked for once: torch.compile cannot follow the search.
HAS_TRITON = find_spec("triton") is not None

#: Numba's settings, a module whose names are made when it is imported
_NUMBA: Any = config

_PARTS = {torch.complex64: np.float32, torch.complex128: np.float64}


def exact_kernel(function: Callable[..., Any]) -> Any:
    """A kernel whose operations are computed as they are written, one rounding each."""
    return kernel(function, set())


def kernel(function: Callable[..., Any], freedom: set[str] = _FAST) -> Any:
    """The function compiled at its first call, and kept on disk for the next process where that is possible.

    It is kept under $NUMBA_CACHE_DIR, or in the user's cache directory under this version's name: never in the package.
    """
    jit: Any = partial(njit, nogil=True, fastmath=freedom, error_model="numpy")
    named = _NUMBA.CACHE_DIR
    try:
        _NUMBA.CACHE_DIR = named or _kernel_directory()
        compiled, folder = jit(cache=True)(function), Path(_NUMBA.CACHE_DIR)
    except (DataError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
            raise
        _warn_once(f"{error}; kernels are compiled again in every process. Set NUMBA_CACHE_DIR to a writable folder.")
        return jit()(function)
    finally:
        _NUMBA.CACHE_DIR = named
    kept = getattr(compiled, "_cache", None)  # no such thing with NUMBA_DISABLE_JIT
    if kept is not None:
        kept._cache_file = _Compiled(folder, kept._impl.filename_base, _sources(function))
    return compiled


class _Compiled:
    """In the place of Numba's index: a file for each signature, named by a digest of all that it was compiled from.

    Numba's own goes by the path and the time of the function's file. It would compile anew for every copy of the
    package, and go on with old code where a constant or an inner kernel of another file changed. Two processes that
    save at once may also take the same number for different signatures.
    """

    def __init__(self, folder: Path, name: str, sources: str) -> None:
        self.folder, self.name = folder, name
        self._made_by = (sources, numba.__version__, np.__version__)

    def _path(self, key: object) -> Path:
        """The key has the signature, the processor, the function's bytecode and what it closes over."""
        digest = sha256(repr((self._made_by, key)).encode()).hexdigest()
        return self.folder / f"{self.name}.{digest[:32]}.nbc"

    def load(self, key: object) -> Any:
        try:
            return pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, key: object, data: object) -> None:
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{uuid4().hex}")
        temporary.write_bytes(dumps(data))
        temporary.replace(path)
        for other in self.folder.glob(f"{self.name}.*"):
            with contextlib.suppress(OSError):  # another process may delete it too
                if time.time() - other.stat().st_atime > _UNUSED_SECONDS:
                    other.unlink()


@cache
def _kernel_directory() -> str:
    """Raises DataError or OSError where nothing can be written: Numba would go on to the package's directory."""
    folder = cache_dir("kernels") / __version__
    folder.mkdir(exist_ok=True)
    TemporaryFile(dir=folder).close()
    return str(folder)


def _sources(function: Callable[..., Any]) -> str:
    """A digest of the function's file and of those with kernels beside it, in glissando/kernels and in the mixers'
    folders."""
    file = Path(function.__code__.co_filename)
    source = file.read_bytes() if file.is_file() else b""  # there are no files in an archive
    return sha256(source + _kernels_of(file.parent)).hexdigest()


@cache
def _kernels_of(folder: Path) -> bytes:
    here = Path(__file__)
    shared = {*here.parent.glob("*.py"), *here.parents[1].glob("mixers/*/numba.py")}
    digest = sha256()
    for path in (here, *sorted({*folder.glob("*.py"), *shared})):
        text = path.read_bytes() if path.is_file() else b""
        if b"@kernel\n" in text or b"# Kernels are compiled anew" in text or path == here:
            digest.update(text)
    return digest.digest()


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning)


def warn_of_the_loop(operation: str, x: Tensor) -> None:
    """Say once that an operation has no kernel where x is."""
    if not torch.compiler.is_compiling():
        _warn_once(
            f"{operation}: no kernel runs on {x.device.type} here, so that each token is one step of a Python loop, "
            "which is slow. On CUDA install Triton (pip install 'glissando[triton]'); elsewhere use the CPU."
        )


def use_numba(operation: str, backend: str, x: Tensor) -> bool:
    """`numba` and `reference` as given; `auto` is the kernel on a CPU, and plain tensor code elsewhere, where it is
    asked for, and where torch.compile looks on, which cannot see into a kernel.

    Raises UnknownNameError for another name, ConfigError for `numba` where the tensors are not on a CPU.
    """
    if backend == "auto":
        return kernels_serve(x.device) and not torch.compiler.is_compiling() and not plain()
    require_backend(operation, backend, ("auto", "numba", "reference"))
    if backend == "numba" and x.device.type != "cpu":
        raise ConfigError(f"{operation}: backend 'numba' runs on a CPU, the tensors are on {x.device}; use 'auto'")
    return backend == "numba"


def compiles() -> bool:
    """Whether Numba compiles: not where NUMBA_DISABLE_JIT is set, to debug kernels in Python."""
    return not _NUMBA.DISABLE_JIT


def kernels_serve(device: torch.device) -> bool:
    """Whether `auto` means the kernels of the CPU on this device: on a CPU that does not stand in for a device without
    float64, in which they sum."""
    return device.type == "cpu" and has_float64(device)


def require_triton(operation: str, x: Tensor) -> None:
    """Raise ConfigError unless Triton's kernels run on x: on CUDA, and anywhere by Triton's interpreter."""
    if not HAS_TRITON:
        raise ConfigError(
            f"{operation}: backend 'triton' needs Triton, which is not installed: `pip install triton` (Linux), or use "
            "backend='auto'"
        )
    if not _runs_triton(x):
        raise ConfigError(
            f"{operation}: backend 'triton' needs CUDA, the tensors are on {x.device}; backend='auto' picks what runs "
            "(on a CPU, Triton's interpreter can run it: TRITON_INTERPRET=1, set before triton is imported)"
        )


def _runs_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def require_backend(operation: str, backend: str, known: tuple[str, ...]) -> None:
    """Raise UnknownNameError unless the backend is a known one."""
    if backend not in known:
        raise unknown_name(f"{operation} backend", backend, known)


def require_shapes(operation: str, **shapes: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise ValueError unless each tensor has the shape given beside it: a kernel does not look."""
    for name, (tensor, expected) in shapes.items():
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(f"{operation}: {name} must be {tuple(expected)}, got {tuple(tensor.shape)}")


def same_reals(*tensors: Tensor) -> bool:
    """Whether all are float32, or all float64."""
    types = {tensor.dtype for tensor in tensors}
    return len(types) == 1 and types <= {torch.float32, torch.float64}


def require_types(operation: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all are float32, or all float64: what is kept over thousands of steps needs as much."""
    if not same_reals(*tensors.values()):
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"{operation}: tensors must be all float32 or all float64, got {dtypes}; use .float()")


def as_rows(tensor: Tensor, leading: int) -> Any:
    """A contiguous array with the leading dimensions kept and the features flat, complex numbers as pairs.

    It shares the tensor's memory where the tensor is contiguous already, but for a vector (`leading` 0), which may be a
    parameter: what NumPy shares cannot be resized again, and FSDP resizes parameters.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not leading:
        tensor = tensor.clone()
    if tensor.is_complex():
        array = tensor.resolve_conj().contiguous().numpy().view(_PARTS[tensor.dtype])
    else:
        array = tensor.resolve_neg().contiguous().numpy()
    if array.ndim == leading + 1:
        return array
    return array.reshape(*array.shape[:leading], math.prod(array.shape[leading:]))


def as_stored_rows(x: Tensor) -> Any:
    """x (B, T, ...) as an array (B, T, F), bfloat16 as its bits."""
    if x.dtype != torch.bfloat16:
        return as_rows(x, 2)
    return as_rows(x.detach().contiguous().view(torch.uint16), 2)


def in_batches(x: Tensor) -> Tensor:
    """(..., D) as (B, T, D), rows of which threads take several B."""
    batch = x.shape[0] if x.ndim > 2 else 1
    return x.detach().reshape(batch, math.prod(x.shape[:-1]) // max(batch, 1), x.shape[-1])


def over_rows(run: Any, like: Tensor, *arrays: Any, cost: int = 1) -> None:
    """run(*arrays, first, last) over the rows of the batch, on several threads where the work is large.

    cost    how much longer a number takes than to read it, combine it and write it
    """
    batch = like.shape[0]
    if like.numel() == 0:
        return
    threads = min(torch.get_num_threads(), batch, like.numel() * cost // _WORK_A_THREAD)
    if threads < 2:
        run(*arrays, 0, batch)
        return
    edges = [batch * i // threads for i in range(threads + 1)]
    parts = list(pairwise(edges))
    jobs = [_pool().submit(run, *arrays, first, last) for first, last in parts[1:]]
    run(*arrays, *parts[0])
    for job in jobs:
        job.result()


@cache
def _pool() -> Any:
    # Threads start when they are first needed, and how many are used may change.
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="glissando-kernel")


if hasattr(os, "register_at_fork"):
    # A forked child has the pool but not its threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def compiled_by_row_length(function: Callable[..., Any], lengths: int) -> Callable[..., Any]:
    """`function`, compiled once for each of so many row lengths at most and run as it is at others: PyTorch 2.13 fails
    to compile our models for all lengths at once."""
    import torch._dynamo

    fast = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=lengths, accumulated_recompile_limit=16 * lengths):
            return fast(*arguments)

    return call
