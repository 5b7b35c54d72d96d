"""Signals that ask training to stop: it stops after the step in progress, with everything saved."""

from __future__ import annotations

import signal
import threading
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
#: Ctrl-C; `kill`, batch systems and containers; a terminal that is closed; Slurm, before a job's time is over, where it
#: is asked to (--signal=USR1): those that this system has
ASKING = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))


class Stopping:
    """A context in which the first of these signals asks to stop and the second ends the program at once.

    asked  the signal that has come; None before one has. Handlers are put back at the end, and none is touched in
           another thread than the main one.
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self.asked: signal.Signals | None = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            now = {number: signal.getsignal(number) for number in ASKING}
            # A program that was started with a signal ignored, by nohup or in a shell's background, keeps ignoring it.
            self.before = {number: handler for number, handler in now.items() if handler not in (signal.SIG_IGN, None)}
        for number in self.before:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, *_: Any) -> None:
        self.asked = signal.Signals(number)
        self.__exit__()
