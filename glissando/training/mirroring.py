"""A run that is copied to a URL after every save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glissando.errors import RunError
from glissando.remote import Mirror, take_up, work_directory
from glissando.training.hook import Hook
from glissando.urls import is_url, whole_url


class Mirroring(Hook):
    """A copy that fails while training goes on is reported, and the next save tries again; at the end it raises."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror

    def saved(self, loop: Any) -> None:
        try:
            self.mirror.push()
        except RunError as error:
            for hook in loop.hooks:
                hook.warning(f"{error} Training continues; the next save tries again.")


def new_place(out: str | Path) -> tuple[Path, Mirroring | None]:
    """The directory to train a new run into, and what copies it where `out` is a URL."""
    if not is_url(out):
        return Path(out).expanduser(), None
    work = work_directory(whole_url(out))
    return work, Mirroring(Mirror(whole_url(out), work))


def old_place(path: str | Path) -> tuple[Path, Mirroring | None]:
    """The directory in which the run at `path` goes on, as `new_place`. Raises RunError where a URL has none."""
    if not is_url(path):
        return Path(path).expanduser(), None
    work = take_up(whole_url(path))
    return work, Mirroring(Mirror(whole_url(path), work))
