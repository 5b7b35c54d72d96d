"""Local text files: opened with an error that helps, checked without reading them whole, cut into pieces."""

from __future__ import annotations

import codecs
import contextlib
import copy
import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt

from glissando.errors import DataError
from glissando.storage import record

EncodingErrors = Literal["strict", "ignore"]
_BLOCK = 1 << 22
PIECE_BYTES = 1 << 16


def open_file(path: Path | str | None, option: str) -> Path:
    """`path` if it is a file with something in it.

    Raises DataError naming `option` if it is not given, missing, a directory or empty.
    """
    if not path:
        raise DataError(f"no file given; name one with {option} FILE")
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a directory; {option} takes one file (join several with `cat`)")
    if not path.exists():
        raise DataError(f"there is no file {path}; check {option} (the current directory is {Path.cwd()})")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; {option} needs a file with text in it")
    return path


def open_files(path: Path | str | None, option: str, example: str) -> list[Path]:
    """The files that `path` names, in the order of their names, those with nothing in them left out.

    `path` is one file, or a pattern: corpus/*.txt, or corpus/**/*.txt with all folders below.
    Raises DataError naming `option`, and for a directory the pattern `example`, if there is no such file.
    """
    if path and Path(path).expanduser().is_dir():
        raise DataError(f"{path} is a directory; {option} takes a file, or a pattern: '{Path(path) / example}'")
    found = named_files(path) if path else []
    if not found and path:
        raise DataError(f"no file matches {path}; check {option} (the current directory is {Path.cwd()})")
    filled = [each for each in found if not each.is_file() or each.stat().st_size]
    # The first stands for all where none has a text, so that the error names it.
    return [open_file(each, option) for each in filled or found[:1]] or [open_file(path, option)]


def named_files(path: Path | str) -> list[Path]:
    """The files that match the pattern `path`, in the order of their names; a path that is no pattern itself."""
    path = Path(path).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(each for each in map(Path, set(glob.glob(str(path), recursive=True))) if each.is_file())


def without_mark(line: bytes) -> bytes:
    """A file's first line without the byte order mark that Windows puts before UTF-8."""
    return line.removeprefix(codecs.BOM_UTF8)


