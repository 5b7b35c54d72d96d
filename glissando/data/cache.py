"""Files computed once and kept."""

from __future__ import annotations

import hashlib
import logging
import os
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from glissando.cache_directory import cache_dir
from glissando.data.joined import Joined
from glissando.data.textfile import FileArray, pieces
from glissando.data.tokenizers import Tokenizer
from glissando.errors import DataError
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


class TokenFile(NamedTuple):
    """The tokens of a text, in a file."""

    ids: FileArray  # (N,) uint16 or uint32
    ends: np.ndarray  # where the end tokens between files stand, in order


def token_file(data: Joined, tokenizer: Tokenizer, *, ascii_only: bool = False) -> TokenFile:
    """Tokens of the UTF-8 text `data`, an end token between its files; computed once per content and tokenizer, and
    again where the file of them is damaged: their SHA-256 stands at its end, behind the places of the ends.

    The text is tokenised in pieces of 64 KiB cut after a newline.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    key = f"{_FORMAT} {' '.join(part.sha256() for part in data.parts)} {tokenizer.fingerprint} {ascii_only}"
    path = cache_dir("tokens") / f"{hashlib.sha256(key.encode()).hexdigest()}.{dtype.name}"
    end = np.array([tokenizer.eos_id])

    def tokenise(file: BinaryIO) -> None:
        digest, length, ends = hashlib.sha256(), 0, []
        for number, part in enumerate(data.parts):
            source = pieces(part, ascii_only=ascii_only)
            if number:
                ends.append(length)
            batch = [end] if number else tokenizer.encode_batch(list(islice(source, _PIECES_AT_ONCE)))
            while batch:
                for ids in batch:
                    digest.update(tokens := ids.astype(dtype).tobytes())
                    file.write(tokens)
                    length += len(ids)
                batch = tokenizer.encode_batch(list(islice(source, _PIECES_AT_ONCE)))
        digest.update(places := np.array(ends, np.int64).tobytes())
        file.write(places + digest.digest())

    digest = _digest_if_sealed(path)
    if digest is None:
        write_atomic(path, tokenise)
        digest = _digest_if_sealed(path)
    if digest is None:
        raise DataError(f"{path} is not what was just written; check the disk, or name another in GLISSANDO_CACHE")
    n_ends = max(len(data.parts) - 1, 0) * np.dtype(np.int64).itemsize
    # With its digest: another process that tokenises the same text may replace the file by the same tokens.
    places = FileArray(path, digest=digest)[-n_ends - _SEAL : -_SEAL].tobytes()
    return TokenFile(FileArray(path, dtype, digest, tail=n_ends + _SEAL), np.frombuffer(places, np.int64))


def _digest_if_sealed(path: Path) -> str | None:
    """The SHA-256 of the whole file, if it ends with that of all before it; None if not, or if there is no file."""
    try:
        file = path.open("rb")  # once: the file of that name may be replaced meanwhile
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); delete it, and it is made again") from error
    with file:
        digest, left = hashlib.sha256(), os.fstat(file.fileno()).st_size - _SEAL
        while left > 0 and (block := file.read(min(left, 1 << 22))):
            digest.update(block)
            left -= len(block)
        if file.read() != digest.digest():
            _log.warning("%s is damaged: the text is tokenised again", path)
            return None
        digest.update(digest.digest())
        return digest.hexdigest()
