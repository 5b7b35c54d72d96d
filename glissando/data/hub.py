"""Data sets by name, through the `datasets` library: fetched once to a checked text file, or streamed."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glissando.cache_directory import cache_dir
from glissando.data.base import WHOLE, Batch, Corpus, Shard, Split, held_out_batches, shard_rows
from glissando.data.corpora import DataSetOptions, HubOptions, HubStreamOptions, is_file
from glissando.data.text import TextCorpus
from glissando.data.tokenizers import END_OF_TEXT, ByteTokenizer, Tokenizer
from glissando.data.tokens import Piece, in_memory
from glissando.errors import ConfigError, DataError
from glissando.storage import kept

#: short names of data sets people ask for
KNOWN = {"tinystories": "roneneldan/TinyStories"}
_SEPARATOR = f"\n{END_OF_TEXT}\n"
_LOCAL = "use a local file instead: --data.kind text --data.path FILE, or --text FILE of `glissando laplacian`"
_TEXT = "text.txt"
_CHUNK = 1 << 16  # characters of a stream that are tokenised at once, or about a batch if that is more


@dataclass(frozen=True)
class HubSplit:
    """One split of one data set, or one of its files, and how much of it to fetch (None: all)."""

    name: str
    split: str
    text_field: str = "text"
    subset: str | None = None
    revision: str | None = None
    max_bytes: int | None = None

    def texts(self, skipped: int = 0) -> Iterator[str]:
        """The text of each row from the row `skipped` on, NUL characters dropped.

        Raises DataError without the `datasets` package, without a network, or if there is no such data set, split or
        field.
        """
        files: dict[str, Any] = {"data_files": {"train": self.split}} if is_file(self.split) else {}
        try:
            stream = importlib.import_module("datasets").load_dataset(
                KNOWN.get(self.name.lower(), self.name),
                self.subset,
                split="train" if files else self.split,
                revision=self.revision,
                streaming=True,
                **files,
            )
            for row in stream.skip(skipped) if skipped else stream:
                text = row.get(self.text_field)
                if not isinstance(text, str):
                    raise DataError(
                        f"{self.name!r} has no text field {self.text_field!r}, only {', '.join(sorted(row))}; "
                        "name one with --data.text_field"
                    )
                yield text.replace("\0", "").encode("utf-8", "ignore").decode()
        except DataError:
            raise
        except ImportError as error:
            raise DataError(
                f"data sets by name need `datasets` ({error}): pip install -e '.[hf]' in a checkout, or {_LOCAL}"
            ) from None
        except Exception as error:  # the library raises many types
            raise DataError(
                f"could not read {'file' if files else 'split'} {self.split!r} of the data set {self.name!r} "
                f"({type(error).__name__}: {error}); check both names and the network, or {_LOCAL}"
            ) from error


def part(o: DataSetOptions, split: str, max_bytes: int | None = None) -> HubSplit:
    return HubSplit(o.name, split, o.text_field, o.subset, o.revision, max_bytes)


def fetch(split: HubSplit) -> Path:
    """The split as a text file in the cache: its documents, each followed by a line `<|endoftext|>`.

    Of a file NAME.txt the lines stand as they are, the line `<|endoftext|>` between documents included.

    It is checked at every use, and fetched again where it has changed; a fetch that breaks off leaves nothing.
    Raises DataError as `HubSplit.texts`, and where there is no text.
    """
    is_plain = is_file(split.split) and ".txt" in Path(split.split).suffixes
    end = "\n" if is_plain else _SEPARATOR

    def fill(folder: Path) -> None:
        n_texts = 0
        with (folder / _TEXT).open("wb") as file:
            for text in split.texts():
                n_texts += bool(text)
                if text or is_plain:
                    file.write((text + end).encode())
                if split.max_bytes is not None and file.tell() >= split.max_bytes:
                    break
        if not n_texts:
            raise DataError(f"split {split.split!r} of the data set {split.name!r} has no text in {split.text_field!r}")

    key = hashlib.sha256(json.dumps(asdict(split)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{split.name} {split.split} {key}")
    return kept(cache_dir("hub") / name, fill) / _TEXT


class HubCorpus(TextCorpus):
    """`TextCorpus` over a data set by name ("tinystories", or "owner/name"); see `fetch`.

    `valid_split`: the held-out split or file; None holds out the last tenth of the training text.
    `max_bytes` and `max_valid_bytes` limit how much of each is fetched.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `HubOptions`."""
        o = HubOptions(**options)
        valid = None if o.valid_split is None else fetch(part(o, o.valid_split, o.max_valid_bytes))
        train = fetch(part(o, o.train_split, o.max_bytes))
        windows = ("seq_len", "batch_size", "seed", "stride", "ascii_only", "max_valid_bytes")
        super().__init__(tokenizer, path=train, valid_path=valid, **{name: getattr(o, name) for name in windows})


class HubStreamCorpus(Corpus):
    """Packed documents of a data set by name, in its order, read over the network as training goes.

    Documents are joined by the end token: a row reads T tokens of `eos doc eos doc ... eos`, and the next row goes on
    there. Held out are the first `max_valid_bytes` of `valid_split`, which are kept in memory, or without one of
    `train_split`, and training begins with the next document. At its end, or after `max_bytes`, the stream starts
    again.

    Resuming is approximate: a stream begins with a row of the data set, and as many rows are passed over as the
    held-out documents' mean length makes of the steps done. Every process reads the whole stream.

    Raises DataError as `HubSplit.texts`, and where there is too little text.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `HubStreamOptions`. The order is the data set's, whatever the seed."""
        o = HubStreamOptions(**options)
        self.tokenizer, self.seq_len, self.batch_size = tokenizer or ByteTokenizer(), o.seq_len, o.batch_size
        self._split, self._max_bytes = part(o, o.train_split), o.max_bytes
        self._held_out, n_bytes, n_rows = list[str](), 0, 0
        for text in (part(o, o.valid_split) if o.valid_split else self._split).texts():
            if n_bytes >= o.max_valid_bytes:
                break
            self._held_out += [text] if text else []
            n_bytes, n_rows = n_bytes + len(text.encode()), n_rows + 1
        if not self._held_out:
            raise DataError(
                f"{o.name!r} has no text in {o.text_field!r} to validate on; name another --data.valid_split"
            )
        self._first_row = 0 if o.valid_split else n_rows
        self._valid = in_memory(map(Piece, self._held_out), self.tokenizer)
        self._rows_a_token = n_rows / len(self._valid)

    def batches(self, split: Split, *, start: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        if split != "train":
            return held_out_batches(
                -(-(len(self._valid) - 1) // self.seq_len), self.batch_size, start, shard, self._valid_batch
            )
        return (batch for (batch,) in self.steps(start, [shard]))

    def steps(self, start: int, shards: Sequence[Shard], in_lanes: bool = False) -> Iterator[list[Batch]]:
        """As of every corpus; the stream is read once for all shards. Raises ConfigError for lanes: for them the stream
        would be read once for each row of a batch."""
        if in_lanes:
            raise ConfigError(
                "training.carry goes on with a text in every row of the batch, and a stream over a network is read "
                "once for all of them: fetch the data set with --data.kind hub, or leave training.carry out"
            )
        length, n_tokens = self.seq_len, self.batch_size * self.seq_len
        offsets = [np.array(shard_rows(self.batch_size, shard)) * length for shard in shards]
        waiting, used, fresh = list[str](), 0, 0  # documents, the first one's tokens that are used, new characters
        for text in self._endless(int(start * n_tokens * self._rows_a_token)):
            waiting.append(text)
            fresh += len(text)
            if fresh < max(_CHUNK, 4 * n_tokens):
                continue
            tokens, fresh = in_memory(map(Piece, waiting), self.tokenizer), 0
            while used + n_tokens < len(tokens):
                yield [tokens.batch(used + first, length) for first in offsets]
                used += n_tokens
            first = int(np.searchsorted(tokens.ends, used, side="right")) - 1
            waiting, used = waiting[first:], used - int(tokens.ends[first])

    def _endless(self, skipped: int) -> Iterator[str]:
        """The training documents, again and again; the first time without the first `skipped` rows."""
        while True:
            n_bytes = 0
            for text in self._split.texts(self._first_row + skipped):
                if text:
                    yield text
                    n_bytes += len(text.encode())
                if self._max_bytes is not None and n_bytes >= self._max_bytes:
                    break
            if not n_bytes and not skipped:
                raise DataError(
                    f"the data set {self._split.name!r} contains no text to train on behind what is held out; lower "
                    "max_valid_bytes"
                )
            skipped = 0

    def _valid_batch(self, rows: np.ndarray) -> Batch:
        return self._valid.batch(rows * self.seq_len, self.seq_len)

    def texts(self, split: Split = "train") -> Iterator[str]:
        """The documents, endless for "train"."""
        return self._endless(0) if split == "train" else iter(self._held_out)
