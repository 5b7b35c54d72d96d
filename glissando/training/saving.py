"""Checkpoints that are written beside the training, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from glissando.errors import GlissandoError, TrainingError
from glissando.sharding import all_gathered


class Saving:
    """At most one save at a time, in a thread.

    The thread does not keep the program alive: who leaves without `wait` or `finish` may cut a save short, which is
    then absent from the disk.
    """

    def __init__(self) -> None:
        self.world_size = 1
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._step = 0

    def start(self, step: int, write: Callable[[], None]) -> None:
        """Run `write`, which saves a step, in the background; the save before has been waited for."""

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised by `wait`, in the thread that trains
                self._problem = error

        assert self._thread is None
        self._step, self._thread = step, threading.Thread(target=run, name="saving", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._problem is not None

    def wait(self) -> None:
        """Until the save in progress is complete; called by every process, and nothing happens without such a save.

        Raises TrainingError, on every process, if it failed on one.
        """
        problem = self._joined()
        reasons = all_gathered(None if problem is None else str(problem), self.world_size)
        if (reason := next((each for each in reasons if each is not None), None)) is None:
            return
        if problem is not None and not isinstance(problem, OSError | GlissandoError):
            raise problem
        raise TrainingError(f"could not save step {self._step}: {reason}") from problem

    def finish(self) -> str | None:
        """As `wait` where training has ended by an error, for this process alone; returns what went wrong besides."""
        problem = self._joined()
        return None if problem is None else f"could not save step {self._step}: {problem}"

    def _joined(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
        problem, self._thread, self._problem = self._problem, None, None
        return problem
