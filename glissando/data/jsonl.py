"""JSONL files as an endless, unshuffled stream of batches, some of which are routed to validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glissando.data.corpora import JsonlOptions
from glissando.data.document_corpus import DocumentCorpus
from glissando.data.documents import DocumentFiles, Documents
from glissando.data.marks import key_of
from glissando.data.problems import summary_of
from glissando.data.textfile import open_files
from glissando.data.tokenizers import Tokenizer


class JsonlCorpus(DocumentCorpus):
    """One JSON object a line, its text in the field `text_field`, in the order of the file; of several files, one
    after another in the order of their names.

    Packed, or with `control_names` a document a row, as of `DocumentCorpus`; labels are in `control_field` (a list in
    the order of the names, or an object by name).

    Of every `route_every` batches the last goes to validation and is never trained on; the first
    `valid_batches` of those are the held-out set. With `valid_path` all of `path` trains, and all of that
    validates. At its end the stream starts again at the top, just as before: what is left over below a
    whole batch is dropped, so that the same batches are held out in every epoch.

    `strict`: a line that cannot be used raises DataError; otherwise it is counted in `problems`.
    Raises DataError if a file cannot be read or there is too little to train or validate on.
    """

    _advice = "Lower batch_size, seq_len or route_every, or give a valid_path."

    def __init__(self, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """By the keywords of `JsonlOptions`. The order is the files', whatever the seed."""
        o = JsonlOptions(**options)
        super().__init__(o, tokenizer, tuple(o.control_names))
        fields = (o.text_field, o.control_field, self.control_names, o.strict, o.max_line_bytes)

        def documents(path: str | None, option: str) -> DocumentFiles:
            return DocumentFiles([Documents(each, *fields) for each in open_files(path, option, "*.jsonl")])

        train = documents(o.path, "data.path")
        valid = documents(o.valid_path, "data.valid_path") if o.valid_path else None
        self._files = [*train.files, *(valid.files if valid else ())]
        self._paths = Path(str(o.path)).expanduser(), Path(str(o.valid_path or o.path)).expanduser()
        marks = key_of([each.path for each in train.files], str(fields))
        self._read(str(self._paths[0]), train, valid, marks, o.route_every, o.valid_batches)

    @property
    def problems(self) -> str | None:
        """The unusable lines met so far."""
        return summary_of(each.problems for each in self._files)

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "path": str(self._paths[0]),
            "valid_path": str(self._paths[1]),
            "held_out": f"batch {self._route_every} of every {self._route_every}"
            if self._route_every
            else "valid_path",
            "problems": self.problems,
        }
