"""What a long measurement shows while it runs: a bar on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

#: seconds between lines where there is no terminal
QUIET_SECONDS = 20.0

T = TypeVar("T")


def track(
    items: Iterable[T], what: str, *, total: int | None = None, unit: str = "", file: TextIO | None = None
) -> Iterator[T]:
    """The items; meanwhile `file`, stderr by default, shows how much is done, and the time elapsed and left.

    total   the number of items, where it is not their length
    """
    file = file or sys.stderr
    total = len(items) if total is None and isinstance(items, Sized) else total
    if file.isatty():
        from tqdm import tqdm

        yield from tqdm(items, desc=what, total=total, unit=unit or "it", file=file, leave=False, dynamic_ncols=True)
        return
    began = said = time.perf_counter()
    for done, item in enumerate(items):
        if (now := time.perf_counter()) - said >= QUIET_SECONDS:
            said = now
            count = f"{done} of {total}" if total else f"{done}"
            times = elapsed_and_left(now - began, done / total if total else 0.0)
            print(f"{what}: {count}{unit and ' ' + unit}, {times}", file=file, flush=True)
        yield item


def elapsed_and_left(seconds: float, share: float) -> str:
    """The time since the start, and what is left of it where a share above 0 is done."""
    left = f", about {minutes(seconds * (1 - share) / share)} left" if share > 0 else ""
    return f"{minutes(seconds)} elapsed{left}"


def minutes(seconds: float) -> str:
    """1:05, or 2:01:05 from an hour on."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
