"""Files that survive a full disk, a killed process and a flipped bit; no pickle anywhere.

A file is written under a temporary name, synced and renamed; so is a directory, complete with its manifest of SHA-256
digests. After a crash at any moment what has the name is either the old one or the new one, whole. Damage is an error
that names the file. Temporaries of dead processes are deleted by the next save beside them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glissando.errors import RunError
from glissando.untrusted import JSON_BYTES, require_inner_names

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ABANDONED_SECONDS = 86_400.0  # age at which the temporary of another machine counts as abandoned
RETRAIN = "Load the previous checkpoint, or train again."

#: Windows opens no directory, and syncs what is open for writing alone; its file system keeps renames in a journal.
_DIRECTORIES_OPEN = hasattr(os, "O_DIRECTORY")
_counter = itertools.count()
_active: set[str] = set()
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-\d+")


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replaces the file `path` by `data`, or not at all: then the old file stands, and no temporary is left.

    Raises RunError if the file cannot be written (disk full, no permission, ...).
    """
    with _replacing(Path(path)) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def publishing(target: str | Path, manifest: bool = True) -> Iterator[Path]:
    """A directory that the block fills, and that becomes `target` then, complete with its manifest, or not at all.

    manifest  whether it is written here, for all that the block has written

    Raises RunError if it cannot be written; other exceptions of the block pass through. In both cases what stood at
    `target` stands.
    """
    target = Path(target)
    temporary = _sibling(target, "tmp")
    with _keeping_the_old(target), _claimed(temporary):
        yield temporary
        if manifest:
            write_manifest(temporary)
        for folder, _, names in os.walk(temporary, topdown=False):
            for name in names:
                _sync_file(Path(folder) / name)
            _sync_directory(Path(folder))
        _swap_in(temporary, target)


@contextlib.contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[bool]:
    """While the context lasts, no other process of this machine enters it with this file, which holds the process id.

    Yields whether it is locked: where files cannot be (Windows, some file systems), any process may enter.
    Raises BlockingIOError where another one is in it, unless this one is to `wait`.
    """
    with file.open("a", encoding="utf-8") as opened, contextlib.ExitStack() as stack:
        is_locked = False
        try:
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            stack.callback(fcntl.flock, opened, fcntl.LOCK_UN)
            opened.truncate(0)
            opened.write(str(os.getpid()))
            opened.flush()
            is_locked = True
        except BlockingIOError:
            raise
        except (ImportError, OSError):
            pass
        yield is_locked


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One process of this machine after another. Raises RunError where nothing can be written beside `folder`."""
    lock = folder.with_name(f".{folder.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock))
        except OSError as error:
            raise RunError(f"cannot write {lock} ({error.strerror}): choose a writable place") from error
        yield


def kept(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The directory `folder` as `fill` makes it: checked at every use, and made where it is not there; a damaged one is
    made again, and a warning is logged. A whole one may lie where nothing can be written. Raises as `publishing`."""
    if is_whole(folder):
        return folder
    with in_turn(folder):
        if not is_whole(folder):  # another process may have made it meanwhile
            if folder.exists():
                _log.warning("%s is damaged: it is made again", folder)
            with publishing(folder) as new:
                fill(new)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file of a directory is as its manifest says."""
    try:
        verify_manifest(folder)
    except RunError:
        return False
    return True


def remove_directory(path: str | Path) -> None:
    """Deletes a directory; it vanishes at once under its name, so a crash leaves no half of it there."""
    path = Path(path)
    temporary = _sibling(path, "tmp")
    with _claimed(temporary, create=False):
        os.rename(path, temporary)
        _sync_directory(path.parent)


def sweep(directory: Path) -> None:
    """Deletes temporaries of dead processes in `directory` and puts back what a crash left renamed aside."""
    for path in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not _abandoned(path, match):
            continue
        target = directory / match["name"]
        with contextlib.suppress(OSError):  # another process may sweep too; what stays is tried next time
            if match["kind"] == "old" and not target.exists():
                os.rename(path, target)
            else:
                delete(path)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """The name of a file that replaces `path`, synced to disk, if the block succeeds.

    It lies in a temporary folder beside `path`, so that the temporaries of other writers go with it.
    """
    folder = _sibling(path, "tmp")
    with _keeping_the_old(path), _claimed(folder):
        yield folder / "new"
        # Some writers make private files; the folder's mode carries the user's umask.
        os.chmod(folder / "new", folder.stat().st_mode & 0o666)
        _sync_file(folder / "new")
        os.replace(folder / "new", path)
        _sync_directory(path.parent)


@contextlib.contextmanager
def _keeping_the_old(path: Path) -> Iterator[None]:
    """Prepares the parent directory; every error names `path` as not written, and what stands."""
    kept = f"The old {path.name} is kept" if path.exists() else f"No {path.name} was written"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RunError(
            f"could not write {path}: {reason}. {kept}. Free space or choose a writable place; save again."
        ) from error


@contextlib.contextmanager
def _claimed(temporary: Path, create: bool = True) -> Iterator[None]:
    """Makes a temporary directory, marks it as in use, and deletes what is left of it at the end."""
    _active.add(temporary.name)
    try:
        if create:
            temporary.mkdir()
        yield
    finally:
        with contextlib.suppress(OSError):
            delete(temporary)
        _active.discard(temporary.name)


def _swap_in(temporary: Path, target: Path) -> None:
    aside = _sibling(target, "old")
    with _claimed(aside, create=False):
        if target.exists():
            os.rename(target, aside)
        try:
            os.rename(temporary, target)
        except OSError:
            if aside.exists():
                os.rename(aside, target)
            raise
        _sync_directory(target.parent)


def _sibling(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}-{_HOST}-{os.getpid()}-{next(_counter)}"


def is_leftover(path: Path) -> bool:
    """Whether it is the temporary of a save that has not ended, or of one that was killed."""
    match = _LEFTOVER.fullmatch(path.name)
    return match is not None and match["kind"] == "tmp"


def _abandoned(path: Path, match: re.Match[str]) -> bool:
    """Whether the process that made this leftover is gone; whether it is a day old where that is unknown: it was made
    on another machine, or this is Windows, where signal 0 is Ctrl-C and would be sent."""
    if match["host"] != _HOST or (hasattr(signal, "CTRL_C_EVENT") and int(match["pid"]) != os.getpid()):
        with contextlib.suppress(OSError):
            return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
        return False
    if int(match["pid"]) == os.getpid():
        return path.name not in _active
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def delete(path: Path) -> None:
    """A file, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    with open(path, "rb" if _DIRECTORIES_OPEN else "r+b") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    if not _DIRECTORIES_OPEN:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def record(path: Path) -> dict[str, Any]:
    """The SHA-256 (hexadecimal) and the size in bytes of a file, both of the same moment where it grows."""
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def write_manifest(directory: str | Path, names: Iterable[str] | None = None) -> None:
    """Writes `manifest.json`: digest and size of each file below `directory`, or of the given names alone.

    Raises RunError if it cannot be written.
    """
    directory = Path(directory)
    chosen = _files(directory) if names is None else sorted(names)
    save_manifest(directory, {name: record(directory / name) for name in chosen})


