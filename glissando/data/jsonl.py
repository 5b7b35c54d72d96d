"""JSONL files as batches in the files' order, some of which are held out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from glissando.data.base import WHOLE, Batch, IndexedCorpus, Shard, Split
from glissando.data.corpora import JsonlOptions
from glissando.data.textfile import BadLine, Problems, TextFile, digested, open_files, parsed_lines, summary_of
from glissando.data.tokenizers import ByteTokenizer, Tokenizer
from glissando.data.tokens import Piece, Tokens, token_file
from glissando.errors import DataError, nearest

_log = logging.getLogger(__name__)
#: a longer line counts as malformed
MAX_LINE_BYTES = 1 << 24
#: of the held-out batches of a file, so many are scored
VALID_BATCHES = 16
_LARGEST = float(np.finfo(np.float32).max)


class Fields(NamedTuple):
    """What is read of a line."""

    text_field: str = "text"
    control_names: tuple[str, ...] = ()

    def parse(self, line: bytes) -> Piece:
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadLine(f"not UTF-8 at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise BadLine(f"not JSON ({error})") from None
        if not isinstance(record, dict):
            raise BadLine(f"a JSON {type(record).__name__}, not an object with a field {self.text_field!r}")
        return Piece(self._text(record), labels=self._labels(record) if self.control_names else None)

    def _text(self, record: dict[str, Any]) -> str:
        if self.text_field not in record:
            close = nearest(self.text_field, record)
            raise BadLine(f"no field {self.text_field!r}" + (f"; did you mean {close!r}?" if close else ""))
        text = record[self.text_field]
        if not isinstance(text, str):
            raise BadLine(f"field {self.text_field!r} is a {type(text).__name__}, not text")
        if not text:
            raise BadLine(f"field {self.text_field!r} is empty")
        if "\0" in text:
            raise BadLine("a NUL character, which is reserved as the end of a document")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise BadLine("half of a surrogate pair, which is not text")
        return text

    def _labels(self, record: dict[str, Any]) -> list[float]:
        values = record.get("control")
        names = self.control_names
        if isinstance(values, dict):
            if set(values) != set(names):
                raise BadLine(f"`control` names {sorted(values)}, not {sorted(names)}")
            values = [values[name] for name in names]
        if not isinstance(values, list) or len(values) != len(names):
            raise BadLine(f"`control` is not a list of {len(names)} numbers ({', '.join(names)})")
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) < len(names) or not all(-_LARGEST <= number <= _LARGEST for number in numbers):
            raise BadLine("`control` has a value that is not a finite number of float32")
        return [float(number) for number in numbers]


@dataclass
class JsonlSource:
    """The documents of files with an object a line."""

    files: list[TextFile]
    fields: Fields

    def key(self) -> str:
        return f"jsonl {self.fields} {' '.join(file.sha256 for file in self.files)}"

    def pieces(self, notes: list[Any]) -> Iterator[Piece]:
        """Notes of each file how many lines could not be used, and the first of them."""
        for file in self.files:
            problems = Problems(file.path)
            with file.opened() as opened:
                for _, piece in parsed_lines(opened, MAX_LINE_BYTES, self.fields.parse, problems):
                    yield piece
            notes.append([problems.count, problems.first])


class JsonlCorpus(IndexedCorpus):
    """One JSON object a line, its text in the field `text_field`, in the order of the file, whatever the seed; of
    several files, one after another in the order of their names.

    Without `control_names` documents are joined by the end token and packed: row r of the stream reads tokens
    r T .. r T + T - 1 of `eos doc eos doc ... eos`. With them a row is one document, `eos doc eos`, cut or padded to T,
    with its labels from the field `control` (a list in the order of the names, or an object by name).
    n_bytes counts a document's UTF-8 bytes, and one for its end.

    Of every 1 / `valid_fraction` batches the last goes to validation and is never trained on; the first 16 of those are
    the held-out set. With `valid_path` all of `path` trains, and all of that
    validates. At its end the stream starts again at the top, just as before: what is left over below a
    whole batch is dropped, so that the same batches are held out in every epoch.

    A line that cannot be used is counted in `problems`.
    Raises DataError if a file cannot be read or there is too little to train or validate on.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `JsonlOptions`."""
        o = JsonlOptions(**options)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size, self.control_names = o.seq_len, o.batch_size, tuple(o.control_names)
        fields = Fields(o.text_field, self.control_names)

        def source(path: str | None, option: str) -> JsonlSource:
            return JsonlSource([digested(file) for file in open_files(path, option, "*.jsonl")], fields)

        self._sources: dict[Split, JsonlSource] = {"train": source(o.path, "data.path")}
        self._sources["valid"] = source(o.valid_path, "data.valid_path") if o.valid_path else self._sources["train"]
        self._tokens: dict[Split, Tokens] = {}
        self._paths = Path(str(o.path)).expanduser(), Path(str(o.valid_path or o.path)).expanduser()
        self._every = 0 if o.valid_path else round(1 / o.valid_fraction)

    def _converted(self, split: Split) -> Tokens:
        tokens = self._tokens[split] = token_file(self._sources[split], self.tokenizer)
        for problems in self._problems(split):
            _log.warning("%s", problems)
        return tokens

    @cached_property
    def _train(self) -> Tokens:
        n_batches = self._n_batches(self._converted("train"))
        self._require(n_batches > 0, "train")
        self._require(n_batches >= self._every, "validate")
        return self._tokens["train"]

    @cached_property
    def _valid(self) -> Tokens:
        if self._every:
            return self._train
        self._require(len(self._converted("valid")) > 1, "validate")
        return self._tokens["valid"]

    def _require(self, enough: bool, purpose: Literal["train", "validate"]) -> None:
        if not enough:
            every = f" (every {self._every}th is held out)" if self._every else ""
            raise DataError(
                f"{self._paths[purpose == 'validate']} contains too little to {purpose} on: not one batch of "
                f"{self.batch_size} rows of {self.seq_len} tokens{every}. "
                f"Lower batch_size or seq_len, raise valid_fraction or give a valid_path. {self.problems or ''}".strip()
            )

    def _n_batches(self, tokens: Tokens) -> int:
        """Whole ones."""
        n_rows = len(tokens.labels) if self.control_names else (len(tokens) - 1) // self.seq_len
        return n_rows // self.batch_size

    @property
    def epoch_rows(self) -> int:
        """The rows of all whole batches that are not held out."""
        n_batches = self._n_batches(self._train)
        return self.batch_size * (n_batches - (n_batches // self._every if self._every else 0))

    def _problems(self, split: Split) -> list[Problems]:
        notes = zip(self._sources[split].files, self._tokens[split].notes, strict=True)
        return [Problems(file.path, *note) for file, note in notes if note[0]]

    @property
    def problems(self) -> str | None:
        """The unusable lines of what is converted so far."""
        return summary_of(problems for split in self._tokens for problems in self._problems(split))

    def _train_batch(self, step: int, rows: np.ndarray) -> Batch:
        _ = self._valid  # what is missing in it is found before training begins
        number = step % (self.epoch_rows // self.batch_size)
        block = number + number // (self._every - 1) if self._every else number
        return self._batch(self._train, block * self.batch_size + rows)

    def lanes(self, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Lane r of R begins at row N r / R of the N that train, and reads on in a circle; fresh behind held-out rows,
        and where the files begin. Labelled documents come in the order of the files, whatever their lane."""
        return self._endless(self._train_batch if self.control_names else self._lane_batch, start, shard)

    def _lane_batch(self, step: int, lanes: np.ndarray) -> Batch:
        _ = self._valid
        number, part = self.epoch_rows, self.batch_size * (self._every - 1)
        place = (step + lanes * number // self.batch_size) % number
        rows = place + place // part * self.batch_size if self._every else place
        begins = (place % part if self._every else place) == 0
        return self._batch(self._train, rows)._replace(fresh=torch.from_numpy(begins))

    def _n_valid(self) -> int:
        if self._every:
            return min(VALID_BATCHES, self._n_batches(self._valid) // self._every) * self.batch_size
        return len(self._valid.labels) if self.control_names else -(-(len(self._valid) - 1) // self.seq_len)

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        size = self.batch_size
        return self._batch(self._valid, rows + (rows // size + 1) * (self._every - 1) * size if self._every else rows)

    def _batch(self, tokens: Tokens, rows: np.ndarray) -> Batch:
        if not self.control_names:
            return tokens.batch(rows * self.seq_len, self.seq_len)
        return tokens.batch(
            tokens.ends[rows], self.seq_len, stop=tokens.ends[rows + 1] + 1, labels=tokens.labels[rows].copy()
        )

    def texts(self, split: Split = "train") -> Iterator[str]:
        """The documents, held-out ones among them where they are held out by batches."""
        return (piece.text for piece in self._sources[split].pieces([]))
