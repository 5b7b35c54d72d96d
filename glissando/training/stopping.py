"""Signals that ask training to end: it ends after the step in progress, with everything saved."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, Trainer

from glissando.training.budget import Budget

#: Ctrl-C; `kill`, batch systems and containers; a terminal that is closed, where there is such a signal
ASKING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopping(Callback):
    """A context in which the first of these signals asks to stop and the second ends at once.

    asked  the signal that has come; None before one has. Handlers are put back at the end, and none is touched in
           another thread than the main one.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.before: dict[signal.Signals, Any] = {}
        self.asked: signal.Signals | None = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            now = {number: signal.getsignal(number) for number in ASKING}
            # Who starts us with a signal ignored, as nohup and a shell's background jobs do, wants it ignored.
            self.before = {number: handler for number, handler in now.items() if handler not in (signal.SIG_IGN, None)}
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        # Lightning has put its own handler of SIGTERM before ours by now; it would end the run unsaved.
        if self.asked is None:
            self._listen()

    def _listen(self) -> None:
        for number in self.before:
            signal.signal(number, self._ask)

    def _put_back(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, *_: Any) -> None:
        self.asked, self.budget.asked_to_stop = signal.Signals(number), True
        self._put_back()
