"""Large tensors on a CPU: keep freed memory in the process in place of returning it to the system each time.

glibc asks the system for every block above 32 MiB and returns it when it is freed. The system clears each page when it
is touched again, which for the activations of a long sequence costs more than computing them: the Continuous
Transformer at its published size and T = 8192 trains 3 to 4 times as fast without that (log/2026-11.md).
"""

from __future__ import annotations

import ctypes
import functools
import platform

from glissando.precision import flush_subnormals

#: glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Set this process's allocator so; True where that is possible (glibc), otherwise nothing is changed.

    It is for whoever owns the process: the verbs call it, the library never does by itself.
    """
    libc = _glibc()
    if libc is None:
        return False
    mallopt = libc.mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    answers = [mallopt(name, value) for name, value in settings]  # 1 for each that was accepted
    return all(answers)


def return_freed_memory() -> None:
    """Give the system what was freed and is kept, where that is possible (glibc): large states of texts that ended."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def prepare_to_train() -> None:
    """Keep freed memory in the process, and compute with subnormal numbers as 0.

    It is for whoever owns the process, before its first thread starts: the commands call it. The library by itself
    never keeps freed memory, and it flushes subnormal numbers only within a training. Neither changes what a model
    computes beyond numbers below the smallest normal one.
    """
    keep_freed_memory()
    flush_subnormals()
