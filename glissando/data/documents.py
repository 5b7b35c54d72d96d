"""Documents of JSONL files, read line by line with a bound on memory, each with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from glissando.data.problems import Problems
from glissando.data.textfile import Unchanging, without_mark
from glissando.errors import nearest


class Place(NamedTuple):
    """Where a line starts."""

    offset: int = 0  # bytes
    line: int = 1
    file: int = 0  # its number, where there are several


TOP = Place()
_LARGEST = float(np.finfo(np.float32).max)


class Document(NamedTuple):
    """The text of one line, and its labels if there are any."""

    place: Place
    text: str
    control: list[float] | None = None


class Source(Protocol):
    """Where documents come from."""

    def read(self, place: Place = TOP) -> Iterator[Document]:
        """Usable documents from `place` on; the same at every call."""


class _BadLine(Exception):
    """Why a line cannot be used."""


@dataclass
class Documents:
    """The documents of `path`: an object a line, the text in `text_field`.

    With `control_names`, the labels are in `control_field`: a list in that order, or an object by name.
    Raises DataError at the first line that cannot be used if `strict`; otherwise counts it in `problems`.
    Raises DataError where the file is no longer what it was when this was made.
    A line of more than `max_line_bytes` is never held in memory. Blank lines are passed over.
    """

    path: Path
    text_field: str = "text"
    control_field: str = "control"
    control_names: tuple[str, ...] = ()
    strict: bool = False
    max_line_bytes: int = 1 << 24
    problems: Problems = field(init=False)

    def __post_init__(self) -> None:
        self._file = Unchanging(self.path)
        self.problems = Problems(self.path, "data.strict", self.strict)

    def read(self, place: Place = TOP) -> Iterator[Document]:
        """Usable documents from the line at `place` on."""
        for at, line in self._lines(place):
            try:
                if line is None:
                    raise _BadLine(f"longer than {self.max_line_bytes} bytes (max_line_bytes)")
                if line.strip():
                    yield Document(at, *self._parse(line))
            except _BadLine as bad:
                self.problems.add(at.line, str(bad))

    def _lines(self, place: Place) -> Iterator[tuple[Place, bytes | None]]:
        """Each line with its place; None for one that is too long."""
        with self._file.opened() as file:
            file.seek(place.offset)
            number = place.line
            while True:
                at = Place(file.tell(), number, place.file)
                line = file.readline(self.max_line_bytes + 1)
                self._file.check(file)
                if not line:
                    return
                too_long = len(line) > self.max_line_bytes and not line.endswith(b"\n")
                while too_long and line and not line.endswith(b"\n"):
                    line = file.readline(1 << 16)
                yield at, None if too_long else line if at.offset else without_mark(line)
                number += 1

    def _parse(self, line: bytes) -> tuple[str, list[float] | None]:
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _BadLine(f"not UTF-8 at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise _BadLine(f"not JSON ({error})") from None
        if not isinstance(record, dict):
            raise _BadLine(f"a JSON {type(record).__name__}, not an object with a field {self.text_field!r}")
        return self._text(record), self._control(record) if self.control_names else None

    def _text(self, record: dict[str, Any]) -> str:
        if self.text_field not in record:
            close = nearest(self.text_field, record)
            raise _BadLine(f"no field {self.text_field!r}" + (f"; did you mean {close!r}?" if close else ""))
        text = record[self.text_field]
        if not isinstance(text, str):
            raise _BadLine(f"field {self.text_field!r} is a {type(text).__name__}, not text")
        if not text:
            raise _BadLine(f"field {self.text_field!r} is empty")
        if "\0" in text:
            raise _BadLine("a NUL character, which is reserved as the end of a document")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise _BadLine("half of a surrogate pair, which is not text")
        return text

    def _control(self, record: dict[str, Any]) -> list[float]:
        values = record.get(self.control_field)
        names = self.control_names
        if isinstance(values, dict):
            if set(values) != set(names):
                raise _BadLine(f"{self.control_field!r} names {sorted(values)}, not {sorted(names)}")
            values = [values[name] for name in names]
        if not isinstance(values, list) or len(values) != len(names):
            raise _BadLine(f"{self.control_field!r} is not a list of {len(names)} numbers ({', '.join(names)})")
        if not all(_is_number(value) for value in values):
            raise _BadLine(f"{self.control_field!r} has a value that is not a finite number of float32")
        return [float(value) for value in values]


class DocumentFiles:
    """The documents of several files, one file after another."""

    def __init__(self, files: Sequence[Documents]) -> None:
        self.files = files

    def read(self, place: Place = TOP) -> Iterator[Document]:
        """Usable documents from the line at `place` on."""
        for number in range(place.file, len(self.files)):
            yield from self.files[number].read(place if number == place.file else Place(file=number))


def _is_number(value: object) -> bool:
    """Whether it is one that float32 has, NaN and infinity left out."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
