"""The text files that a run reads, and the lock by which one process alone trains in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from glissando.data.corpora import is_file
from glissando.data.textfile import named_files
from glissando.errors import ConfigError, DataError, RunError
from glissando.pretrained import packaged_name
from glissando.runs import LOCK, Run
from glissando.storage import locked, record

#: under this name environment.json holds what the texts were
TEXTS = "texts"
_NAMES = ("path", "valid_path", "static_path", "values_path")


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
    """SHA-256 and size of each file that `data` names, by its option and the file's path below what all have in common,
    so that they may be moved together; `.` for a single one.
    """
    return {option: _fingerprint(path) for option, path in _texts(data).items()}


def require_texts(
    data: Any, run: Run, named: Collection[str] = (), fix: str | None = None, may_differ: bool = False
) -> None:
    """Raises RunError for a file that `run` has no digest of, or another one; DataError for one that is not there.

    data    options of a corpus, as the run has them, but for the paths that the user has `named` ("data.path")
    fix     for errors: what the user may give instead, {option} in it; None: what a training that goes on takes
    may_differ  whether what the user has named may be another text: nothing is then asked of it

    The texts of a packaged model are the user's: it names none but what is in its card.
    """
    if packaged_name(run.path):
        return
    known = run.read_environment().get(TEXTS, {})
    known = known if isinstance(known, dict) else {}
    for option, path in _texts(data).items():
        if may_differ and option in named:
            continue
        give = (fix or "--{option} FILE").format(option=option)
        if option not in text_options():
            give = "as the data set of a new training"
        if option not in known and option not in named:
            raise RunError(
                f"{run.path} says that its text is {path}, and its environment.json has no digest of it, so that it "
                f"could be any file of this machine: it is not read. If it is the right one, name it yourself: {give}"
            )
        files = named_files(path)
        if not files or not all(each.is_file() for each in files):
            raise DataError(
                f"there is no file {path}, which {run.path} is trained on; if it has moved, give its new path: "
                + (give if fix else f"glissando train --resume {run.path} {give}")
            )
        if (texts := known.get(option)) is not None and (difference := _difference(path, texts)):
            again = f"the original with {give}, or train on this one: glissando train --from {run.path} {give}"
            raise RunError(
                f"{path} is not the text that {run.path} was trained on: {difference}. Give {give if fix else again}"
            )


@contextlib.contextmanager
def alone(run: Path) -> Iterator[bool]:
    """While the context lasts, no other process enters it with this directory, which is made if it is not there.

    Yields whether it is locked, see `glissando.storage.locked`.
    Raises RunError where another one is in it, or the directory cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            is_locked = stack.enter_context(locked(run / LOCK, wait=False))
        except BlockingIOError as error:
            pid = (run / LOCK).read_text(encoding="utf-8") or "unknown"
            raise RunError(
                f"another process is training in {run} (pid {pid}): wait for it or stop it; two trainings would "
                "overwrite each other's checkpoints"
            ) from error
        except OSError as error:
            raise RunError(f"could not make {run}: {error.strerror}. Choose a writable place.") from error
        yield is_locked


def _texts(data: Any) -> dict[str, Path]:
    """The files, or patterns, that the options of a corpus name on this machine."""
    paths = {f"data.{n}": Path(getattr(data, n)).expanduser() for n in _NAMES if getattr(data, n, None)}
    # What the library `datasets` takes for a folder of this machine, or for files beside which it runs.
    if name := getattr(data, "text_field", None) and getattr(data, "name", None):
        if Path(name).exists():
            paths["data.name"] = Path(name) / "**" / "*" if Path(name).is_dir() else Path(name)
        splits = {f"data.{n}": getattr(data, n) or "" for n in ("train_split", "valid_split")}
        files = {option: Path(split) for option, split in splits.items() if is_file(split)}
        paths |= {option: file for option, file in files.items() if "/" not in name and file.is_file()}
    return paths


def _fingerprint(path: Path) -> dict[str, Any]:
    files = named_files(path)
    above = os.path.commonpath(files) if files else ""
    return {os.path.relpath(each, above): record(each) for each in files}


def _difference(path: Path, known: Mapping[str, Any]) -> str | None:
    """How the text at `path` differs from `known`, in words."""
    now = _fingerprint(path)
    names = [name for name in sorted({*now, *known}) if now.get(name) != known.get(name)]
    if not names:
        return None
    several = f"{len(names)} of its files differ; of the first, {names[0]}, " if names != ["."] else ""
    return f"{several}it has {_shown(now.get(names[0]))}, and that had {_shown(known.get(names[0]))}"


def _shown(fingerprint: Mapping[str, Any] | None) -> str:
    if fingerprint is None:
        return "nothing"
    return f"{fingerprint.get('size'):,} bytes with SHA-256 {str(fingerprint.get('sha256'))[:12]}..."
