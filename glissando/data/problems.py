"""A count of the lines a reader could not use, with the first few kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)
KEPT = 20


@dataclass
class Problems:
    """What was wrong with the lines of `path`.

    They are counted, the first 20 are kept, and the first is logged. A line is counted once, however often the file is
    read.
    """

    path: Path
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)  # (line number from 1, what is wrong)
    _furthest: int = 0

    def add(self, line: int, what: str) -> None:
        """Record that `line` cannot be used because of `what`."""
        if line <= self._furthest:
            return
        self._furthest = line
        if self.count == 0:
            _log.warning("%s, line %d skipped: %s; further bad lines are only counted", self.path, line, what)
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append((line, what))

    def summary(self) -> str:
        """How many, where and why the first three, in one line for a person; empty if there were none."""
        if not self.count:
            return ""
        shown = "; ".join(f"line {line}: {what}" for line, what in self.first[:3])
        lines = "1 bad line" if self.count == 1 else f"{self.count} bad lines"
        return f"{lines} skipped in {self.path} ({shown}{'; ...' if self.count > 3 else ''})"


def summary_of(files: Iterable[Problems]) -> str | None:
    """The summaries of several files, each once; None if there were no problems."""
    return ". ".join(dict.fromkeys(file.summary() for file in files if file.count)) or None
