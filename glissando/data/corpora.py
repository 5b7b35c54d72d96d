"""Every corpus by name, with its options; `register_corpus` adds one from any file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PositiveInt

from glissando.config import Registry, options
from glissando.errors import ConfigError

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.data.tokenizers import Tokenizer

#: as much text as a tokenizer is trained on
TOKENIZER_TEXT_BYTES = 1 << 24
_NEWLINE = 10
#: a path, kept as text
File = Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)]

# ---------------------------------------------------------------------- tokenizers


@options
class BytesOptions:
    """Every byte is a token."""


@options
class BpeOptions:
    """A byte-level BPE, trained on the corpus.

    vocab_size  number of tokens
    """

    vocab_size: PositiveInt = 1024


@options
class Gpt2Options:
    """GPT-2's vocabulary, fetched once."""


@options
class FileOptions:
    """A tokenizer.json.

    path  the file
    """

    path: str


def _named(text: str) -> dict[str, str]:
    """A tokenizer by its kind, or by the path of its file."""
    is_file = text not in TOKENIZERS and (text.endswith(".json") or Path(text).exists())
    return {"kind": "file", "path": text} if is_file else {"kind": text}


#: tokenizers by name; the class is built by `build_tokenizer`
TOKENIZERS: Registry[Any] = Registry("tokenizer", "bytes", named=_named)
TOKENIZERS.add("bytes", BytesOptions, "glissando.data.tokenizers:ByteTokenizer")
TOKENIZERS.add("bpe", BpeOptions, "glissando.data.tokenizers:HFTokenizer")
TOKENIZERS.add("gpt2", Gpt2Options, "glissando.data.tokenizers:HFTokenizer")
TOKENIZERS.add("file", FileOptions, "glissando.data.tokenizers:HFTokenizer")

# ---------------------------------------------------------------------- corpora


@options
class DataOptions:
    """Options of every corpus.

    seq_len     number of tokens of a row
    batch_size  number of rows of a batch, over all processes
    seed        seed of the order of rows, or of generated data
    tokenizer   {kind: NAME, ...}: bytes, bpe, gpt2 or file; or the path of a tokenizer.json
    """

    #: the byte that ends a document
    byte_eos: ClassVar[int] = 0

    seq_len: PositiveInt = 256
    batch_size: PositiveInt = 32
    seed: int = 0
    tokenizer: TOKENIZERS.section() = field(default_factory=BytesOptions)  # type: ignore[valid-type]


#: corpora by name
CORPORA: Registry[Any] = Registry("corpus", "stories", DataOptions)
#: @register_corpus("letters", LettersOptions) makes a class, built as cls(tokenizer, **options), a corpus. Those below
#: read their keywords by these very options.
register_corpus = CORPORA.register


@options
class GeneratedOptions(DataOptions):
    """Options of generated corpora.

    valid_rows  number of held-out rows, pairs or stories
    """

    byte_eos: ClassVar[int] = _NEWLINE

    valid_rows: PositiveInt = 256


@options
class StoriesOptions(GeneratedOptions):
    """The built-in children's stories, whose entropy is known exactly.

    labelled  one story a row, with its mood and other labels
    cut       cut stories so that rows have at most seq_len tokens, in held-out rows too, for models of limited length;
              such rows cannot reach the entropy floor, which is that of whole stories
    """

    labelled: bool = False
    cut: bool = False


@options
class FilesOptions(DataOptions):
    """Options of files of your own.

    path            a file, or a pattern in quotes: 'corpus/*.txt'
    valid_path      a file or pattern to validate on; without it, a part of `path` is held out
    valid_fraction  fraction that is held out, at the end, or of jsonl as one batch of so many
    """

    path: File | None = None
    valid_path: File | None = None
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1


@options
class WindowOptions(DataOptions):
    """Options of windows into a long text.

    stride           tokens between training windows; None: random windows
    ascii_only       drop all bytes that are not ASCII
    max_valid_bytes  largest number of bytes of the held-out text; None: all
    """

    #: another kind that has them takes them over
    kept: ClassVar[bool] = True

    stride: PositiveInt | None = None
    ascii_only: bool = False
    max_valid_bytes: PositiveInt | None = None


