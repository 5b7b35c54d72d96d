"""Local files of text: opened with an error that helps, checked without reading them whole, read line by line."""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from glissando.errors import DataError

T = TypeVar("T")
_BLOCK = 1 << 22
_KEPT = 20  # problems


def open_files(path: Path | str | None, option: str, example: str = "*.txt") -> list[Path]:
    """The files that `path` names, in the order of their names, those with nothing in them left out.

    `path` is one file, or a pattern: corpus/*.txt, or corpus/**/*.txt with all folders below.
    Raises DataError naming `option`, and for a directory the pattern `example`, if there is no such file.
    """
    if not path:
        raise DataError(f"no file given; name one with {option} FILE")
    files = named_files(path)
    if not files or not files[0].exists():
        raise DataError(f"there is no file {path}; check {option} (the current directory is {Path.cwd()})")
    if files[0].is_dir():
        raise DataError(f"{path} is a directory; {option} takes a file, or a pattern: '{Path(path) / example}'")
    filled = [each for each in files if each.stat().st_size]
    if not filled:
        raise DataError(f"{files[0]} is empty; {option} needs a file with text in it")
    return filled


def named_files(path: Path | str) -> list[Path]:
    """The files that match the pattern `path`, in the order of their names; a path that is no pattern itself."""
    path = Path(path).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    return sorted(each for each in map(Path, set(glob.glob(str(path), recursive=True))) if each.is_file())


class TextFile(NamedTuple):
    """A file as it was when it was checked."""

    path: Path
    sha256: str
    size: int
    changed: int  # when, in ns

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open for reading. Raises DataError if it cannot be, or was not what it was when all is read."""
        try:
            with self.path.open("rb") as file:
                yield file
                stat = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more ({error.strerror}); put it back") from error
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
    decoder, digest = codecs.getincrementaldecoder("utf-8")("strict" if is_utf8 else "ignore"), hashlib.sha256()
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name} > FILE")
        file.seek(0)
        while True:
            offset, block, begun = file.tell(), file.read(_BLOCK), decoder.getstate()[0]
            if (nul := block.find(0)) >= 0:
                fault = "a NUL byte, which is reserved as the end of a document; drop it: tr -d '\\0'"
                raise _bad_byte(path, offset + nul, fault)
            try:
                if begun or not block or not block.isascii():
                    decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                fault = f"a byte that is not UTF-8 ({error.reason}); {CONVERT}"
                raise _bad_byte(path, offset - len(begun) + error.start, fault) from None
            digest.update(block)
            if not block:
                return TextFile(path, digest.hexdigest(), offset, os.fstat(file.fileno()).st_mtime_ns)


def _bad_byte(path: Path, place: int, fault: str) -> DataError:
    with path.open("rb") as file:
        blocks = (file.read(min(_BLOCK, place - start)) for start in range(0, place, _BLOCK))
        line = 1 + sum(block.count(b"\n") for block in blocks)
    return DataError(f"{path}: at byte {place}, line {line}: {fault}")


class BadLine(Exception):
    """Why a line cannot be used."""


@dataclass
class Problems:
    """The lines of `path` that could not be used: how many, and number and fault of the first 20."""

    path: Path
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        """How many, where and why the first three, in one line for a person."""
        shown = "; ".join(f"line {line}: {what}" for line, what in self.first[:3])
        lines = "1 bad line" if self.count == 1 else f"{self.count} bad lines"
        return f"{lines} skipped in {self.path} ({shown}{'; ...' if self.count > 3 else ''})"


def summary_of(files: Iterable[Problems]) -> str | None:
    """The problems of several files, each once; None if there are none."""
    return ". ".join(dict.fromkeys(map(str, files))) or None


def parsed_lines(
    file: BinaryIO, longest: int, parse: Callable[[bytes], T], problems: Problems
) -> Iterator[tuple[int, T]]:
    """What `parse` makes of each line with something in it, and the line's number from 1.

    A line that it refuses by BadLine, or of more than `longest` bytes, is counted in `problems`; the latter is never
    held in memory. The byte order mark that Windows puts before UTF-8 is no part of the first line.
    """
    for number in itertools.count(1):
        if not (line := file.readline(longest + 1)):
            return
        try:
            if len(line) > longest and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(1 << 16)
                raise BadLine(f"longer than {longest} bytes")
            if line.strip():
                yield number, parse(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
        except BadLine as bad:
            problems.count += 1
            problems.first += [(number, str(bad))] if problems.count <= _KEPT else []
