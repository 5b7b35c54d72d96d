"""The text files that a run reads, and the lock by which one process alone trains in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glissando.errors import ConfigError, DataError, RunError
from glissando.runs import LOCK, Run
from glissando.storage import record

#: under this name environment.json holds what the texts were
TEXTS = "texts"
_NAMES = ("path", "valid_path")
#: of larger files the size and so much of both ends stand for the whole: hashing a terabyte takes an hour
_WHOLE_BYTES, _END_BYTES = 1 << 30, 1 << 24


def text_options() -> list[str]:
    """The options that name a corpus's files."""
    return [f"data.{name}" for name in _NAMES]


def put_texts(data: Any, texts: Mapping[str, str]) -> None:
    """Sets options of `text_options`: where the files lie now. Raises ConfigError for one that the corpus lacks."""
    for option, path in texts.items():
        name = option.removeprefix("data.")
        if name not in _NAMES or not hasattr(data, name):
            raise ConfigError(f"the run's corpus has no option {option}: leave it out")
        setattr(data, name, path)


def fingerprints(data: Any) -> dict[str, dict[str, Any]]:
    """SHA-256 and size of each file that `data` names, by its option; of one above 1 GiB, the digest of its first and
    last 16 MiB."""
    return {option: _fingerprint(path) for option, path in _texts(data).items()}


def require_texts(data: Any, run: Run) -> None:
    """Raises DataError for a file that is not where `run` has it, RunError for one that is not what it was.

    A run without a record of its texts is not checked.
    """
    known = run.read_environment().get(TEXTS, {})
    for option, path in _texts(data).items():
        if not path.is_file():
            raise DataError(
                f"there is no file {path}, which {run.path} is trained on; if it has moved, give its new path: "
                f"glissando train --resume {run.path} --{option} FILE"
            )
        if option in known and (now := _fingerprint(path)) != (then := known[option]):
            raise RunError(
                f"{path} is not the text that {run.path} was trained on: it has {_shown(now)}, and that had "
                f"{_shown(then)}. Give the original with --{option} FILE, or train on this one: "
                f"glissando train --from {run.path}"
            )


@contextlib.contextmanager
def alone(run: Path) -> Iterator[bool]:
    """While the context lasts, no other process enters it with this directory, which is made if it is not there.

    Yields whether it is locked: where files cannot be, any process may enter.
    Raises RunError where another one is in it, or the directory cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"could not make {run}: {error.strerror}. Choose a writable place.") from error
    locked = False
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            file = stack.enter_context((run / LOCK).open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"another process is training in {run} (pid {file.read() or 'unknown'}): wait for it or stop it; two "
                "trainings would overwrite each other's checkpoints"
            ) from error
        except (ImportError, OSError):
            pass  # Windows, and file systems without locks
        yield locked


def _texts(data: Any) -> dict[str, Path]:
    return {f"data.{n}": Path(getattr(data, n)).expanduser() for n in _NAMES if getattr(data, n, None)}


def _fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return record(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(-_END_BYTES, os.SEEK_END)
        digest.update(file.read(_END_BYTES))
    return {"sha256_of_ends": digest.hexdigest(), "size": size}


def _shown(fingerprint: Mapping[str, Any]) -> str:
    digest = fingerprint.get("sha256") or fingerprint.get("sha256_of_ends")
    return f"{fingerprint.get('size'):,} bytes with SHA-256 {str(digest)[:12]}..."
