"""The live table of a comparison: a row a model, the best first, and under it what is being done."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from glissando.data.base import Batch
from glissando.progress import QUIET_SECONDS
from glissando.training.loop import Loop
from glissando.training.progress import Progress
from glissando.training.stopping import Stopping

LOG = "compare.log"
HEADINGS = ("model", "parameters", "rate", "sweep", "runs", "probes", "bits/byte", "state")
#: a training that reads at less than this share of an earlier speed is slow
_SLOW = 0.5


class Table:
    """Redrawn in place on a terminal; elsewhere each finished step is a line, and the table comes at the end.

    What training prints meanwhile goes to `log`, a file in the comparison's directory.
    """

    def __init__(self, out: Path, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.rows: dict[str, dict[str, str]] = {}
        self.log = (out / LOG).open("a", encoding="utf-8")
        self._height, self._drawn, self._status, self._printed = 0, 0.0, "", time.perf_counter()
        self._fastest: dict[str, float] = {}

    def set(self, model: str, **cells: object) -> None:
        """Change cells of a model's row."""
        self.rows.setdefault(model, {}).update({name: str(value) for name, value in cells.items()})
        self._draw(force=True)

    def status(self, text: str) -> None:
        """What is being done, often; without a terminal a line of it where nothing has been printed for a while."""
        self._status = text
        if not self.file.isatty() and time.perf_counter() - self._printed >= QUIET_SECONDS:
            self._line(text)
        self._draw(force=False)

    def print(self, text: str, stays: bool = False) -> None:
        """A line: something is done. On a terminal, which has the table, the next one replaces it if not `stays`."""
        print(text, file=self.log, flush=True)
        if not self.file.isatty():
            self._line(text)
        elif stays:
            self._clear()
            self._line(text)
        self.status("" if stays else text)

    def speed(self, model: str, training: str, tokens_per_second: float) -> None:
        """Take note of how fast a model has just read in a kind of training; a warning where it was faster before."""
        fastest = self._fastest.get(training, 0.0)
        self._fastest[training] = max(fastest, tokens_per_second)
        if tokens_per_second < _SLOW * fastest:
            self.print(
                f"warning: {model} reads {tokens_per_second:,.0f} tokens/s, and {fastest:,.0f} before: the machine is "
                "busy, so the time of this training does not show the speed of the model",
                stays=True,
            )

    def stop_asked(self) -> bool:
        """Whether trainings shall stop without a signal to their own process: here never."""
        return False

    def close(self, show: bool = True) -> None:
        """Leave the finished table, or nothing."""
        self._status = ""
        if self.file.isatty():
            self._draw(force=True) if show else self._clear()
        elif self.rows and show:
            print("\n".join(self.lines()), file=self.file, flush=True)
        self.log.close()

    def ranked(self) -> list[str]:
        """The models, that of the fewest bits per byte first; those without a figure last."""
        return sorted(self.rows, key=lambda model: float(self.rows[model].get("bits_byte") or math.inf))

    def lines(self) -> list[str]:
        """The table as text, columns that hold nothing left out."""
        names = [n for n in HEADINGS if n == "model" or any(row.get(_key(n)) for row in self.rows.values())]
        ranked = [(model, self.rows[model]) for model in self.ranked()]
        cells = [names, *[[model if n == "model" else row.get(_key(n), "") for n in names] for model, row in ranked]]
        widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
        aligned = [
            [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            for line in cells
        ]
        return ["  ".join(line).rstrip() for line in aligned]

    def _line(self, text: str) -> None:
        print(text, file=self.file, flush=True)
        self._printed = time.perf_counter()

    def _clear(self) -> None:
        if self._height:
            print(f"\x1b[{self._height}F\x1b[J", end="", file=self.file, flush=True)
        self._height = 0

    def _draw(self, force: bool) -> None:
        now = time.perf_counter()
        if not self.file.isatty() or (not force and now - self._drawn < 0.2):
            return
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in [*self.lines(), self._status]]
        self._clear()
        print("\n".join(lines), file=self.file, flush=True)
        self._height, self._drawn = len(lines), now


def _key(heading: str) -> str:
    return heading.replace("/", "_")


class TurnOver(Exception):
    """A training that has come to the end of its turn before its first step."""


class Turn(Progress):
    """Shows a training in the last line of the table, and stops it once `until` of its budget is spent; its own lines
    and samples go to the log.

    speed     tokens/s of its steps; None before the first
    stopping  what asks it to stop from outside; None before the first step
    """

    def __init__(self, table: Table, title: str, model: str | None, until: float = 1.0) -> None:
        """`model` names the row that has the validations' bits per byte; none has them if None."""
        super().__init__(table.log)
        self.table, self.title, self.model, self.until = table, title, model, until
        self.speed: float | None = None
        self.stopping: Stopping | None = None
        self._warnings = deque[str]()  # of the thread that saves; the table belongs to the one that trains

    def warning(self, line: str) -> None:
        self._warnings.append(line)

    def _show_warnings(self) -> None:
        while self._warnings:
            self.table.print(f"{self.title}: {self._warnings.popleft()}", stays=True)

    def before_step(self, loop: Loop, batches: list[Batch]) -> None:
        super().before_step(loop, batches)
        self.stopping = loop.stopping
        if loop.budget.share >= self.until:
            raise TurnOver

    def after_step(self, loop: Loop) -> None:
        """Stop as a signal would make it, with everything saved."""
        self._show_warnings()
        self.speed = (loop.state.tokens - self.first_tokens) / max(loop.clock.working(), 1e-9)
        if self.table.stop_asked():
            loop.budget.asked, loop.stopping.asked = True, signal.SIGINT
        if loop.budget.share >= self.until:
            loop.budget.asked = True

    def logged(self, loop: Loop) -> None:
        super().logged(loop)
        self.table.status(f"{self.title}: {100 * loop.budget.share:.0f} %, {self.line(loop)}")
        if self.model is not None and loop.validated_step == loop.state.step:
            self.table.set(self.model, bits_byte=f"{loop.validation['valid_bits_per_byte']:.4f}")

    def close(self) -> None:
        super().close()
        self._show_warnings()
