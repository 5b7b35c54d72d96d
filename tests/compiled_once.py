"""Two processes of the tests compile no kernel at once: the second waits, and loads what the first has saved."""

from __future__ import annotations

import fcntl
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from glissando.kernels.compiled import _Compiled

_compile = Dispatcher.compile


def compile_alone(self: Dispatcher, signature: object) -> Any:
    """What `Dispatcher.compile` does, which loads what there is; kernels within a kernel are locked after it."""
    kept = getattr(self._cache, "_cache_file", None)
    if not isinstance(kept, _Compiled):
        return _compile(self, signature)
    with global_compiler_lock, (kept.folder / f"{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _compile(self, signature)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too


def share_compiled_kernels() -> None:
    """Replace how kernels are compiled, for those that are imported already too."""
    Dispatcher.compile = compile_alone  # type: ignore[method-assign]
