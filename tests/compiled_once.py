"""Two processes of the tests compile no kernel at once: the second waits, and loads what the first has saved."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from glissando.kernels.compiled import _Compiled

#: more than any kernel takes; one that cannot be compiled is never saved
PATIENCE = 60.0
_load, _save = _Compiled.load, _Compiled.save
#: of the kernels that this process compiles; the system lets go of those of a process that ends
_locks: dict[Path, int] = {}


def load(self: _Compiled, key: object) -> Any:
    path = self._path(key)
    if not path.exists() and path not in _locks:
        lock, until = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR), time.monotonic() + PATIENCE
        while time.monotonic() < until and not path.exists():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                if not path.exists():
                    _locks[path] = lock
                    return None
        os.close(lock)
    return _load(self, key)


def save(self: _Compiled, key: object, data: object) -> None:
    _save(self, key, data)
    path = self._path(key)
    if path in _locks:
        path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(_locks.pop(path))


def share_compiled_kernels() -> None:
    """Replace how kernels are read and kept, for those that are imported already too."""
    _Compiled.load, _Compiled.save = load, save  # type: ignore[method-assign]
