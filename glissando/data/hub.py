"""A data set by name, through the `datasets` library: fetched once to a checked file, then plain text."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from glissando.cache_directory import cache_dir
from glissando.data.corpora import HubOptions
from glissando.data.text import TextCorpus
from glissando.data.tokenizers import END_OF_TEXT, Tokenizer
from glissando.errors import DataError
from glissando.storage import record as digest_of
from glissando.storage import write_atomic

_log = logging.getLogger(__name__)

#: short names of data sets people ask for
KNOWN = {"tinystories": "roneneldan/TinyStories"}
_SEPARATOR = f"\n{END_OF_TEXT}\n"
_NETWORK = re.compile("connect|timeout|timedout|offline|network|nameresolution|maxretry", re.IGNORECASE)
_LOCAL = "use a local file instead: --data.kind text --data.path FILE, or --text FILE of `glissando laplacian`"


@dataclass(frozen=True)
class HubSplit:
    """One split of one data set, or one of its files, and how much of it to fetch (None: all)."""

    name: str
    split: str
    text_field: str = "text"
    subset: str | None = None
    revision: str | None = None
    max_bytes: int | None = None
    file: str | None = None

    @property
    def is_plain_text(self) -> bool:
        """Whether the rows are the lines of a text file, which has its own marks between documents."""
        return self.file is not None and ".txt" in Path(self.file).suffixes


def fetch(split: HubSplit) -> Path:
    """The split as a text file in the cache: its documents, each followed by a line `<|endoftext|>`.

    Of a file NAME.txt (`file`) the lines stand as they are, the line `<|endoftext|>` between documents included.

    A record with the file's SHA-256 lies beside it and is checked at every use; a file without a record, or
    one that has changed, is fetched again. A fetch that breaks off leaves nothing and starts anew.
    NUL characters are dropped.

    Raises DataError without the `datasets` package, without a network, or if there is no such data set,
    split or field.
    """
    split = HubSplit(**asdict(split) | {"name": KNOWN.get(split.name.lower(), split.name)})
    key = hashlib.sha256(json.dumps(asdict(split)).encode()).hexdigest()[:12]
    path = cache_dir("hub") / f"{re.sub(r'[^A-Za-z0-9]+', '-', split.name)}-{split.split}-{key}.txt"
    record = path.with_suffix(".json")
    if _is_intact(path, record):
        return path
    record.unlink(missing_ok=True)
    texts, end = texts_of(iter(open_stream(split)), split), "\n" if split.is_plain_text else _SEPARATOR
    n_texts = 0

    def write(file: BinaryIO) -> None:
        nonlocal n_texts
        for text in texts:
            n_texts += bool(text)
            if text or split.is_plain_text:
                file.write((text.replace("\0", "") + end).encode("utf-8", "ignore"))
            if split.max_bytes is not None and file.tell() >= split.max_bytes:
                break

    write_atomic(path, write)
    if not n_texts:
        path.unlink()
        raise DataError(f"{_described(split)} has no text in {split.text_field!r}")
    # Last, so that its presence means that the text is whole.
    facts = asdict(split) | {"texts": n_texts, "sha256": digest_of(path)["sha256"]}
    write_atomic(record, json.dumps(facts, indent=1).encode())
    return path


def _is_intact(path: Path, record: Path) -> bool:
    if not path.exists() or not record.exists():
        return False
    try:
        expected = json.loads(record.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        expected = None
    if path.stat().st_size and digest_of(path)["sha256"] == expected:
        return True
    _log.warning("%s does not agree with its record; fetching it again", path)
    return False


def _datasets() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"data sets by name need `datasets` ({error}): pip install -e '.[hf]' in a checkout, or {_LOCAL}"
        ) from None


def texts_of(rows: Iterator[Mapping[str, object]], split: HubSplit) -> Iterator[str]:
    """The text of each row. Raises DataError where there is none, or the rows cannot be read any further."""
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise _explained(error, split) from error
        if row is None:
            return
        text = row.get(split.text_field)
        if not isinstance(text, str):
            raise DataError(
                f"{split.name!r} has no text field {split.text_field!r}, only {', '.join(sorted(row))}; "
                "name one with --data.text_field"
            )
        yield text


def open_stream(split: HubSplit) -> Any:
    """The rows of the split, or the lines of a text file, streamed: an IterableDataset. Raises as `fetch`."""
    files = {} if split.file is None else {"data_files": {split.split: split.file}}
    try:
        return _datasets().load_dataset(
            KNOWN.get(split.name.lower(), split.name),
            split.subset,
            split=split.split,
            revision=split.revision,
            streaming=True,
            **files,
        )
    except DataError:
        raise
    except Exception as error:
        raise _explained(error, split) from error


def _explained(error: Exception, split: HubSplit) -> DataError:
    """What a failure of the library, which raises many types, means for the user."""
    what = _described(split)
    if _is_network(error):
        return DataError(f"no network: could not reach {what} ({error}); {_LOCAL}")
    return DataError(f"could not read {what} ({type(error).__name__}: {error}); check both names, or {_LOCAL}")


def _described(split: HubSplit) -> str:
    part = f"split {split.split!r}" if split.file is None else f"file {split.file!r}"
    return f"{part} of the data set {split.name!r}"


def _is_network(error: BaseException | None) -> bool:
    """Whether the error or a cause of it is of a connection."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError) or _NETWORK.search(type(error).__name__):
            return True
        error = error.__cause__ or error.__context__
    return False


class HubCorpus(TextCorpus):
    """`TextCorpus` over a data set by name ("tinystories", or "owner/name"); see `fetch`.

    `valid_split`: the held-out split; None holds out the last tenth of the training text.
    `file`, `valid_file`: files of the data set, in the place of its splits.
    `max_bytes` and `max_valid_bytes` limit how much of each split is fetched.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `HubOptions`."""
        o = HubOptions(**options)
        valid, valid_split, of_text = None, o.valid_split, (o.text_field, o.subset, o.revision)
        if o.file is not None:
            valid_split = None if o.valid_file is None else "validation"
        if valid_split is not None:
            valid = fetch(HubSplit(o.name, valid_split, *of_text, o.max_valid_bytes, o.valid_file))
        train = fetch(HubSplit(o.name, o.train_split, *of_text, o.max_bytes, o.file))
        windows = ("seq_len", "batch_size", "seed", "stride", "eval_stride", "ascii_only", "max_valid_bytes")
        super().__init__(tokenizer, path=train, valid_path=valid, **{name: getattr(o, name) for name in windows})