@options
class TextOptions(FilesOptions, WindowOptions):
    """Local text files in UTF-8, which need not fit into memory."""


@options
class JsonlOptions(FilesOptions):
    """JSONL files, one object a line, read in their order.

    text_field     the field with the text
    control_names  names of the labels, which the field `control` has as a list or by name; a row is then one document
    """

    text_field: str = "text"
    control_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.valid_fraction > 0.5:
            raise ConfigError(f"data.valid_fraction of jsonl must be at most 0.5, got {self.valid_fraction}")


@options
class ShiftOptions(GeneratedOptions):
    """Generated pairs: printable characters, and each of them moved by one place.

    length  largest number of characters of a text; the smallest is 4, where that is less
    """

    length: PositiveInt = 12


@options
class PairsOptions(FilesOptions):
    """A file of pairs, one base64 text `input TAB output` a line."""

    byte_eos: ClassVar[int] = _NEWLINE


@options
class RecallOptions(GeneratedOptions):
    """Generated keys with their values, then the keys again; the model answers with the values.

    pairs  number of keys, at most 47
    """

    pairs: Annotated[int, Field(ge=1, le=47)] = 16


@options
class MqarOptions(GeneratedOptions):
    """Generated pairs of numbers, then the keys among random numbers; the model answers with the values.

    pairs       number of keys, each with its value; a row has at least 4 * pairs tokens
    vocabulary  number of different tokens: keys are from the lower half, values from the upper one
    """

    pairs: PositiveInt = 16
    vocabulary: Annotated[int, Field(ge=4)] = 8192

    def __post_init__(self) -> None:
        if self.tokenizer != BytesOptions():
            raise ConfigError(
                f"data.tokenizer {TOKENIZERS.kind_of(self.tokenizer)} would do nothing: the tokens of mqar are the "
                "numbers below data.vocabulary; leave it out"
            )
        if self.pairs > self.vocabulary // 2 - 1:
            raise ConfigError(
                f"vocabulary {self.vocabulary} has {self.vocabulary // 2 - 1} keys, fewer than {self.pairs} pairs; "
                f"raise data.vocabulary to {2 * self.pairs + 2}"
            )


@options
class ParityOptions(GeneratedOptions):
    """Generated bits; after each, the model answers with the parity so far.

    length  largest number of bits, or moves, of a row; the smallest is 1
    """

    length: PositiveInt = 40


@options
class TrackingOptions(ParityOptions):
    """Generated moves of things in a row; after each, the model answers with their arrangement.

    items  number of things, 2 to 5
    """

    items: Annotated[int, Field(ge=2, le=5)] = 3


@options
class CopyOptions(GeneratedOptions):
    """Ten generated symbols, a long blank, and then the symbols in their order.

    length  number of characters between the last symbol and the first answer
    """

    #: to remember
    symbols: ClassVar[int] = 10

    length: PositiveInt = 100


@options
class SelectiveCopyOptions(GeneratedOptions):
    """Sixteen generated symbols scattered over noise, and then the symbols in their order.

    length  number of characters over which they are scattered, at least 16
    """

    #: to remember
    symbols: ClassVar[int] = 16

    length: Annotated[int, Field(ge=16)] = 128


@options
class InductionOptions(GeneratedOptions):
    """Random symbols with a mark among them; at the second mark, the answer is the symbol after the first.

    length  number of characters of a row, at least 3: a mark, a symbol and the mark again
    """

    length: Annotated[int, Field(ge=3)] = 128


