"""A data set by name, read over the network as training goes, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glissando.data.corpora import HubStreamOptions
from glissando.data.document_corpus import DocumentCorpus
from glissando.data.documents import TOP, Document, Place, Source
from glissando.data.hub import HubSplit, open_stream, texts_of
from glissando.data.tokenizers import Tokenizer
from glissando.errors import DataError


class HubDocuments:
    """The texts of a split in its order, from the row at `first` on until they have `split.max_bytes` UTF-8 bytes.

    A place is the bytes before, a row's number and that of the data set's file, so that reading from a place skips rows
    of that one file alone. Rows without text are passed over, and NUL characters are dropped.
    """

    def __init__(self, split: HubSplit, first: Place = TOP) -> None:
        self.split, self.first = split, first

    def read(self, place: Place = TOP) -> Iterator[Document]:
        """Documents from `place` on. Raises DataError where the data set cannot be read."""
        place = max(place, self.first)
        end = None if self.split.max_bytes is None else self.first.offset + self.split.max_bytes
        stream, offset = open_stream(self.split), place.offset
        for file in range(place.file, stream.num_shards):
            rows, line = stream.shard(stream.num_shards, file), place.line if file == place.file else 1
            for number, raw in enumerate(texts_of(iter(rows.skip(line - 1)), self.split), line):
                text = raw.replace("\0", "").encode("utf-8", "ignore")
                if text:
                    if end is not None and offset >= end:
                        return
                    yield Document(Place(offset, number, file), text.decode())
                    offset += len(text)


class _Kept:
    """Documents in memory."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents

    def read(self, place: Place = TOP) -> Iterator[Document]:
        return (document for document in self.documents if document.place >= place)


class HubStreamCorpus(DocumentCorpus):
    """Packed documents (see `DocumentCorpus`) of a data set by name, in its order; nothing but held-out text is kept.

    Held out are the first `max_valid_bytes` of `valid_split`, or without one of `train_split`, and training begins
    with the next document. At its end, or after `max_bytes`, the stream starts again.
    Resuming starts at the last of at most 1,024 places known before the step; rows before it in the same file of the
    data set are read and passed over. Every process reads the whole stream.

    Raises DataError without the `datasets` package, without a network, or if there is no such data set, split or field.
    """

    _advice = "Lower batch_size, seq_len or max_valid_bytes."

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `HubStreamOptions`. The order is the data set's, whatever the seed."""
        o = HubStreamOptions(**options)
        super().__init__(o, tokenizer)
        described = (o.text_field, o.subset, o.revision)
        held_out = HubDocuments(HubSplit(o.name, o.valid_split or o.train_split, *described, o.max_valid_bytes))
        kept = list(held_out.read())
        if not kept:
            raise DataError(
                f"{o.name!r} has no text in {o.text_field!r} to validate on; name another --data.valid_split"
            )
        first = TOP
        if o.valid_split is None:
            last = kept[-1]
            after = last.place.offset + len(last.text.encode())
            first = last.place._replace(offset=after, line=last.place.line + 1)
        train: Source = HubDocuments(HubSplit(o.name, o.train_split, *described, o.max_bytes), first)
        self._described = {
            "name": o.name,
            "subset": o.subset,
            "revision": o.revision,
            "valid_bytes": held_out.split.max_bytes,
        }
        key = f"hub {o.name} {described} {o.train_split} {o.max_bytes} {first}"
        self._read(f"the data set {o.name!r}", train, _Kept(kept), key, 0, 0)

    def describe(self) -> dict[str, object]:
        return super().describe() | self._described
