"""Where blocks begin in a long stream, kept across processes so that resuming need not read it again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from glissando.cache_directory import cache_dir
from glissando.data.cache import sealed, unsealed
from glissando.data.documents import Place
from glissando.data.packing import Mark
from glissando.errors import DataError, RunError
from glissando.storage import write_atomic

EVERY = 128  # blocks between marks at first
MOST = 1024  # marks that are kept: of more than these every second is dropped


class Marks:
    """Some blocks' beginnings and, once the end was seen, how many blocks there are.

    Kept in the cache directory under `key` (all that decides what a block is). They only save time: without them, or
    where they cannot be written, the stream is read again. At most 1,024 are kept, at even distances.
    """

    def __init__(self, key: str) -> None:
        self._marks, self._every = [Mark()], EVERY
        self.n_blocks: int | None = None
        self._file: Path | None = None
        with contextlib.suppress(DataError):
            self._file = cache_dir("marks") / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
            self._load(self._file)

    def before(self, block: int) -> Mark:
        """The last known mark at or before `block`."""
        return self._marks[bisect_right(self._marks, block, key=lambda mark: mark.block) - 1]

    def passed(self, mark: Mark) -> None:
        """Remember the beginning of a block, if it is far enough behind the last one remembered."""
        if mark.block % self._every == 0 and mark.block > self._marks[-1].block:
            self._marks.append(mark)
            if len(self._marks) > MOST:
                self._every *= 2
                self._marks = [mark for mark in self._marks if mark.block % self._every == 0]
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
            saved = {"n_blocks": self.n_blocks, "every": self._every, "marks": marks}
            write_atomic(self._file, sealed(json.dumps(saved).encode()))

    def _load(self, file: Path) -> None:
        # A file that is damaged, or of another version, is no loss: the marks are found again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(unsealed(file) or b"")
            marks = [Mark(block, Place(*place), token) for block, *place, token in saved["marks"]]
            self._every, self._marks, self.n_blocks = saved["every"], marks or [Mark()], saved["n_blocks"]


def key_of(files: Sequence[Path], layout: str) -> str:
    """Files by their paths, sizes and times, and `layout`."""
    stats = ((path.resolve(), path.stat()) for path in files)
    return " ".join([*(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats), layout])
