"""What a command does before its first work: it imports packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python's cyclic garbage collector pauses: it would look through all imported modules dozens of times, a tenth of
    the start, and find nothing. What was imported is not looked through later either, until `gc.unfreeze`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
