"""Runs at URLs that fsspec reaches: s3://bucket/book, gs://..., https://..., memory://... .

A run is read from a copy in the cache, which holds the files that the run's manifest lists, each checked. It is trained
in a directory on this machine, and what is saved there is copied: files first, the manifest last, so that a reader
finds the run as it was at one save. A file that changes is announced by a manifest that holds for the old and the new.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glissando import pretrained
from glissando.cache_directory import cache_dir
from glissando.checkpoints import BEST, CHECKPOINTS, checkpoint_step, latest_checkpoint
from glissando.errors import RunError
from glissando.loggers import ID, TENSORBOARD, WANDB
from glissando.storage import (
    MANIFEST,
    is_leftover,
    manifest_text,
    publish_directory,
    read_manifest,
    record,
    verify_manifest,
)
from glissando.storages import Place, place
from glissando.untrusted import FILE_BYTES, JSON_BYTES, most_bytes, require_room
from glissando.urls import is_url, redacted, whole_url

_TRIES = 5  # to read a run that is written meanwhile
_BASE, _SAMPLES, _ENVIRONMENT, _METRICS = "base", "samples.txt", "environment.json", "metrics.csv"
#: what a training writes before its first checkpoint
_BEGUN = {
    CHECKPOINTS, MANIFEST, _BASE, _SAMPLES, _ENVIRONMENT, _METRICS, TENSORBOARD, WANDB, "config.yaml", "tokenizer.json",
    "imports",
}  # fmt: skip


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One process of this machine after another."""
    with (
        (folder.with_name(f".{folder.name}.lock")).open("w", encoding="utf-8") as file,
        contextlib.ExitStack() as stack,
    ):
        with contextlib.suppress(ImportError, OSError):  # Windows, and file systems without locks
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


# ---------------------------------------------------------------------- reading


def resolve(path: str | Path) -> Path:
    """The copy of the run at a URL, the folder of a packaged model, or `path` itself; raises as `fetched`."""
    return fetched(str(path)) if is_url(path) else pretrained.resolve(path)


def fetched(url: str) -> Path:
    """A copy of the run or of the checkpoint at `url`; another one is made where its manifest has changed.

    Raises RunError where there is none, it is damaged, or it cannot be reached.
    """
    url = whole_url(url)
    whole, _, checkpoint = url.partition(f"/{CHECKPOINTS}/")
    run, parts = place(whole), ["", f"{CHECKPOINTS}/{checkpoint}"] if checkpoint else [""]
    manifests = [_require_manifest(run / part if part else run) for part in parts]
    base = run / _BASE
    if (text := base.read(MANIFEST)) is not None:
        parts, manifests = [*parts, _BASE], [*manifests, text]
    digest = hashlib.sha256(b"".join([whole.encode(), *manifests])).hexdigest()[:16]
    folder = cache_dir("runs") / f"{_name(whole)}-{digest}"

    def fill(directory: Path) -> None:
        for part in parts:
            _download(run / part if part else run, directory / part)

    with in_turn(folder):
        if not (folder / MANIFEST).is_file():
            publish_directory(folder, fill)
    return folder / CHECKPOINTS / checkpoint if checkpoint else folder


def _require_manifest(where: Place) -> bytes:
    text = where.read(MANIFEST)
    if text is None:
        raise RunError(f"no run at {where.url}: it has no {MANIFEST}, which is written last")
    return text


def _download(where: Place, into: Path) -> None:
    """What the manifest of `where` lists, checked; anew where it was written to meanwhile."""
    for left in reversed(range(_TRIES)):
        into.mkdir(parents=True, exist_ok=True)
        (into / MANIFEST).write_bytes(_require_manifest(where))
        listed = read_manifest(into)
        sizes = {name: most_bytes(name, entry) for name, entry in listed.items()}
        require_room(sum(sizes.values()), into, where.url)
        try:
            for name, size in sizes.items():
                try:
                    where.get(name, into / name, size)
                except FileNotFoundError as error:
                    raise RunError(f"{where.url} is incomplete: {name} is missing") from error
            verify_manifest(into, listed, f"Fetched from {where.url}.")
        except RunError:
            if not left or where.read(MANIFEST) == (into / MANIFEST).read_bytes():
                raise
        else:
            return


# ---------------------------------------------------------------------- training


