"""Local text files: opened with an error that helps, checked without reading them whole, cut into pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from glissando.errors import DataError

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


def without_mark(line: bytes) -> bytes:
    """A file's first line without the byte order mark that Windows puts before UTF-8."""
    return line.removeprefix(codecs.BOM_UTF8)


def map_bytes(path: Path) -> np.ndarray:
    """(N,) uint8, the file memory-mapped: pages are read when they are touched."""
    # A plain view: slicing np.memmap itself costs microseconds a row.
    return np.asarray(np.memmap(path, np.uint8, "r"))


def check_text(path: Path, encoding_errors: EncodingErrors = "strict") -> None:
    """Read the file once, in blocks, and make sure that it is text.

    Raises DataError with the byte offset and line of the first NUL byte, or, when `encoding_errors` is
    "strict", of the first byte that is not UTF-8; and for UTF-16.
    """
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name} > FILE")
    decoder_errors = "strict" if encoding_errors == "strict" else "ignore"
    offset, held = 0, b""
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK)
            data = held + block
            nul = data.find(0)
            if nul >= 0:
                _refuse(
                    path, offset + nul, "a NUL byte, which is reserved as the end of a document; drop it: tr -d '\\0'"
                )
            used = _decoded_length(path, data, offset, decoder_errors, final=not block)
            offset, held = offset + used, data[used:]
            if not block:
                return


def _decoded_length(path: Path, data: bytes, offset: int, errors: str, final: bool) -> int:
    if data.isascii():
        return len(data)
    try:
        return codecs.utf_8_decode(data, errors, final)[1]
    except UnicodeDecodeError as error:
        fix = "convert it (`iconv -t UTF-8`) or give --data.encoding_errors ignore"
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


def character_start(data: np.ndarray, position: int) -> int:
    """The start of the UTF-8 character that byte `position` belongs to; the end of `data` beyond it."""
    if position >= len(data):
        return len(data)
    for offset in range(position, max(position - 4, -1), -1):
        if data[offset] & 0xC0 != 0x80:
            return offset
    return position


def pieces(data: np.ndarray, *, ascii_only: bool = False, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
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
