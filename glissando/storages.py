"""Storages that fsspec reaches, and what one of them may do to this machine: as little as a run (glissando.untrusted).

Of a file no more is fetched than it may have, and passwords in URLs are not shown.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from glissando.errors import RunError
from glissando.storage import MANIFEST
from glissando.untrusted import JSON_BYTES
from glissando.urls import is_redacted, redacted, whole_url


class Place(NamedTuple):
    """A directory that fsspec reaches; `url` is for messages, without passwords."""

    fs: Any
    root: str
    url: str

    def __truediv__(self, name: str) -> Place:
        return Place(self.fs, f"{self.root.rstrip('/')}/{name}", f"{self.url}/{name}")

    def read(self, name: str, most: int = JSON_BYTES) -> bytes | None:
        """The content of a file; None where there is none. Raises RunError as `get`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file"
            with contextlib.suppress(FileNotFoundError):
                self.get(name, file, most)
            return file.read_bytes() if file.is_file() else None

    def get(self, name: str, into: Path, most: int) -> None:
        """Fetch a file. Raises RunError for one of more than `most` bytes, after no more than a piece beyond."""
        from fsspec.callbacks import Callback

        def require(size: int) -> None:
            if size > most:
                raise RunError(f"it has more than {most:,} bytes, which is all that it may have: it is not fetched")

        class Received(Callback):
            def call(self, *_: Any, **__: Any) -> None:
                """By the storage, after every piece."""
                require(self.value)

        into.parent.mkdir(parents=True, exist_ok=True)
        with _reaching("read", f"{self.url}/{name}"):
            if not self.fs.async_impl:  # these may copy a file without a word
                require(self.fs.info((self / name).root)["size"] or 0)
            self.fs.get_file((self / name).root, str(into), callback=Received())

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