def work_directory(url: str) -> Path:
    """Where on this machine the run at `url` is trained."""
    url = whole_url(url)
    return cache_dir("training") / f"{_name(url)}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _complete(there: Place) -> dict[str, int]:
    """The complete checkpoints of a run, with their steps; -1 for that of the best validation."""
    names = (there / CHECKPOINTS).names()
    saved = {n: checkpoint_step(n) for n in names if n == BEST or (n[0] != "." and checkpoint_step(n) >= 0)}
    return {n: step for n, step in saved.items() if (there / CHECKPOINTS / n).read(MANIFEST) is not None}


def has_checkpoint(url: str) -> bool:
    """Whether there is a complete checkpoint at `url` that training resumes from."""
    return max(_complete(place(url)).values(), default=-1) >= 0


def delete_begun(url: str) -> None:
    """Delete what a training that was killed before its first complete checkpoint has left at `url`; anything else
    stays. The caller has made sure that the run at `url` is its own to train."""
    there = place(url)
    if {*there.names()} <= _BEGUN and not has_checkpoint(url):
        there.remove()


def rename_aside(work: Path, url: str, kind: str = "run") -> None:
    """Rename the directory `work`, which `url` replaces, to a name that nothing has, and print that name on stderr."""
    aside = next(p for n in itertools.count(1) if not (p := work.with_name(f"{work.name}.{n}")).exists())
    which = f"is older than {redacted(url)} or belongs to another {kind}"
    print(f"{work} {which}; it was renamed to {aside}", file=sys.stderr)
    work.rename(aside)


def fetch_finished(url: str, work: Path, also: Sequence[str] = ()) -> None:
    """Make `work` the finished run at `url`, without its checkpoints; what was there is renamed.

    also  files of the run that its manifest does not list

    Raises RunError where there is no run at `url`, or it is incomplete.
    """
    there = place(url)
    work.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(work), tempfile.TemporaryDirectory(dir=work.parent) as temporary:
        new = Path(temporary) / "run"
        _download(there, new)
        for name in also:
            there.get(name, new / name, JSON_BYTES)
        if work.exists():
            rename_aside(work, url)
        new.rename(work)


def take_up(url: str, work: Path | None = None) -> Path:
    """The directory of this machine in which the run at `url` goes on: what it had here, if that is as far; else the
    checkpoints of `url`, fetched, and what it had here is renamed.

    work  that directory; None: `work_directory` of `url`

    Raises RunError where there is no run at `url` with a checkpoint, nor one here.
    """
    url, work = whole_url(url), work or work_directory(url)
    work.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(work):
        there = place(url)
        complete = _complete(there)
        newest = max(complete.values(), default=-1)
        here = latest_checkpoint(work / CHECKPOINTS)
        if here is not None and checkpoint_step(here) >= newest and _is_copy(work, there):
            return work
        if newest < 0:
            raise RunError(f"no run at {url} with a complete checkpoint to resume from")
        if work.exists():
            rename_aside(work, url)
        # A first copy that was cut short has left checkpoints alone, each with copies of what else a run needs.
        parts = [""] if there.read(MANIFEST) is not None else []
        parts += [f"{CHECKPOINTS}/{name}" for name in complete]
        parts += [_BASE] if (there / _BASE).read(MANIFEST) is not None else []
        with tempfile.TemporaryDirectory(dir=work.parent) as temporary:
            for part in parts:
                _download(there / part if part else there, Path(temporary) / "run" / part)
            if (text := there.read(_SAMPLES, FILE_BYTES)) is not None:
                (Path(temporary) / "run" / _SAMPLES).write_bytes(text)
            (Path(temporary) / "run").rename(work)
    return work


def _is_copy(work: Path, there: Place) -> bool:
    """Whether both were made by the same training, or nothing is there yet."""
    ours, theirs = (work / _ENVIRONMENT).read_bytes(), there.read(_ENVIRONMENT)
    made = [{k: v for k, v in json.loads(text).items() if k != "resumed"} for text in (ours, theirs or ours)]
    return made[0] == made[1]


