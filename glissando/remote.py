"""Runs at URLs that fsspec reaches: s3://bucket/book, gs://..., https://..., memory://...

A run at a URL is a copy of its directory. It is trained on this machine and copied after each save: new names first,
then `latest`, the manifest last, so that a reader finds the run as it was at one save. It is read, and resumed, by
copying it back into the cache, each file checked. What a storage may do to this machine is as little as a run may
(glissando.untrusted): of a file no more is fetched than it may have, and passwords in URLs are not shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from glissando import pretrained
from glissando.cache_directory import cache_dir
from glissando.checkpoints import BEST, CHECKPOINTS, LATEST, WEIGHTS, checkpoint_step, latest_checkpoint, pointers
from glissando.errors import RunError
from glissando.storage import MANIFEST, in_turn, publishing, read_json, read_manifest, verify_manifest
from glissando.untrusted import FILE_BYTES, JSON_BYTES, most_bytes
from glissando.urls import is_redacted, is_url, redacted, whole_url

BASE, SAMPLES, ENVIRONMENT, METRICS = "base", "samples.txt", "environment.json", "metrics.csv"


class Place(NamedTuple):
    """A directory that fsspec reaches; `url` is for messages, without passwords."""

    fs: Any
    root: str
    url: str

    def __truediv__(self, name: str) -> Place:
        return Place(self.fs, f"{self.root.rstrip('/')}/{name}", f"{self.url}/{name}")

    def read(self, name: str, most: int = JSON_BYTES) -> bytes | None:
        """The content of a file; None where there is none. Raises RunError as `pieces`."""
        try:
            return b"".join(self.pieces(name, most))
        except FileNotFoundError:
            return None

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        """The content of a file, piece by piece. Raises RunError for more than `most` bytes, of which no more than a
        piece beyond is fetched."""
        left = most
        # By blocks, the default, a web server without range requests would serve small files alone.
        with _reaching("read", f"{self.url}/{name}"), self.fs.open((self / name).root, "rb", block_size=0) as file:
            while piece := file.read(1 << 24):
                if (left := left - len(piece)) < 0:
                    raise RunError(f"it has more bytes than the {most:,} that it may have: it is not fetched")
                yield piece

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file, whole or not at all where the storage keeps to that, as object stores do."""
        with _reaching("write", f"{self.url}/{name}"):
            try:
                self._write(name, source)
            except FileNotFoundError:  # storages with directories; with others, making one needs rights on the bucket
                self.fs.makedirs(self.fs._parent((self / name).root), exist_ok=True)
                self._write(name, source)

    def _write(self, name: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            self.fs.pipe_file((self / name).root, source)
        else:
            self.fs.put_file(str(source), (self / name).root)

    def names(self) -> list[str]:
        """What lies in it; nothing where there is no such directory."""
        with _reaching("list", self.url):
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            # An object store may list the directory itself.
            return sorted({p.rstrip("/").rpartition("/")[2] for p in paths if p.strip("/") != self.root.strip("/")})

    def remove(self) -> None:
        """Delete it, the manifest first: half of it is then no directory that is read."""
        inside = self.names()
        with _reaching("delete", self.url):
            if not inside:
                return
            if MANIFEST in inside:
                self.fs.rm_file((self / MANIFEST).root)
            self.fs.rm(self.root, recursive=True)


def place(url: str) -> Place:
    """Raises RunError for a protocol that is not known, or whose package is not installed."""
    import fsspec

    url = whole_url(url)
    if is_redacted(url):
        raise RunError(f"{url} was written down without its password: give the whole URL again")
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise RunError(f"{url} needs a package that is not installed: {error}") from _shown(error)
    except ValueError as error:
        raise RunError(f"no storage is known by the protocol of {url}: {error}") from _shown(error)
    return Place(fs, root, redacted(url))


@contextlib.contextmanager
def _reaching(verb: str, url: str) -> Iterator[None]:
    """Storages raise errors of their own: RunError that names the URL, FileNotFoundError without its password."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(redacted(str(error))) from None
    except RunError as error:
        raise RunError(f"could not {verb} {url}: {error}") from error
    except Exception as error:  # noqa: BLE001
        raise RunError(f"could not {verb} {url}: {type(error).__name__}: {error}") from _shown(error)


def _shown(error: Exception) -> Exception | None:
    """A cause for tracebacks, unless it shows a password."""
    return error if redacted(str(error)) == str(error) else None


# ---------------------------------------------------------------------- reading


def resolve(path: str | Path) -> Path:
    """The copy of the run at a URL, the folder of a packaged model, or `path` itself; raises as `fetched`."""
    return fetched(str(path)) if is_url(path) else pretrained.resolve(path)


def fetched(url: str) -> Path:
    """A copy of the run or of the checkpoint at `url`; another one is made where it has changed.

    Raises RunError where there is none, it is damaged, or it cannot be reached.
    """
    url = whole_url(url)
    whole, _, checkpoint = url.partition(f"/{CHECKPOINTS}/")
    there = place(whole)
    state = [there.read(MANIFEST) or b"", there.read(LATEST) or b""]
    digest = hashlib.sha256(b"\n".join([url.encode(), *state])).hexdigest()[:16]
    folder = cache_dir("runs") / f"{_name(whole)}-{digest}"
    with in_turn(folder):
        if not folder.is_dir():
            with publishing(folder, manifest=False) as new:
                _copy(there, new, [checkpoint] if checkpoint else [])
    return folder / CHECKPOINTS / checkpoint if checkpoint else folder


def _copy(there: Place, folder: Path, wanted: list[str], whole: bool = False) -> None:
    """The run at a URL: what its manifest lists once it has ended, `latest`, and the `wanted` checkpoints; without any
    that whose weights are the run's, where it has not ended. `whole`: all from which training goes on."""
    listed = _listed(there, folder)
    if WEIGHTS in listed:
        _download(there, folder)
    else:
        (folder / MANIFEST).unlink()  # the checkpoints have copies of what it lists
    if (there / BASE).read(MANIFEST) is not None:
        _download(there / BASE, folder / BASE)
    named = dict.fromkeys((LATEST, BEST))
    if (text := there.read(LATEST)) is not None:
        (folder / LATEST).write_bytes(text)
        named = dict(zip(named, pointers(text, f"{there.url}/{LATEST}"), strict=True))
    if not wanted and (whole or WEIGHTS not in listed):
        wanted = [*filter(None, dict.fromkeys(named.values() if whole else [named[LATEST]]))]
        if not wanted:
            raise RunError(f"no run at {there.url}: it has no weights and no {LATEST} yet")
    for name in wanted:
        step = named[BEST] if name == BEST else name
        if step is None or checkpoint_step(step) < 0 or "/" in step:
            raise RunError(f"no run at {there.url}/{CHECKPOINTS}/{name}: there is no such checkpoint")
        _download(there / CHECKPOINTS / step, folder / CHECKPOINTS / step)
    for name in (METRICS, SAMPLES) if whole else ():
        if name not in listed and (text := there.read(name, FILE_BYTES)) is not None:
            (folder / name).write_bytes(text)


def _download(where: Place, into: Path) -> None:
    """What the manifest of `where` lists, checked."""
    sizes = _listed(where, into)
    if (needed := sum(sizes.values())) > (free := shutil.disk_usage(into).free):
        raise RunError(f"{where.url} has {needed:,} bytes by its manifest, and the disk of {into} has {free:,} left")
    for name, size in sizes.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            with (into / name).open("wb") as file:
                file.writelines(where.pieces(name, size))
        except FileNotFoundError as error:
            raise RunError(f"{where.url} is incomplete: {name} is missing; while it is written, try again") from error
    verify_manifest(into, sizes, f"Fetched from {where.url}.")


def _listed(where: Place, into: Path) -> dict[str, int]:
    """Fetches the manifest into a folder; the sizes of what it lists, which are within bounds."""
    if (manifest := where.read(MANIFEST)) is None:
        raise RunError(f"no run at {where.url}: it has no {MANIFEST}, which is written last")
    into.mkdir(parents=True, exist_ok=True)
    (into / MANIFEST).write_bytes(manifest)
    return {name: most_bytes(name, entry) for name, entry in read_manifest(into).items()}


# ---------------------------------------------------------------------- training


def work_directory(url: str) -> Path:
    """Where on this machine the run at `url` is trained."""
    url = whole_url(url)
    return cache_dir("training") / f"{_name(url)}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def take_up(url: str) -> Path:
    """The directory of this machine in which the run at `url` goes on: what it had here, if that is as far; else a copy
    of `url`, and what it had here is renamed.

    Raises RunError where there is no run at `url` with a checkpoint, nor one here.
    """
    url = whole_url(url)
    there, work = place(url), work_directory(url)
    with in_turn(work):
        text = there.read(LATEST)
        newest = -1 if text is None else checkpoint_step(pointers(text, f"{there.url}/{LATEST}")[0])
        here = latest_checkpoint(work)
        if here is not None and checkpoint_step(here) >= newest:
            made, local = there.read(ENVIRONMENT), read_json(here / ENVIRONMENT, "the record of its making")
            if made is None or json.loads(made).get("id") == local.get("id"):  # made by the same training
                return work
        if newest < 0:
            raise RunError(f"no run at {there.url} with a complete checkpoint to resume from")
        with publishing(work.with_name(f"{work.name}.new"), manifest=False) as new:
            _copy(there, new, [], whole=True)
        if work.exists():
            aside = next(p for n in itertools.count(1) if not (p := work.with_name(f"{work.name}.{n}")).exists())
            print(f"{work} is older than {there.url} or another run; it was renamed to {aside}", file=sys.stderr)
            work.rename(aside)
        work.with_name(f"{work.name}.new").rename(work)
    return work


def _name(url: str) -> str:
    """What a directory for `url` is called, beside a digest."""
    last = redacted(url).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last)[:40] or "run"
