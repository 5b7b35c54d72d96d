"""Which of the paths that a user gives are URLs."""

from __future__ import annotations

import re
from pathlib import Path

# Two letters at least, as C:/ is a drive; one slash too, as that is what Path makes of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)


def is_url(path: str | Path) -> bool:
    """Whether `path` is protocol://..., which fsspec may reach, and no path of this machine."""
    return _URL.fullmatch(str(path)) is not None


def whole_url(path: str | Path) -> str:
    """protocol://rest without slashes at its end; raises ValueError for what is no URL."""
    if (match := _URL.fullmatch(str(path))) is None:
        raise ValueError(f"{path} is no URL")
    return f"{match[1].lower()}://{match[2].rstrip('/')}"
