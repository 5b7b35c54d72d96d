"""Files computed once and kept."""

from __future__ import annotations

import hashlib
import os
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from glissando.data.textfile import pieces
from glissando.data.tokenizers import Tokenizer
from glissando.errors import DataError
from glissando.storage import write_atomic

_HASH_BLOCK = 1 << 22
_PIECES_AT_ONCE = 32
# Part of every key: raised when the way text is cut into pieces changes.
_FORMAT = 1


def cache_dir(kind: str) -> Path:
    """The directory for files of one `kind`: under $GLISSANDO_CACHE, or ~/.cache/glissando.

    Raises DataError if it cannot be made.
    """
    path = Path(os.environ.get("GLISSANDO_CACHE") or Path.home() / ".cache" / "glissando") / kind
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the cache directory {path} ({error}); name a writable one in GLISSANDO_CACHE"
        ) from None
    return path


def sha256(data: np.ndarray) -> str:
    """Of a byte array, block by block, so that a mapped file is never in memory as a whole."""
    digest = hashlib.sha256()
    for start in range(0, len(data), _HASH_BLOCK):
        digest.update(data[start : start + _HASH_BLOCK].tobytes())
    return digest.hexdigest()


def token_file(data: np.ndarray, tokenizer: Tokenizer, *, ascii_only: bool = False) -> np.ndarray:
    """(N,) tokens of UTF-8 bytes `data`, mapped uint16 or uint32; computed once per content and tokenizer.

    The text is tokenised in pieces of 64 KiB cut after a newline.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    key = f"{_FORMAT} {sha256(data)} {tokenizer.fingerprint} {ascii_only}"
    path = cache_dir("tokens") / f"{hashlib.sha256(key.encode()).hexdigest()}.{dtype.name}"
    if not path.exists():

        def tokenise(file: BinaryIO) -> None:
            source = pieces(data, ascii_only=ascii_only)
            while batch := list(islice(source, _PIECES_AT_ONCE)):
                for ids in tokenizer.encode_batch(batch):
                    file.write(ids.astype(dtype).tobytes())

        write_atomic(path, tokenise)
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))
