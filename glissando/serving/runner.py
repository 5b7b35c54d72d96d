"""The thread that steps the engines of one process."""

from __future__ import annotations

import math
import threading
from typing import Any

#: seconds after which texts that wait for room are considered again, as some may have been given up
_LONGEST_REST = 1.0


class Runner:
    """Engines whose steps one thread takes in turn: that which calls `run`.

    lock   guards what waits in every engine; notified when a text comes
    """

    def __init__(self) -> None:
        self.lock, self.closed = threading.Condition(), False
        self.engines: list[Any] = []

    def run(self) -> None:
        """Step the engines until `close`, sleeping where there is nothing to do. However it ends, no text waits on."""
        try:
            while self._wait():
                for engine in [engine for engine in self.engines if engine.rest() <= 0]:
                    engine.step()
        finally:
            self.close()
            for engine in self.engines:
                engine.give_up()

    def _wait(self) -> bool:
        """Until an engine has something to do; False once `close` was called."""
        with self.lock:
            while not self.closed and (rest := min(engine.rest() for engine in self.engines)) > 0:
                self.lock.wait(None if rest == math.inf else min(rest, _LONGEST_REST))
                for engine in self.engines:
                    engine.idle = False  # what had no room may have it now
            return not self.closed

    def close(self) -> None:
        """`run` returns after its step; texts under way are given up, with an error for their listeners."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
