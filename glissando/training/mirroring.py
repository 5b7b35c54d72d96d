"""A run that is copied to a URL after every save."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from glissando.checkpoints import CHECKPOINTS, LATEST
from glissando.errors import RunError
from glissando.remote import BASE, ENVIRONMENT, METRICS, SAMPLES, place, take_up, work_directory
from glissando.storage import MANIFEST, read_manifest, verify_manifest
from glissando.training.loop import Hook
from glissando.urls import is_url, redacted, whole_url


class Mirror(Hook):
    """The run directory `path`, copied to `url` after every save: what is not there yet alone.

    A copy that fails while training goes on is reported, and the next save tries again; at the end it raises.
    """

    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = redacted(whole_url(url)), path
        self._there = place(url)

    def saved(self, loop: Any) -> None:
        try:
            self.push()
        except RunError as error:
            for hook in loop.hooks:
                hook.message(f"{error} Training continues; the next save tries again.")

    def is_begun(self, job: str | None, config: bytes) -> bool:
        """Whether the run at `url` is that of torchrun's `job` with this config.yaml, and has a checkpoint."""
        made = None if job is None else self._there.read(ENVIRONMENT)
        if made is None or self._there.read(LATEST) is None or self._there.read("config.yaml") != config:
            return False
        return bool(json.loads(made).get("torchrun") == job)

    def require_free(self) -> None:
        """Raise RunError where anything lies at the URL."""
        if self._there.names():
            raise RunError(
                f"{self.url} exists and is not empty. Resume that run, or choose a new name: nothing is overwritten."
            )

    def push(self) -> None:
        """Checkpoints first, then logs, what the run's manifest lists, `latest` and the manifest; checkpoints that are
        no more are deleted last. Raises RunError, which says where the run is, if the storage does not take it."""
        try:
            kept = [folder.parent for folder in (self.path / CHECKPOINTS).glob(f"step-*/{MANIFEST}")]
            for folder in [*kept, *(base.parent for base in self.path.glob(f"{BASE}/{MANIFEST}"))]:
                self._push(folder.relative_to(self.path).as_posix())
            for name in (METRICS, SAMPLES):
                if (self.path / name).is_file():
                    self._there.put(name, (self.path / name).read_bytes())
            self._push("")
            for gone in {*(self._there / CHECKPOINTS).names()} - {folder.name for folder in kept}:
                (self._there / CHECKPOINTS / gone).remove()
        except (FileNotFoundError, RunError) as error:
            raise RunError(
                f"the run was not copied to {self.url}: {error}. All of it is in {self.path}; glissando train --resume "
                f"{shlex.quote(self.url)} continues from there and copies it again."
            ) from error

    def _push(self, name: str) -> None:
        """The files that the manifest of a directory lists and the one at the URL does not; the manifest last."""
        folder, there = self.path / name, self._there / name if name else self._there
        before = there.read(MANIFEST)
        # One that was taken up elsewhere has none of its own until it ends.
        text = (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else before
        if text is not None and before != text:
            listed = read_manifest(folder)
            if name and before is not None:  # of a training that was killed before it could name this checkpoint
                there.remove()
                before = None
            known = {} if before is None else json.loads(before)["files"]
            changed = [each for each, entry in listed.items() if known.get(each) != entry]
            verify_manifest(folder, changed, "It is not copied.")
            for each in changed:
                there.put(each, folder / each)
        if not name and (self.path / LATEST).is_file():
            there.put(LATEST, (self.path / LATEST).read_bytes())
        if text is not None and before != text:
            there.put(MANIFEST, text)


def place_of(out: str | Path, resumed: bool = False) -> tuple[Path, Mirror | None]:
    """The directory in which a run is trained, or goes on, and what copies it where `out` is a URL.

    Raises RunError where a URL has none to go on with.
    """
    if not is_url(out):
        return Path(out).expanduser(), None
    mirror = Mirror(str(out), (take_up if resumed else work_directory)(str(out)))
    return mirror.path, mirror
