"""Text to ids and back: bytes by default, Hugging Face `tokenizers` for other text, numbers for what is no text."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np

from glissando.cache_directory import cache_dir
from glissando.errors import ConfigError, DataError
from glissando.storage import write_atomic

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
#: special tokens that end a document in published tokenizers, tried in this order
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]", "[EOS]")
_BYTES_TYPE = "glissando-bytes"
_NUMBERS_TYPE = "glissando-numbers"
_LARGEST_ID = 1 << 22  # of published vocabularies none has a tenth of that
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_OVERLAP = 16  # how many of the last ids a stream keeps at least, to decode the next one with


class Tokenizer(ABC):
    """A map between text and ids in [0, vocab_size), reversible for bytes and byte-level BPE."""

    vocab_size: int
    eos_id: int  # ends a document; also what the model reads before a document's first token

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def to_json(self) -> str:
        """The whole tokenizer as the text of one JSON file that `load_tokenizer` reads."""

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """What each id contributes to the decoded bytes, or None where that depends on its neighbours."""
        return None

    @cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """(V,) bytes of text each id stands for, or None where that is not a property of the id alone."""
        return None if self.token_bytes is None else np.array([len(b) for b in self.token_bytes], np.int64)

    @cached_property
    def unsettled(self) -> frozenset[int]:
        """Ids whose text may still change with the ids that follow them, though it looks whole."""
        return frozenset()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer, to key what is computed with it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text as an array; faster than one by one where the tokenizer can be."""
        return [np.array(self.encode(text), np.int64) for text in texts]

    def save(self, path: Path) -> None:
        """Write one file, whole or not at all; a directory gets `tokenizer.json`."""
        path = Path(path)
        write_atomic(path / FILE_NAME if path.is_dir() else path, self.to_json().encode("utf-8"))


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids, nothing to train, reversible on any text."""

    vocab_size = 256

    def __init__(self, eos_id: int = 0) -> None:
        if not isinstance(eos_id, int) or not 0 <= eos_id < 256:
            raise ConfigError(f"eos_id {eos_id!r} is not a byte; give one in 0..255, such as 0 or 10 (newline)")
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def to_json(self) -> str:
        return json.dumps({"type": _BYTES_TYPE, "eos_id": self.eos_id})

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        return [bytes([byte]) for byte in range(256)]


class NumberTokenizer(Tokenizer):
    """Ids written as numbers between spaces, "17 4100", for generated tokens that stand for no text; 0 ends a row."""

    eos_id = 0

    def __init__(self, vocab_size: int) -> None:
        if not isinstance(vocab_size, int) or not 2 <= vocab_size <= _LARGEST_ID:
            raise ConfigError(f"vocab_size {vocab_size!r} must be from 2 to {_LARGEST_ID:,}; 0 ends a row")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            # Longer digits are not converted: Python refuses thousands of them.
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.vocab_size):
                raise DataError(
                    f"{word[:40]!r} is no token of this model, which reads numbers from 0 to {self.vocab_size - 1:,} "
                    'with spaces between them; write such as "17 23"'
                )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def to_json(self) -> str:
        return json.dumps({"type": _NUMBERS_TYPE, "vocab_size": self.vocab_size})


class HFTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` of any kind; its truncation and padding are switched off.

    A document ends with the first of EOS_NAMES that it has. Raises DataError if there is none.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes; an embedding needs a row for the largest.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _LARGEST_ID:
            raise DataError(f"the tokenizer has an id {self.vocab_size - 1:,}; ids below {_LARGEST_ID:,} are read")
        end = next((name for name in EOS_NAMES if name in vocabulary), None)
        if end is None:
            known = ", ".join(EOS_NAMES)
            raise DataError(f"the tokenizer has no token that ends a document, which is one of {known}: rename its own")
        self.eos, self.eos_id = end, vocabulary[end]

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """Hugging Face's own file."""
        return self._tokenizer.to_str()

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        spec = json.loads(self.to_json())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not _is_byte_level(spec, vocabulary):
            return None
        pieces = [b""] * self.vocab_size
        for token, index in vocabulary.items():
            pieces[index] = _byte_level_bytes(token)
        return pieces

    @cached_property
    def unsettled(self) -> frozenset[int]:
        # A run of byte tokens is text only if the run as a whole is UTF-8.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is half of a surrogate pair, which is not text; remove it"
        ) from None


