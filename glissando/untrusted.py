"""What a run directory may make this machine do. A run may come from anywhere, so its files are read as an enemy's.

The rule: nothing in a run makes this machine read, execute or copy anything outside that run. A path in a run's files
is a name and is never opened; only what the user of this process names is. What a run needs besides is:

code    a copy inside the run, whose digest holds (glissando.imports), or a file that this process imported
texts   a file of this machine whose digest the run has recorded, or one that the user names now (glissando.run_files)
files   plain names below the run's directory (`require_inner_names`), no link that leads out of it (`require_no_links`)
sizes   what the manifest says, within these bounds (`most_bytes`), and what the disk has left

Digests are checked where bytes are read: glissando.storage. Passwords in URLs: glissando.urls.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from glissando.errors import RunError

#: inside a run: copies of the files that were imported when it was made
IMPORTS = "imports"
#: largest JSON file that is read, a manifest too: the random states of a thousand processes take a third of it
JSON_BYTES = 1 << 25
#: largest file of a run that is fetched from a URL, but for tensors
FILE_BYTES = 1 << 28


def require_inner_names(names: Iterable[str], where: str) -> None:
    """Raises RunError for the name of a file that lies outside of the directory that lists it."""
    for name in names:
        parts = PurePosixPath(name).parts
        is_plain = name.isprintable() and "\\" not in name and not PureWindowsPath(name).drive
        if not is_plain or not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            raise RunError(f"{where} lists {name!r}, which lies outside the run: nothing is read there")


def require_no_links(run: Path, listed: Collection[str] = ()) -> None:
    """Raises RunError for a link in the directory `run` that leads out of it.

    listed  files that may be such links, as they are only read and their digests are checked
    """
    root = os.path.realpath(run)
    for folder, directories, files in os.walk(run):
        for name in (*directories, *files):
            path = Path(folder) / name
            if not path.is_symlink() or path.relative_to(run).as_posix() in listed:
                continue
            if not Path(os.path.realpath(path)).is_relative_to(root):
                raise RunError(
                    f"{path} is a link that leads out of the run, to {os.readlink(path)}, and a run is read inside "
                    "its directory alone: put what it needs there in place of the link"
                )


def imported_names(config: Mapping[str, Any]) -> list[str]:
    """The paths in `imports` of a configuration. Raises RunError for other than paths of Python files."""
    names = config.get("imports") or []
    if not isinstance(names, list):
        raise RunError(f"imports must be a list of Python files, got {names!r}")
    for name in names:
        if not isinstance(name, str) or not file_name(name).endswith(".py") or not name.isprintable():
            raise RunError(f"imports must be a list of Python files, and {name!r} is none")
    return list(names)


def copy_name(name: str) -> str:
    """Where a run has its copy of the file that its configuration imports as `name`."""
    return f"{IMPORTS}/{file_name(name)}"


def most_bytes(name: str, record: Mapping[str, Any]) -> int:
    """The largest size that the file `name` of a run may have by its record in the manifest.

    Raises RunError where that is beyond what is read.
    """
    size = record.get("size")
    if type(size) is not int or size < 0:
        raise RunError(f"the manifest has no size of {name}: it is damaged, or of another version")
    if size > FILE_BYTES and not name.endswith(".safetensors"):
        raise RunError(f"{name} has {size:,} bytes by the manifest; at most {FILE_BYTES:,} are fetched")
    return size


def read_bounded(path: Path, most: int = FILE_BYTES) -> bytes:
    """The content of a file of a run. Raises RunError for more bytes than `most`."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise RunError(f"{path} has more than {most:,} bytes, and so many are read of such a file")
    return content


def file_name(name: str) -> str:
    return PureWindowsPath(name).name if "\\" in name else PurePosixPath(name).name
