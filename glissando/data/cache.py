"""Files computed once and kept."""

from __future__ import annotations

import hashlib
import logging
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from glissando.cache_directory import cache_dir
from glissando.data.textfile import FileArray, pieces
from glissando.data.tokenizers import Tokenizer
from glissando.storage import write_atomic

_log = logging.getLogger(__name__)
_PIECES_AT_ONCE = 32
_SEAL = hashlib.sha256().digest_size
# Part of every key: raised when the way text is cut into pieces, or what a file holds, changes.
_FORMAT = 2


def sealed(data: bytes) -> bytes:
    """`data` with its SHA-256 behind it, by which `unsealed` knows it."""
    return data + hashlib.sha256(data).digest()


def unsealed(path: Path) -> bytes | None:
    """What was `sealed`; None of a file that is missing or damaged."""
    data = path.read_bytes() if path.is_file() else b""
    return data[:-_SEAL] if sealed(data[:-_SEAL]) == data else None


def token_file(data: FileArray, tokenizer: Tokenizer, *, ascii_only: bool = False) -> FileArray:
    """(N,) tokens of UTF-8 bytes `data`, uint16 or uint32; computed once per content and tokenizer, and again where the
    file of them is damaged: their SHA-256 stands at its end.

    The text is tokenised in pieces of 64 KiB cut after a newline.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    key = f"{_FORMAT} {data.sha256()} {tokenizer.fingerprint} {ascii_only}"
    path = cache_dir("tokens") / f"{hashlib.sha256(key.encode()).hexdigest()}.{dtype.name}"

    def tokenise(file: BinaryIO) -> None:
        source, digest = pieces(data, ascii_only=ascii_only), hashlib.sha256()
        while batch := list(islice(source, _PIECES_AT_ONCE)):
            for ids in tokenizer.encode_batch(batch):
                digest.update(tokens := ids.astype(dtype).tobytes())
                file.write(tokens)
        file.write(digest.digest())

    if path.exists() and not _is_sealed(path):
        _log.warning("%s is damaged: the text is tokenised again", path)
        path.unlink()
    if not path.exists():
        write_atomic(path, tokenise)
    return FileArray(path, dtype, tail=_SEAL)


def _is_sealed(path: Path) -> bool:
    if path.stat().st_size < _SEAL:
        return False
    whole = FileArray(path)
    return whole.part(0, len(whole) - _SEAL).sha256() == whole[len(whole) - _SEAL :].tobytes().hex()