def stand_ins() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins for the 256 bytes (Radford et al., 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = stand_ins()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level decoder makes of `token`; one with a foreign character stands for itself."""
    try:
        return bytes(_BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode("utf-8")


def _is_byte_level(spec: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether encoding loses and adds nothing, so that an id's bytes are its own."""
    steps = spec["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    added = [token["content"] for token in spec["added_tokens"]]
    keeps_all = all(step.get("behavior", "Isolated") != "Removed" for step in steps)
    return (
        (spec["decoder"] or {}).get("type") == "ByteLevel"
        and len(byte_level) == 1
        and not byte_level[0]["add_prefix_space"]
        and keeps_all
        and spec["normalizer"] is None
        and all(char in vocabulary for char in _BYTE_OF)
        and not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        # a token added as text, such as "é", would be decoded as stand-ins for other bytes
        and not any(not text.isascii() and all(char in _BYTE_OF for char in text) for text in added)
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> HFTokenizer:
    """Byte-level BPE on `texts`, reversible on any text, with `<|endoftext|>` as its end token.

    Deterministic. The vocabulary is smaller than `vocab_size` if the texts have too few distinct pairs.
    Raises ConfigError below 257 entries (256 bytes and the end token).
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size {vocab_size} is too small: 256 bytes and the end token need 257")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return HFTokenizer(backend)


#: the two files that OpenAI published
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
#: each file's SHA-256, as OpenAI's own `tiktoken` pins it (`tiktoken_ext/openai_public.py`)
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2() -> HFTokenizer:
    """Byte-level BPE with GPT-2's 50,257 ids, `<|endoftext|>` being 50256.

    The files lie under gpt2 in the cache directory and are checked at every use; one that is missing or has changed is
    fetched. Raises DataError where it cannot be, or where what comes is another file.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary, merges = (str(_gpt2_file(name)) for name in ("encoder.json", "vocab.bpe"))
    backend = Backend(models.BPE.from_file(vocabulary, merges))
    backend.add_special_tokens([END_OF_TEXT])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HFTokenizer(backend)


def _gpt2_file(name: str) -> Path:
    path, url = cache_dir("gpt2") / name, f"{GPT2_URL}/{name}"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == GPT2_SHA256[name]:
        return path
    by_hand = (
        f"put GPT-2's {name} at {path}, or name a file of GPT-2's vocabulary: --data.tokenizer path/to/tokenizer.json"
    )
    try:
        with urlopen(url, timeout=30) as source:
            content = source.read()
    except OSError as error:
        raise DataError(f"cannot fetch {url} ({error}); {by_hand}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != GPT2_SHA256[name]:
        raise DataError(
            f"{url} is not the file expected: its SHA-256 is {digest}, and not {GPT2_SHA256[name]}; {by_hand}"
        )
    write_atomic(path, content)
    return path


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer saved at `path` (a file, or a directory with `tokenizer.json`), ours or Hugging Face's.

    Raises DataError if it is missing, malformed, or not a tokenizer.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"no tokenizer at {path}; give a {FILE_NAME} or a directory that has one")
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({error}); give a {FILE_NAME}, such as Hugging Face's `tokenizers` saves"
        ) from None
    kind = spec.get("type") if isinstance(spec, dict) else None
    try:
        if kind == _BYTES_TYPE:
            return ByteTokenizer(spec.get("eos_id", 0))
        if kind == _NUMBERS_TYPE:
            return NumberTokenizer(spec.get("vocab_size"))
        from tokenizers import Tokenizer as Backend

        return HFTokenizer(Backend.from_str(json.dumps(spec)))
    except (ConfigError, DataError) as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            f"{path}: this is JSON but not a tokenizer ({error}); give a {FILE_NAME} of the `tokenizers` package"
        ) from error


class StreamDecoder:
    """Decodes one id at a time, never splitting a character.

    The pieces of `push` and the final `flush`, joined, equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # the last ones
        self._sent = 0  # characters of their text

    def push(self, token: int) -> str:
        """The characters that `token` completes; may be empty."""
        if self._pieces is not None:
            return self._utf8.decode(self._pieces[token])
        self._ids.append(token)
        if token in self._tokenizer.unsettled:
            return ""
        # A trailing replacement character may be half of one that the next token completes.
        whole = self._tokenizer.decode(self._ids)
        new = self._send(whole.rstrip("\ufffd"))
        if len(self._ids) >= 2 * _OVERLAP:
            self._forget(whole)
        return new

    def push_all(self, tokens: Sequence[int]) -> str:
        """The characters that the tokens complete."""
        if self._pieces is not None:
            return self._utf8.decode(b"".join([self._pieces[token] for token in tokens]))
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        """What is still held back, once no more ids come."""
        if self._pieces is not None:
            return self._utf8.decode(b"", final=True)
        return self._send(self._tokenizer.decode(self._ids))

    def _send(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new

    def _forget(self, whole: str) -> None:
        """Keeps the last ids alone, if what they end in is read the same without those before.

        How a text begins depends on the tokenizer (a space left out, a mark left in), so the ends are compared:
        what follows the first half of the kept ids, with and without the ids before.
        """
        kept = self._ids[-_OVERLAP:]
        with_all = self._tokenizer.decode(self._ids[: -_OVERLAP // 2])
        text, alone = self._tokenizer.decode(kept), self._tokenizer.decode(kept[: -_OVERLAP // 2])
        if (
            self._sent >= len(with_all)
            and whole.startswith(with_all)
            and text.startswith(alone)
            and whole[len(with_all) :] == text[len(alone) :]
        ):
            self._ids, self._sent = kept, self._sent - len(with_all) + len(alone)
