"""What the engines of one process share: the memory for texts, and the thread that steps them."""

from __future__ import annotations

import math
import threading
from typing import Any

from glissando.serving.session import Reservation

#: seconds after which texts that wait for room are considered again, as some may have been given up
_LONGEST_REST = 1.0


class Pool:
    """Engines that share `memory` bytes and one thread, which calls `run`.

    lock   guards what waits in every engine; notified when a text comes
    first  an engine whose next text does not fit: no other engine starts a text before it
    reservations  of answers that are not sent to their end, in the thread that calls `run`
    """

    def __init__(self, memory: int) -> None:
        self.memory, self.lock, self.closed = memory, threading.Condition(), False
        self.engines: list[Any] = []
        self.first: Any = None
        self.reservations: list[Reservation] = []

    @property
    def used(self) -> int:
        """Bytes that are taken, or promised: to texts under way, and to answers until they are sent."""
        return sum(engine.used for engine in self.engines) + sum(r.bytes for r in self.reservations if not r.released)

    def reserve(self, reservation: Reservation) -> None:
        """Count it until it is released."""
        if not reservation.taken:
            reservation.taken = True
            self.reservations = [*(r for r in self.reservations if not r.released), reservation]

    def release(self, reservation: Reservation) -> None:
        """The answer is sent, or given up. From any thread."""
        with self.lock:
            reservation.released = True
            self.lock.notify_all()

    def fits(self, more: int, work: int) -> bool:
        """Whether `more` bytes can be taken beside the largest step, which takes `work` at least. States that are only
        kept make room."""
        work = max([work, *(engine.working for engine in self.engines)])
        room = self.memory - self.used - more - work
        if room >= 0:
            excess = sum(engine.prefixes.bytes for engine in self.engines) - room
            for engine in self.engines:
                excess -= engine.prefixes.shrink(engine.prefixes.bytes - excess)
        return room >= 0

    def run(self) -> None:
        """Step the engines until `close`, sleeping where there is nothing to do. However it ends, no text waits on."""
        try:
            while self._wait():
                ready = [engine for engine in self.engines if engine.rest() <= 0]
                for engine in ready:
                    engine.step()
                if not all(engine.idle for engine in ready):
                    self._rouse()
        finally:
            self.close()
            for engine in self.engines:
                engine.give_up()

    def _wait(self) -> bool:
        """Until an engine has something to do; False once the pool is closed."""
        with self.lock:
            while not self.closed and (rest := min(engine.rest() for engine in self.engines)) > 0:
                self.lock.wait(None if rest == math.inf else min(rest, _LONGEST_REST))
                self._rouse()
            return not self.closed

    def _rouse(self) -> None:
        """What had no room may have it now."""
        for engine in self.engines:
            engine.idle = False

    def close(self) -> None:
        """`run` returns after its step; texts under way are given up, with an error for their listeners."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
