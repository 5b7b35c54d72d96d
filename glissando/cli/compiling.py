"""What is printed while kernels are compiled."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def announced_compilation() -> Iterator[None]:
    """Say on stderr that the decoding step is being compiled, if a kernel is that was not found in the cache and takes
    over two seconds."""
    from numba.core import event

    message = "compiling the decoding step, once on this machine: about half a minute"
    notice = threading.Timer(2.0, lambda: print(message, file=sys.stderr, flush=True))
    notice.daemon = True

    class Compilation(event.Listener):
        def on_start(self, _: Any) -> None:
            if notice.ident is None:
                gc.enable()  # compiling leaves garbage, where loading a kernel leaves none
                notice.start()

        def on_end(self, _: Any) -> None:
            pass

    with event.install_listener("numba:compile", Compilation()):
        try:
            yield
        finally:
            notice.cancel()
