"""Whether a training can be put somewhere, as far as that is seen without torch: `train` asks before importing it."""

from __future__ import annotations

import os
from pathlib import Path

from glissando.errors import RunError
from glissando.urls import is_url


def refuse_taken(path: str | Path) -> None:
    """Raise RunError for a file, a directory of other things or of a training with a checkpoint, and one that cannot be
    made. `Run.create` decides about the rest, such as what a training left that was killed before it saved anything.
    """
    if is_url(path):
        return  # `train` asks the storage
    path = Path(path).expanduser()
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; choose another name for the run directory.")
    saved = any((path / "checkpoints").glob("step-*"))
    begun = (path / ".lock").exists() or (path / "environment.json").exists()
    if path.is_dir() and any(path.iterdir()) and (saved or not begun):
        raise taken(path, saved)
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is not writable" if above.is_dir() else "is a file"
        raise RunError(f"could not make {path}: {above} {reason}. Choose a writable place.")


def taken(path: Path, saved: bool) -> RunError:
    """The error for a directory that is not empty; saved: a training has left checkpoints in it."""
    further = f" (a training: `glissando train --resume {path}` continues it)" if saved else ""
    return RunError(f"{path} exists and is not empty{further}. Choose a new name: nothing is overwritten.")