@options
class DataSetOptions(DataOptions):
    """Options of data sets by name, through the `datasets` package.

    name         name of the data set on the Hugging Face Hub, or tinystories for short
    subset       subset, if the data set has several
    revision     revision of the data set; None: the latest
    text_field   name of the field that contains the text
    train_split  split to train on, or a file of the data set, such as TinyStoriesV2-GPT4-train.txt
    valid_split  split or file to validate on; None: a part of train_split is held out, as of a file without another
    max_bytes    largest number of bytes of train_split to read; None: all
    """

    name: str = "tinystories"
    subset: str | None = None
    revision: str | None = None
    text_field: str = "text"
    train_split: str = "train"
    valid_split: str | None = "validation"
    max_bytes: PositiveInt | None = None

    def __post_init__(self) -> None:
        for option in ("train_split", "valid_split"):
            file = getattr(self, option) or ""
            is_outside = Path(file).is_absolute() or file[:1] == "~" or ".." in Path(file).parts
            if is_file(file) and (is_outside or ":" in file or "\\" in file):
                raise ConfigError(
                    f"data.{option} names a split of the data set, or a file by its path in that, got {file}: for a "
                    "file of this machine give --data.kind text --data.path FILE"
                )
        if is_file(self.train_split) and not is_file(self.valid_split or ""):
            if self.valid_split not in (None, "validation"):
                raise ConfigError(
                    f"data.valid_split {self.valid_split} is a split and data.train_split {self.train_split} a file; "
                    "name two splits or two files, or leave valid_split out: the end of the file is held out"
                )
            self.valid_split = None


def is_file(split: str) -> bool:
    """Whether what stands in the place of a split is a file of the data set."""
    return any(sign in split for sign in "./\\")


@options
class HubOptions(DataSetOptions, WindowOptions):
    """A data set by name, fetched once."""


@options
class HubStreamOptions(DataSetOptions):
    """A data set by name, read over the network as training goes, in its order.

    max_valid_bytes  largest number of bytes of the held-out text, which is kept in memory
    """

    max_valid_bytes: PositiveInt = 4_000_000


for _name, _options, _target in (
    ("stories", StoriesOptions, "stories:StoriesCorpus"),
    ("text", TextOptions, "text:TextCorpus"),
    ("jsonl", JsonlOptions, "jsonl:JsonlCorpus"),
    ("shift", ShiftOptions, "pairs:ShiftCorpus"),
    ("pairs", PairsOptions, "pairs:PairFileCorpus"),
    ("recall", RecallOptions, "probes:RecallCorpus"),
    ("mqar", MqarOptions, "probes:MqarCorpus"),
    ("parity", ParityOptions, "probes:ParityCorpus"),
    ("tracking", TrackingOptions, "probes:TrackingCorpus"),
    ("copy", CopyOptions, "probes:CopyCorpus"),
    ("selective_copy", SelectiveCopyOptions, "probes:SelectiveCopyCorpus"),
    ("induction", InductionOptions, "probes:InductionCorpus"),
    ("hub", HubOptions, "hub:HubCorpus"),
    ("hub_stream", HubStreamOptions, "hub:HubStreamCorpus"),
):
    CORPORA.add(_name, _options, f"glissando.data.{_target}")


def about(name: str) -> str:
    """The first line of a corpus's description."""
    return (CORPORA.options[name].__doc__ or "").strip().splitlines()[0].rstrip(".")


def build_corpus(config: DataOptions, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus that `config` describes, read with `tokenizer` (default: the one `config` describes).

    Raises ConfigError and DataError for what its options ask for.
    """
    tokenizer = build_tokenizer(config) if tokenizer is None else tokenizer
    # Not dataclasses.asdict, which would copy deeply what the corpus shall have as it is.
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "tokenizer"}
    return CORPORA.class_of(config)(tokenizer, **values)


def build_tokenizer(config: DataOptions) -> Tokenizer:
    """The tokenizer that `config` describes; "bpe" reads at most the first 16 MiB of the training text."""
    from glissando.data.tokenizers import ByteTokenizer, NumberTokenizer, gpt2, load_tokenizer, train_bpe

    if isinstance(config, MqarOptions):
        return NumberTokenizer(config.vocabulary)
    as_bytes = ByteTokenizer(config.byte_eos)
    if isinstance(config.tokenizer, BpeOptions):
        texts = build_corpus(config, as_bytes).texts("train")
        return train_bpe(_limited(texts, TOKENIZER_TEXT_BYTES), config.tokenizer.vocab_size)
    if isinstance(config.tokenizer, Gpt2Options):
        return gpt2()
    if isinstance(config.tokenizer, FileOptions):
        return load_tokenizer(config.tokenizer.path)
    return as_bytes


def _limited(texts: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Texts up to about `max_bytes`, so that an endless corpus ends."""
    for text in texts:
        yield text
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            return
