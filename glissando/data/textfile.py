"""Local text files: opened with an error that helps, checked without reading them whole, cut into pieces."""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from glissando.errors import DataError

_BLOCK = 1 << 22


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
    files = named_files(path) if path else []
    if not files and path:
        raise DataError(f"no file matches {path}; check {option} (the current directory is {Path.cwd()})")
    filled = [each for each in files if not each.is_file() or each.stat().st_size]
    # The first stands for all where none has a text, so that the error names it.
    return [open_file(each, option) for each in filled or files[:1]] or [open_file(path, option)]


def named_files(path: Path | str) -> list[Path]:
    """The files that match the pattern `path`, in the order of their names; a path that is no pattern itself."""
    path = Path(path).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(each for each in map(Path, set(glob.glob(str(path), recursive=True))) if each.is_file())


def without_mark(line: bytes) -> bytes:
    """A file's first line without the byte order mark that Windows puts before UTF-8."""
    return line.removeprefix(codecs.BOM_UTF8)


def bounded_lines(file: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """Each line; None for one of more bytes than `longest`, which is never held in memory."""
    while line := file.readline(longest + 1):
        too_long = len(line) > longest and not line.endswith(b"\n")
        while too_long and line and not line.endswith(b"\n"):
            line = file.readline(1 << 16)
        yield None if too_long else line


class TextFile(NamedTuple):
    """A file as it was when it was checked."""

    path: Path
    sha256: str
    size: int
    changed: int  # when, in ns

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open for reading. Raises DataError if it is not what it was, before or after."""
        try:
            with self.path.open("rb") as file:
                self._require_unchanged(file)
                yield file
                self._require_unchanged(file)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more ({error.strerror}); put it back") from error

    def _require_unchanged(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.changed):
            raise DataError(
                f"{self.path} has changed while it was read: it had {self.size:,} bytes and has {stat.st_size:,} now. "
                "Wait until it is complete, and start again"
            )


def digested(path: Path) -> TextFile:
    """The file as it is."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return TextFile(path, digest, file.tell(), os.fstat(file.fileno()).st_mtime_ns)


#: what to do about a file that is not UTF-8, for errors
CONVERT = "convert it, such as by `iconv -f LATIN1 -t UTF-8`"


def check_text(path: Path, is_utf8: bool = True) -> TextFile:
    """Read the file once, in blocks, and make sure that it is text.

    Raises DataError with the byte offset and line of the first NUL byte, or, where it `is_utf8`, of the first byte
    that is not; and for UTF-16.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name} > FILE")
    errors = "strict" if is_utf8 else "ignore"
    offset, tail, digest = 0, b"", hashlib.sha256()
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            digest.update(block)
            data = tail + block
            nul = data.find(0)
            if nul >= 0:
                _refuse(
                    path, offset + nul, "a NUL byte, which is reserved as the end of a document; drop it: tr -d '\\0'"
                )
            used = _decoded_length(path, data, offset, errors, not block)
            offset, tail = offset + used, data[used:]
            if not block:
                stat = os.fstat(file.fileno())
                return TextFile(path, digest.hexdigest(), offset, stat.st_mtime_ns)


def _decoded_length(path: Path, data: bytes, offset: int, errors: str, final: bool) -> int:
    if data.isascii():
        return len(data)
    try:
        return codecs.utf_8_decode(data, errors, final)[1]
    except UnicodeDecodeError as error:
        _refuse(path, offset + error.start, f"a byte that is not UTF-8 ({error.reason}); {CONVERT}")
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
