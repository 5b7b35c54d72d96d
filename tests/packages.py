"""Packages with entry points, as an installer would leave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import glissando


def installed(site: Path, name: str, entry_points: Mapping[str, Mapping[str, str]] = {}) -> None:
    """Write the metadata of a package into the directory `site`: {group: {name: "module:function"}}."""
    folder = site / f"{name}-{glissando.__version__}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {glissando.__version__}\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {target}" for point, target in points.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
