"""Several files as one text, with an end between each two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from glissando.data.textfile import PIECE_BYTES, FileArray, pieces


class Joined:
    """(N,) bytes of `parts`, one after another, with the byte `end` between two of them; read when they are asked for.

    A slice is an array. Parts without a byte are left out, so that an end never stands at the beginning or the end.
    """

    def __init__(self, parts: Sequence[FileArray], end: int) -> None:
        self.parts, self._end = [part for part in parts if len(part)], np.array([end], np.uint8)
        stops = np.cumsum([len(part) + 1 for part in self.parts], dtype=np.int64)
        self._starts = np.append(0, stops)[: len(self.parts)]
        self._length = max(int(stops[-1]) - 1 if self.parts else 0, 0)

    def __len__(self) -> int:
        return self._length

    def part(self, start: int, stop: int | None = None) -> Joined:
        """The bytes from `start` to `stop`, which are not read yet."""
        start, stop, _ = slice(start, stop).indices(len(self))
        each = zip(self.parts, self._starts.tolist(), strict=True)
        return Joined([part.part(max(start - at, 0), max(stop - at, 0)) for part, at in each], int(self._end[0]))

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        return self.rows([start], max(stop - start, 0))[0]

    def rows(self, starts: Iterable[int], length: int) -> list[np.ndarray]:
        """The bytes start .. start + length of each start, fewer at the end."""
        firsts = np.fromiter(starts, np.int64)
        if not self.parts:
            return [self._end[:0] for _ in firsts]
        rows = [self._end] * len(firsts)
        where = np.searchsorted(self._starts, firsts, side="right") - 1
        for number in np.unique(where).tolist():
            here = np.flatnonzero(where == number).tolist()
            found = self.parts[number].rows(firsts[here] - self._starts[number], length)
            for row, data in zip(here, found, strict=True):
                rows[row] = self._continued(data, number, length)
        return rows

    def _continued(self, data: np.ndarray, number: int, length: int) -> np.ndarray:
        """`data`, which part `number` ends with, and what follows in other parts, up to `length` bytes."""
        row, missing = [data], length - len(data)
        for part in self.parts[number + 1 :]:
            if missing <= 0:
                break
            row += [self._end, part[: missing - 1]]
            missing -= 1 + len(row[-1])
        return row[0] if len(row) == 1 else np.concatenate(row)

    def pieces(self, *, ascii_only: bool = False, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
        """The text of all parts in pieces, without the ends; see `textfile.pieces`."""
        for part in self.parts:
            yield from pieces(part, ascii_only=ascii_only, piece_bytes=piece_bytes)
