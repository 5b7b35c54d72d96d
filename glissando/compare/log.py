"""What a comparison shows while it works: lines on stderr, and all that training prints in a file."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from glissando.progress import QUIET_SECONDS
from glissando.training.loop import Loop
from glissando.training.progress import Progress

#: in the comparison's directory: trainings stop once it is there, which they look for every so many seconds
STOP, EVERY = ".stop", 0.5


class Log:
    """Lines to `file`, stderr by default, and to compare.log in the comparison's directory, `kept`."""

    def __init__(self, out: Path, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.kept = (out / "compare.log").open("a", encoding="utf-8")
        self._printed, self._looked, self._stop = time.perf_counter(), 0.0, out / STOP

    def print(self, text: str) -> None:
        """A line: something is done."""
        self._show("")
        for file in (self.kept, self.file):
            print(text, file=file, flush=True)
        self._printed = time.perf_counter()

    def status(self, text: str) -> None:
        """What is being done, often: in place on a terminal, else a line where nothing was printed for a while."""
        if self.file.isatty():
            self._show(text)
        elif time.perf_counter() - self._printed >= QUIET_SECONDS:
            self.print(text)

    def _show(self, text: str) -> None:
        """In the place of what was shown last, where there is a terminal."""
        if self.file.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=self.file, flush=True)

    def stop_asked(self) -> bool:
        """Whether trainings shall stop without a signal to their own process."""
        if time.monotonic() - self._looked <= EVERY:
            return False
        self._looked = time.monotonic()
        return self._stop.exists()

    def close(self) -> None:
        self.kept.close()


class JobProgress(Progress):
    """Shows how far a training is; its own lines and samples go to the file."""

    def __init__(self, log: Log, title: str) -> None:
        super().__init__(log.kept)
        self.log, self.title = log, title

    def after_step(self, loop: Loop) -> None:
        """Stop as a signal would make it, with everything saved."""
        if self.log.stop_asked():
            loop.stopping.asked = signal.SIGINT
            loop.ask_to_stop()

    def validating(self, loop: Loop) -> None:
        self.log.status(f"{self.title}: validating, {self.line(loop)}")

    def logged(self, loop: Loop) -> None:
        super().logged(loop)
        self.log.status(f"{self.title}: {100 * loop.budget.share:.0f} %, {self.line(loop)}")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
