"""The live table of a comparison: a row a model, and under it what is being done."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

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
        self._height, self._drawn, self._status = 0, 0.0, ""

    def set(self, model: str, **cells: Any) -> None:
        """Change cells of a model's row."""
        self.rows.setdefault(model, {}).update({name: str(value) for name, value in cells.items()})
        self._draw(force=True)

    def status(self, text: str) -> None:
        """What is being done, often."""
        self._status = text
        self._draw(force=False)

    def print(self, text: str) -> None:
        """A line that stays: something is done."""
        print(text, file=self.log, flush=True)
        if not self.file.isatty():
            print(text, file=self.file, flush=True)
        self.status(text)

    def close(self) -> None:
        """Leave the finished table."""
        self._status = ""
        if self.file.isatty():
            self._draw(force=True)
        elif self.rows:
            print("\n".join(self.lines()), file=self.file, flush=True)
        self.log.close()

    def lines(self) -> list[str]:
        """The table as text, columns that hold nothing left out."""
        names = [n for n in HEADINGS if n == "model" or any(row.get(_key(n)) for row in self.rows.values())]
        cells = [
            names,
            *[[model if n == "model" else row.get(_key(n), "") for n in names] for model, row in self.rows.items()],
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
        aligned = [
            [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            for line in cells
        ]
        return ["  ".join(line).rstrip() for line in aligned]

    def _draw(self, force: bool) -> None:
        now = time.perf_counter()
        if not self.file.isatty() or (not force and now - self._drawn < 0.2):
            return
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in [*self.lines(), self._status]]
        back = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        print(back + "\n".join(lines), file=self.file, flush=True)
        self._height, self._drawn = len(lines), now


def _key(heading: str) -> str:
    return heading.replace("/", "_")


class TableProgress(Progress):
    """Shows a training in the last line of the table; its own lines and samples go to the log."""

    def __init__(self, table: Table, title: str) -> None:
        super().__init__(table.log)
        self.table, self.title = table, title

    def logged(self, loop: Loop) -> None:
        super().logged(loop)
        self.table.status(f"{self.title}: {100 * loop.budget.share:.0f} %, {self.line(loop)}")
