"""Every corpus by name, with its typed options.

A new corpus is its file, an options class here with a field in `DataConfig`, and a line in `CORPORA`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glissando.config import used_with
from glissando.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.data.tokenizers import Tokenizer

#: as much text as a tokenizer is trained on
TOKENIZER_TEXT_BYTES = 1 << 24


@dataclass
class TokenizerConfig:
    """How text becomes ids. `data.tokenizer: gpt2` is short for its kind, and a path for a file's.

    kind        bytes; bpe; gpt2, whose vocabulary is fetched once; file
    vocab_size  for bpe, which is trained on the corpus
    path        for file: a tokenizer.json
    eos         for file: the token that ends a document, where its name is unusual
    """

    kind: Literal["bytes", "bpe", "gpt2", "file"] = "bytes"
    vocab_size: int = 4096
    path: str | None = None
    eos: str | None = None

    @staticmethod
    def from_text(text: str) -> dict[str, str]:
        """The options that `data.tokenizer: TEXT` stands for. Raises UnknownNameError if it is no kind and no file."""
        if text in _KINDS:
            return {"kind": text}
        if not text.endswith(".json") and not Path(text).exists():
            raise unknown_name("tokenizer", text, [*_KINDS, "path/to/tokenizer.json"])
        return {"kind": "file", "path": text}


_KINDS = ("bytes", "bpe", "gpt2")


@dataclass
class StoriesOptions:
    """The built-in children's stories, whose entropy is known exactly.

    labelled  one story a row, with its mood and other labels
    cut       rows of at most seq_len tokens, held out too, stories cut where rows end: for models of a limited length;
              the entropy floor is that of whole stories, which such rows cannot reach
    """

    valid_stories: int = 256
    labelled: bool = False
    cut: bool = False


@dataclass
class TextOptions:
    """A local text file.

    valid_path   a file to validate on; without it the end of `path` is
    stride       tokens between training windows; none: random windows
    eval_stride  tokens between validation windows; none: seq_len
    ascii_only   drop every other byte
    """

    path: str | None = None
    valid_path: str | None = None
    valid_fraction: float = 0.1
    stride: int | None = None
    eval_stride: int | None = None
    ascii_only: bool = False
    max_valid_bytes: int | None = None
    encoding_errors: Literal["strict", "ignore"] = "strict"


@dataclass
class JsonlOptions:
    """A JSONL file, read in its order.

    valid_path     a file to validate on; without it every route_every-th batch is
    control_names  names the labels; then a row is one document
    strict         stop at a bad line rather than count it
    """

    path: str | None = None
    valid_path: str | None = None
    text_field: str = "text"
    control_field: str = "control"
    control_names: list[str] = field(default_factory=list)
    route_every: int = 20
    valid_batches: int = 16
    strict: bool = False
    max_line_bytes: int = 1 << 24


@dataclass
class ShiftOptions:
    """Generated pairs: printable characters moved by `by` places, or random answers.

    train_pairs   none: never the same twice
    fixed_length  pad to seq_len rather than to the longest row
    """

    by: int = 1
    min_len: int = 4
    max_len: int = 12
    rule: Literal["shift", "random"] = "shift"
    train_pairs: int | None = None
    valid_pairs: int = 512
    fixed_length: bool = False


@dataclass
class PairsOptions:
    """A file of pairs, one base64 text `input TAB output` a line."""

    path: str | None = None
    valid_path: str | None = None
    strict: bool = False
    fixed_length: bool = False


@dataclass
class RecallOptions:
    """Generated keys with their values, and then the keys again: what was the value of each?

    pairs    keys, at most 47
    queries  how many of them are asked for; none: all
    """

    pairs: int = 16
    queries: int | None = None
    valid_rows: int = 256


@dataclass
class ParityOptions:
    """Generated bits, with the parity so far to be said after each.

    min_len, max_len  bits of a row
    valid_len         bits of a held-out row; none: as in training
    """

    min_len: int = 1
    max_len: int = 40
    valid_len: int | None = None
    valid_rows: int = 256


@dataclass
class TrackingOptions:
    """Generated moves of things in a row, with their arrangement to be said after each.

    items             how many things, 2 to 5
    min_len, max_len  moves of a row
    valid_len         moves of a held-out row; none: as in training
    """

    items: int = 3
    min_len: int = 1
    max_len: int = 40
    valid_len: int | None = None
    valid_rows: int = 256


@dataclass
class CopyOptions:
    """Generated symbols, a long blank, and then the symbols in their order.

    symbols  how many there are to remember
    delay    characters between the last symbol and the first answer
    """

    symbols: int = 10
    delay: int = 100
    valid_rows: int = 256


@dataclass
class SelectiveCopyOptions:
    """Generated symbols scattered over noise, and then the symbols in their order.

    symbols  how many there are to remember
    length   characters over which they are scattered
    """

    symbols: int = 16
    length: int = 128
    valid_rows: int = 256


@dataclass
class InductionOptions:
    """Generated random symbols with a mark among them: which symbol stood behind the mark?

    length     characters of a row
    valid_len  characters of a held-out row; none: as in training
    """

    length: int = 128
    valid_len: int | None = None
    valid_rows: int = 256


@dataclass
class HubOptions:
    """A data set by name, fetched once through the `datasets` package.

    file        one of its files to train on rather than a split: TinyStoriesV2-GPT4-train.txt
    valid_file  one to validate on; without it the end of `file` is
    max_bytes   how much of the training split or file to fetch
    """

    name: str = "tinystories"
    subset: str | None = None
    revision: str | None = None
    text_field: str = "text"
    train_split: str = used_with("train", file=None)
    valid_split: str | None = used_with("validation", file=None)
    file: str | None = None
    valid_file: str | None = None
    max_bytes: int | None = None
    max_valid_bytes: int | None = None
    stride: int | None = None
    eval_stride: int | None = None
    ascii_only: bool = False


@dataclass
class DataConfig:
    """What to train on. Only the options of the chosen corpus are used.

    batch_size  rows of a global batch, over all processes
    """

    corpus: str = "stories"
    seq_len: int = 256
    batch_size: int = 32
    seed: int = 0
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    stories: StoriesOptions = field(default_factory=StoriesOptions)
    text: TextOptions = field(default_factory=TextOptions)
    jsonl: JsonlOptions = field(default_factory=JsonlOptions)
    shift: ShiftOptions = field(default_factory=ShiftOptions)
    pairs: PairsOptions = field(default_factory=PairsOptions)
    recall: RecallOptions = field(default_factory=RecallOptions)
    parity: ParityOptions = field(default_factory=ParityOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    copy: CopyOptions = field(default_factory=CopyOptions)
    selective_copy: SelectiveCopyOptions = field(default_factory=SelectiveCopyOptions)
    induction: InductionOptions = field(default_factory=InductionOptions)
    hub: HubOptions = field(default_factory=HubOptions)


@dataclass(frozen=True)
class CorpusEntry:
    """A corpus; its class takes the options in the `DataConfig` field of its name as keywords.

    cls       "module:class", imported when the corpus is built
    byte_eos  the byte that ends a document
    """

    about: str
    cls: str
    byte_eos: int = 0

    def load(self) -> Callable[..., Corpus]:
        module, _, name = self.cls.partition(":")
        return getattr(importlib.import_module(f"glissando.data.{module}"), name)


_NEWLINE = 10
CORPORA: dict[str, CorpusEntry] = {
    "stories": CorpusEntry("built-in stories of known entropy, no download", "stories:StoriesCorpus", _NEWLINE),
    "text": CorpusEntry("any local text file", "text:TextCorpus"),
    "jsonl": CorpusEntry("a JSONL file, streamed in order, with labels if it has them", "jsonl:JsonlCorpus"),
    "shift": CorpusEntry("generated pairs: every character shifted by k", "pairs:ShiftCorpus", _NEWLINE),
    "pairs": CorpusEntry("input/output pairs from a base64 file", "pairs:PairFileCorpus", _NEWLINE),
    "recall": CorpusEntry("generated memory task: the values of keys", "tasks:RecallCorpus", _NEWLINE),
    "parity": CorpusEntry("generated memory task: the parity of bits", "automata:ParityCorpus", _NEWLINE),
    "tracking": CorpusEntry("generated memory task: things moved in a row", "automata:TrackingCorpus", _NEWLINE),
    "copy": CorpusEntry("generated memory task: symbols behind a long blank", "copying:CopyCorpus", _NEWLINE),
    "selective_copy": CorpusEntry(
        "generated memory task: symbols picked out of noise", "copying:SelectiveCopyCorpus", _NEWLINE
    ),
    "induction": CorpusEntry("generated memory task: what stood behind the mark", "copying:InductionCorpus", _NEWLINE),
    "hub": CorpusEntry("a data set by name, such as tinystories", "hub:HubCorpus"),
}


def build_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus that `config` describes, read with `tokenizer` (default: the one `config` describes).

    Raises UnknownNameError for an unknown corpus, ConfigError and DataError for what its options ask for.
    """
    _require_known(config)
    if tokenizer is None:
        tokenizer = build_tokenizer(config)
    return _construct(config, tokenizer)