class Mirror:
    """The run directory `path`, copied to `url` after every save, what has changed alone.

    again  a sentence for errors: what copies the run once the storage takes it again; None: `glissando train --resume`
    """

    def __init__(self, url: str, path: Path, again: str | None = None) -> None:
        self.url, self.path = redacted(whole_url(url)), path
        resume = f"glissando train --resume {shlex.quote(self.url)} continues from there and copies it again."
        self.again = again or resume
        self._there = place(url)
        self._sent: dict[str, bytes | None] = {}  # the manifests there, by directory

    def is_begun(self, job: str | None, config: bytes) -> bool:
        """Whether the run at `url` is that of torchrun's `job` with this config.yaml, and has a manifest."""
        made = None if job is None else self._there.read(_ENVIRONMENT)
        if made is None or self._there.read(MANIFEST) is None or self._there.read("config.yaml") != config:
            return False
        return bool(json.loads(made).get("torchrun") == job)

    def require_free(self) -> None:
        """Raise RunError where anything lies at the URL."""
        if self._there.names():
            raise RunError(
                f"{self.url} exists and is not empty. Resume that run, or choose a new name: nothing is overwritten."
            )

    def push(self) -> None:
        """Checkpoints first, then what the run's manifest lists, then logs, and last the manifest; checkpoints that are
        no more are deleted. Raises RunError, which says where the run is, if the storage does not take it."""
        try:
            folder = self.path / CHECKPOINTS
            kept = [p for p in sorted(folder.glob("*")) if (p / MANIFEST).is_file() and not is_leftover(p)]
            for each in [*kept, self.path / _BASE]:
                if (each / MANIFEST).is_file():
                    self._push_directory(each.relative_to(self.path).as_posix())
            self._push_run()
            # A copy of a finished run has no checkpoints: those at the URL stay.
            there = {*(self._there / CHECKPOINTS).names()} if kept else set()
            for gone in there - {path.name for path in kept}:
                (self._there / CHECKPOINTS / gone).remove()
                self._sent.pop(f"{CHECKPOINTS}/{gone}", None)
        except (FileNotFoundError, RunError) as error:
            raise RunError(
                f"the run was not copied to {self.url}: {error}. All of it is in {self.path}; {self.again}"
            ) from error

    def _manifest_there(self, name: str) -> bytes | None:
        if name not in self._sent:
            self._sent[name] = (self._there / name if name else self._there).read(MANIFEST)
        return self._sent[name]

    def _push_directory(self, name: str) -> None:
        """One that is published whole: without a manifest while it is written."""
        ours, there = (self.path / name / MANIFEST).read_bytes(), self._there / name
        before = self._manifest_there(name)
        if before == ours:
            return
        self._sent.pop(name)  # until it is written
        if before is not None:
            there.remove()
        for each in read_manifest(self.path / name):
            there.put(each, self.path / name / each)
        there.put(MANIFEST, ours)
        self._sent[name] = ours

    def _push_run(self) -> None:
        before = self._manifest_there("")
        old = {} if before is None else {name: self._settled(name, e) for name, e in _listed(before).items()}
        listed = read_manifest(self.path)
        log = {name: (self.path / name).read_bytes() for name in listed if name == _METRICS}  # it may grow meanwhile
        # What was damaged since it was written is not listed anew.
        verify_manifest(self.path, [name for name in listed if name not in log], "It is not copied")
        new = {name: _record(log[name]) if name in log else self._unchanged(name, e) for name, e in listed.items()}
        changed = [name for name, entry in new.items() if old.get(name) != entry]
        self._sent.pop("")  # until it is written
        for name in [each for each in changed if each not in old]:
            self._there.put(name, log.get(name, self.path / name))
        if before is not None and changed:
            both = {
                name: entry | ({"previous": old[name]} if old.get(name, entry) != entry else {})
                for name, entry in new.items()
            }
            self._there.put(MANIFEST, manifest_text(both))
        for name in (each for each in changed if each in old):
            self._there.put(name, log.get(name, self.path / name))
        for name in self._logs(new):
            self._there.put(name, (self.path / name).read_bytes())
        text = manifest_text(new)
        self._there.put(MANIFEST, text)
        self._sent[""] = text

    def _unchanged(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The one record that holds here, where a save was cut short between the two."""
        return record(self.path / name) if "previous" in entry else {key: entry[key] for key in ("sha256", "size")}

    def _settled(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The one record that holds there, where an earlier copy was cut short between the two."""
        if "previous" in entry and (found := self._there.read(name)) is not None:
            return _record(found)
        return {key: entry[key] for key in ("sha256", "size")}

    def _logs(self, listed: Mapping[str, Any]) -> list[str]:
        """Files that are in no manifest: samples.txt, TensorBoard's events, the id of the run at Weights & Biases."""
        found = [self.path / _SAMPLES, *(self.path / TENSORBOARD).rglob("*"), self.path / WANDB / ID]
        return [n for p in found if p.is_file() and (n := p.relative_to(self.path).as_posix()) not in listed]


def _record(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _listed(text: bytes) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(text)
        return read_manifest(folder)


def _name(url: str) -> str:
    """What a directory for `url` is called, beside a digest."""
    last = redacted(url).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last)[:40] or "run"
