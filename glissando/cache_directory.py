"""Where files are kept that can be made again: tokens, downloads, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from glissando.errors import DataError


def cache_dir(kind: str) -> Path:
    """The directory for files of one `kind`: under $GLISSANDO_CACHE, or ~/.cache/glissando.

    Raises DataError if it cannot be made.
    """
    path = Path(os.environ.get("GLISSANDO_CACHE") or Path.home() / ".cache" / "glissando") / kind
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the cache directory {path} ({error}); name a writable one in GLISSANDO_CACHE"
        ) from None
    return path
