"""Where blocks begin in a long stream, kept across processes so that resuming need not read it again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_right
from pathlib import Path

from glissando.cache_directory import cache_dir
from glissando.data.cache import sealed, unsealed
from glissando.data.documents import Place
from glissando.data.packing import Mark
from glissando.errors import DataError, RunError
from glissando.storage import write_atomic

EVERY = 128  # blocks between marks


class Marks:
    """Some blocks' beginnings and, once the end was seen, how many blocks there are.

    Kept in the cache directory under the file's path, size and time and `layout` (all that decides what a
    block is). They only save time: without them, or where they cannot be written, the stream is read again.
    """

    def __init__(self, path: Path, layout: str) -> None:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {layout}"
        self._marks = [Mark()]
        self.n_blocks: int | None = None
        self._file: Path | None = None
        with contextlib.suppress(DataError):
            self._file = cache_dir("marks") / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
            self._load(self._file)

    def before(self, block: int) -> Mark:
        """The last known mark at or before `block`."""
        return self._marks[bisect_right(self._marks, block, key=lambda mark: mark.block) - 1]

    def passed(self, mark: Mark) -> None:
        """Remember the beginning of one block in every 128."""
        if mark.block % EVERY == 0 and mark.block > self._marks[-1].block:
            self._marks.append(mark)
            self._save()

    def ended(self, n_blocks: int) -> None:
        """Remember how many blocks the whole stream has."""
        if self.n_blocks is None:
            self.n_blocks = n_blocks
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        marks = [[mark.block, *mark.place, mark.token] for mark in self._marks]
        with contextlib.suppress(RunError):
            write_atomic(self._file, sealed(json.dumps({"n_blocks": self.n_blocks, "marks": marks}).encode()))

    def _load(self, file: Path) -> None:
        # A file that is damaged, or of another version, is no loss: the marks are found again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(unsealed(file) or b"")
            marks = [Mark(block, Place(offset, line), token) for block, offset, line, token in saved["marks"]]
            self._marks, self.n_blocks = marks or [Mark()], saved["n_blocks"]