def _require_known(config: DataConfig) -> None:
    if config.corpus not in CORPORA:
        raise unknown_name("corpus", config.corpus, CORPORA)


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` describes; "bpe" reads at most the first 16 MiB of the training text.

    Raises ConfigError for options of another kind of tokenizer.
    """
    from glissando.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe

    _require_known(config)
    wanted = config.tokenizer
    _require_meaning(wanted)
    as_bytes = ByteTokenizer(CORPORA[config.corpus].byte_eos)
    if wanted.kind == "bytes":
        return as_bytes
    if wanted.kind == "bpe":
        texts = _construct(config, as_bytes).texts("train")
        return train_bpe(_limited(texts, TOKENIZER_TEXT_BYTES), wanted.vocab_size)
    if wanted.kind == "gpt2":
        from glissando.data.gpt2 import gpt2

        return gpt2()
    if wanted.kind == "file":
        if not wanted.path:
            raise ConfigError("tokenizer kind 'file' needs data.tokenizer.path, a tokenizer.json")
        return load_tokenizer(wanted.path, wanted.eos)
    raise unknown_name("tokenizer kind", wanted.kind, [*_KINDS, "file"])


def _require_meaning(wanted: TokenizerConfig) -> None:
    """Each option of a tokenizer means something with one kind alone."""
    other = TokenizerConfig()
    for name, kind in (("vocab_size", "bpe"), ("path", "file"), ("eos", "file")):
        value = getattr(wanted, name)
        if value != getattr(other, name) and wanted.kind != kind:
            raise ConfigError(
                f"data.tokenizer.{name} {value} would do nothing: data.tokenizer.kind is {wanted.kind}. Leave it out, "
                f"or choose --data.tokenizer.kind {kind}"
            )


def _construct(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    options = getattr(config, config.corpus)
    cls = CORPORA[config.corpus].load()
    shared = {"seq_len": config.seq_len, "batch_size": config.batch_size, "seed": config.seed}
    # Not dataclasses.asdict, which would copy deeply what the corpus shall have as it is.
    return cls(tokenizer, **shared, **{item.name: getattr(options, item.name) for item in fields(options)})


def _limited(texts: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Texts up to about `max_bytes`, so that an endless corpus ends."""
    for text in texts:
        yield text
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            return
