"""Which of the paths that a user gives are URLs, and what of a URL is written down or printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Two letters at least, as C:/ is a drive; one slash too, as that is what Path makes of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)
_SCHEME = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+:/{1,2})"
# What stands before the @ of a host; a password may have a slash that nobody encoded, but a port is none.
_LOGIN = re.compile(rf"{_SCHEME}(?:[^\s/'\"]*|[^\s/'\":@]*:(?!\d+/)[^\s'\"]*)@")
_QUERY = re.compile(rf"(?P<before>{_SCHEME}[^\s'\"?]*\?)[^\s'\"?]*=[^\s'\"]*")
#: stands where a password was
HIDDEN = "***"


def is_url(path: str | Path) -> bool:
    """Whether `path` is protocol://..., which fsspec may reach, and no path of this machine."""
    return _URL.fullmatch(str(path)) is not None


def whole_url(path: str | Path) -> str:
    """protocol://rest without slashes at its end; raises ValueError for what is no URL."""
    if (match := _URL.fullmatch(str(path))) is None:
        raise ValueError(f"{path} is no URL")
    return f"{match[1].lower()}://{match[2].rstrip('/')}"


def redacted(text: str) -> str:
    """`text` with *** in place of the login and the query of every URL in it, which may hold passwords and keys."""
    text = _LOGIN.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _QUERY.sub(rf"\g<before>{HIDDEN}", text)


def is_redacted(url: str) -> bool:
    """Whether the login or the query of `url` is the mark that `redacted` has left."""
    return f"://{HIDDEN}@" in url or url.endswith(f"?{HIDDEN}")


def without_passwords(value: Any) -> Any:
    """Nested dicts and lists, every text in them that is a URL `redacted`."""
    if isinstance(value, dict):
        return {name: without_passwords(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_passwords(each) for each in value]
    return redacted(value) if isinstance(value, str) and is_url(value) else value