def save_manifest(directory: Path, files: Mapping[str, Any]) -> None:
    """Writes `manifest.json` from records."""
    write_atomic(directory / MANIFEST, manifest_text(files))


def manifest_text(files: Mapping[str, Any]) -> bytes:
    """With a digest of itself: damage to it is not taken for damage to a file."""
    records: dict[str, Any] = {"format": 2, "files": dict(files)}
    records["sha256"] = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
    return (json.dumps(records, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(directory: str | Path, advice: str | Callable[[], str] = RETRAIN) -> dict[str, dict[str, Any]]:
    """The records of `manifest.json` by file name. Raises RunError if it is missing or damaged, with `advice`."""
    path = Path(directory) / MANIFEST
    text = _read(path, "the directory is incomplete or damaged")
    try:
        files = json.loads(text)["files"]
        is_sound = all(isinstance(entry, dict) for entry in files.values()) and text == manifest_text(files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        advice = advice if isinstance(advice, str) else advice()
        raise RunError(f"{path} is malformed, damaged or of another version. {advice}")
    require_inner_names(files, str(path))
    return files


def verify_manifest(
    directory: str | Path, names: Iterable[str] | None = None, advice: str | Callable[[], str] = RETRAIN
) -> None:
    """Checks every file below `directory` against `manifest.json`, or the given names alone.

    Raises RunError that names the first missing, extra or damaged file, the expected and the found digest,
    and `advice` on what to do (a function is asked only then).
    """
    directory = Path(directory)
    expected = read_manifest(directory, advice)
    for name in sorted({*expected, *_files(directory)}) if names is None else names:
        if problem := _problem(directory / name, expected.get(name)):
            raise RunError(f"{problem} {advice if isinstance(advice, str) else advice()}")


def _problem(path: Path, expected: Mapping[str, Any] | None) -> str | None:
    if not path.is_file():
        return f"{path} is missing."
    if expected is None:
        return f"{path} is not listed in {MANIFEST}, so it cannot be checked: move it elsewhere."
    if (actual := record(path)) == expected:
        return None
    return (
        f"{path} is damaged: expected {expected.get('size')} bytes with SHA-256 {expected.get('sha256')}, by "
        f"{MANIFEST}, found {actual['size']} bytes with SHA-256 {actual['sha256']}."
    )


def _files(directory: Path) -> list[str]:
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name != MANIFEST and not _LEFTOVER.fullmatch(path.name))


def read_json(path: Path, problem: str) -> dict[str, Any]:
    """The object in a JSON file. Raises RunError, with `problem`, for one that is missing, malformed or too large."""
    try:
        value = json.loads(_read(path, problem))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is malformed ({error}): {problem}. {RETRAIN}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is malformed (no JSON object): {problem}. {RETRAIN}")
    return value


def _read(path: Path, problem: str) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing: {problem}. {RETRAIN}") from error
    except OSError as error:
        raise RunError(f"could not read {path}: {error.strerror}.") from error
    if len(text) > JSON_BYTES:
        raise RunError(f"{path} is malformed (more than {JSON_BYTES:,} bytes): {problem}. {RETRAIN}")
    return text


def save_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes named tensors as safetensors, atomically. Shared storage is written once for each name.

    Raises RunError if the file cannot be written, TypeError for a tensor that safetensors cannot hold.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = _plain_tensors(tensors)
    with _replacing(Path(path)) as temporary:
        try:
            save_file(plain, temporary, dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises RunError for a file that is missing, truncated or malformed, as a pickle is to safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing. {RETRAIN}") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} is truncated or malformed ({error}). {RETRAIN}") from error


def _plain_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with storage of its own."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            kind = type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
            raise TypeError(f"tensor {name!r} is a {kind}; only plain dense tensors are saved: gather it first")
        if tensor.dtype is torch.complex128 or tensor.is_quantized:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        plain[name] = value
    return plain