class FileArray:
    """(N,) numbers of a file, or of a part of it, read when they are asked for; a slice is an array.

    A memory map would end the process where the file is truncated, and go on silently where it is written to.
    Each read raises DataError if the file is not what it was when this was made: its inode, size and times tell, and
    where they differ its SHA-256 decides, if that is known.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike = np.uint8, digest: str | None = None, tail: int = 0) -> None:
        """`digest`: the file's SHA-256; `tail`: bytes at its end that are no numbers."""
        self._file, self._dtype = Unchanging(path, digest), np.dtype(dtype)
        self._start, self._stop = 0, (self._file.seen[1] - tail) // self._dtype.itemsize

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int | None = None) -> FileArray:
        """The numbers from `start` to `stop`, which are not read yet."""
        part, (start, stop, _) = copy.copy(self), slice(start, stop).indices(len(self))
        part._start, part._stop = self._start + start, self._start + max(start, stop)
        return part

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        return self.rows([start], max(stop - start, 0))[0]

    def rows(self, starts: Iterable[int], length: int) -> list[np.ndarray]:
        """The numbers start .. start + length of each start, fewer at the end."""
        rows, size = [], self._dtype.itemsize
        with self._file.opened() as file:
            for start in starts:
                first = self._start + int(start)
                file.seek(first * size)
                data = file.read(max(min(first + length, self._stop) - first, 0) * size)
                rows.append(np.frombuffer(data[: len(data) // size * size], self._dtype))
        return rows

    def sha256(self) -> str:
        """Of its bytes."""
        digest = hashlib.sha256()
        for start in range(0, len(self), _BLOCK):
            digest.update(self[start : start + _BLOCK].tobytes())
        return digest.hexdigest()


class Unchanging:
    """A file that has to stay what it is; `seen`: inode, size and times."""

    def __init__(self, path: Path, digest: str | None = None) -> None:
        self.path, self.seen = path, _signature(os.stat(path))
        self._digest = digest

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open for reading; what was read is good once the context has ended without an error."""
        try:
            with open(self.path, "rb") as file:
                yield file
                self.check(file)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more ({error.strerror}); put it back") from error

    def check(self, file: BinaryIO) -> None:
        """Raises DataError if the open file is not what it was."""
        now = _signature(os.fstat(file.fileno()))
        if now == self.seen:
            return
        if now[1] != self.seen[1] or record(self.path)["sha256"] != self._digest:
            raise DataError(
                f"{self.path} has changed while it was in use: it had {self.seen[1]:,} bytes and has {now[1]:,} now. "
                "Restore it and resume from the last checkpoint, or start a new training on the changed file"
            )
        self.seen = now  # touched, or replaced by the same text


def _signature(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


#: what to do about a file that is not UTF-8, for errors
DROP_BYTES = "convert it (`iconv -t UTF-8`) or give --data.encoding_errors ignore"


def check_text(path: Path, encoding_errors: EncodingErrors = "strict", fix: str = DROP_BYTES) -> str:
    """Read the file once, in blocks, and make sure that it is text; returns its SHA-256.

    Raises DataError with the byte offset and line of the first NUL byte, or, when `encoding_errors` is
    "strict", of the first byte that is not UTF-8, for which it advises `fix`; and for UTF-16.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name} > FILE")
    decoder_errors = "strict" if encoding_errors == "strict" else "ignore"
    offset, held, digest = 0, b"", hashlib.sha256()
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            digest.update(block)
            data = held + block
            nul = data.find(0)
            if nul >= 0:
                _refuse(
                    path, offset + nul, "a NUL byte, which is reserved as the end of a document; drop it: tr -d '\\0'"
                )
            used = _decoded_length(path, data, offset, decoder_errors, not block, fix)
            offset, held = offset + used, data[used:]
            if not block:
                return digest.hexdigest()


def _decoded_length(path: Path, data: bytes, offset: int, errors: str, final: bool, fix: str) -> int:
    if data.isascii():
        return len(data)
    try:
        return codecs.utf_8_decode(data, errors, final)[1]
    except UnicodeDecodeError as error:
        _refuse(path, offset + error.start, f"a byte that is not UTF-8 ({error.reason}); {fix}")
        raise


def _refuse(path: Path, offset: int, what: str) -> None:
    raise DataError(f"{path}: at byte {offset}, line {line_number(path, offset)}: {what}")


def line_number(path: Path, offset: int) -> int:
    """The line, counted from 1, that holds byte `offset`."""
    line, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            line, left = line + block.count(b"\n"), left - len(block)
    return line


class ByteArray(Protocol):
    """(N,) bytes, of which a slice is an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> np.ndarray: ...


def character_start(data: ByteArray, position: int) -> int:
    """The start of the UTF-8 character that byte `position` belongs to; the end of `data` beyond it."""
    if position >= len(data):
        return len(data)
    first = max(position - 3, 0)
    starts = np.flatnonzero(data[first : position + 1] & 0xC0 != 0x80)
    return first + int(starts[-1]) if starts.size else position


def pieces(data: ByteArray, *, ascii_only: bool = False, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """UTF-8 bytes as strings of about `piece_bytes`, cut after a newline where there is one.

    Bytes that are not UTF-8 are left out, and with `ascii_only` all others than ASCII.
    """
    start = 0
    while start < len(data):
        raw = data[start : start + piece_bytes].tobytes()
        if start + len(raw) < len(data):
            newline = raw.rfind(b"\n") + 1
            raw = raw[: newline or character_start(data, start + piece_bytes) - start]
        start += len(raw)
        yield raw.decode("ascii" if ascii_only else "utf-8", "ignore")
