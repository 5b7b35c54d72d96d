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

from glissando.progress import QUIET_SECONDS
from glissando.training.loop import Loop
from glissando.training.progress import Progress

LOG = "compare.log"
HEADINGS = ("model", "parameters", "rate", "sweep", "runs", "probes", "bits/byte", "state")


class Table:
    """Redrawn in place on a terminal; elsewhere each finished step is a line, and the table comes at the end.

    What training prints meanwhile goes to `log`, a file in the comparison's directory.
    """

    def __init__(self, out: Path, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.rows: dict[str, dict[str, str]] = {}
        self.log = (out / LOG).open("a", encoding="utf-8")
        self._height, self._drawn, self._status, self._printed = 0, 0.0, "", time.perf_counter()

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


class JobProgress(Progress):
    """Shows a training in the last line of the table; its own lines and samples go to the log."""

    def __init__(self, table: Table, title: str, model: str | None) -> None:
        """`model` names the row that has the validations' bits per byte; none has them if None."""
        super().__init__(table.log)
        self.table, self.title, self.model = table, title, model
        self._warnings = deque[str]()  # of the thread that saves; the table belongs to the one that trains

    def warning(self, line: str) -> None:
        self._warnings.append(line)

    def _show_warnings(self) -> None:
        while self._warnings:
            self.table.print(f"{self.title}: {self._warnings.popleft()}", stays=True)

    def after_step(self, loop: Loop) -> None:
        """Stop as a signal would make it, with everything saved."""
        self._show_warnings()
        if self.table.stop_asked():
            loop.stopping.asked = signal.SIGINT
            loop.ask_to_stop()

    def logged(self, loop: Loop) -> None:
        super().logged(loop)
        self.table.status(f"{self.title}: {100 * loop.budget.share:.0f} %, {self.line(loop)}")
        if self.model is not None and loop.validated_step == loop.state.step:
            self.table.set(self.model, bits_byte=f"{loop.validation['valid_bits_per_byte']:.4f}")

    def close(self) -> None:
        super().close()
        self._show_warnings()
