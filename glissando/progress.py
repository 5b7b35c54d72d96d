"""What a long measurement shows while it runs: a bar on a terminal; elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TextIO, TypeVar

#: seconds between lines where there is no terminal
QUIET_SECONDS = 20.0
#: seconds behind which a terminal on which nothing was written shows how long the program has worked
SILENT_SECONDS = 4.0

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


@contextlib.contextmanager
def phases(total: int, file: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """A function that is called with what begins, `total` times; a terminal shows a bar, other outputs a line each."""
    file = file or sys.stderr
    if not file.isatty():
        yield lambda phase: print(phase, file=file, flush=True)
        return
    from tqdm import tqdm

    with tqdm(total=total, file=file, leave=False, dynamic_ncols=True, bar_format="{desc}{bar}| {n}/{total}") as bar:
        begun = 0

        def begin(phase: str) -> None:
            nonlocal begun
            bar.set_description(phase, refresh=False)
            bar.update(min(begun, 1))  # the phase before has ended
            begun += 1
            bar.refresh()

        yield begin


class _Noticed:
    """A stream that notes when it was written to, and clears the `clock` that stands on the terminal before it is."""

    def __init__(self, stream: TextIO, clock: _Clock) -> None:
        self._stream, self._clock = stream, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._clock.lock:
            self._clock.hide()
            self._clock.written = time.perf_counter()
            if text:  # a bar that has ended goes back to the beginning of its line, which is empty
                self._clock.is_mid_line = not text.endswith(("\n", "\r"))
                is_bar = self._clock.is_mid_line and text.startswith("\r")
                self._clock.bar = text.strip("\r ").removeprefix("\x1b[K") if is_bar else ""
            return self._stream.write(text)


class _Clock(threading.Thread):
    """Shows the time since the start in the terminal's last line while nothing else is written.

    bar  what stands in that line, where a bar is drawn there: the time follows it
    """

    def __init__(self, terminal: TextIO, silent: float) -> None:
        super().__init__(daemon=True)
        self.terminal, self.silent, self.ended = terminal, silent, threading.Event()
        self.lock = threading.RLock()  # what is finalized while a line is written may write one
        self.began = self.written = time.perf_counter()
        self.is_mid_line = self.is_shown = False
        self.bar = ""

    def run(self) -> None:
        while not self.ended.wait(self.silent / 4):
            with self.lock:
                now = time.perf_counter()
                is_free = bool(self.bar) or not self.is_mid_line
                if now - self.written >= self.silent and is_free and not self.ended.is_set():
                    working = f"working, {minutes(now - self.began)}"
                    room = shutil.get_terminal_size().columns - 3 - len(working)
                    self._write(f"\r\x1b[K{self.bar[:room]}{self.bar and ', '}{working}")
                    self.is_shown = True

    def hide(self) -> None:
        if self.is_shown:
            self._write(f"\r\x1b[K{self.bar}")
            self.is_shown = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is closed ends nothing
            print(text, end="", file=self.terminal, flush=True)


@contextlib.contextmanager
def never_silent(silent: float = SILENT_SECONDS) -> Iterator[None]:
    """While the block runs, a terminal at stderr shows the time whenever nothing was printed for `silent` seconds.

    Of several processes that train together the first one alone shows it, as it alone prints.
    """
    out, err = sys.stdout, sys.stderr
    # As glissando.training.launch.rank has it, which would import PyTorch.
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    if err is None or not err.isatty() or rank != "0":
        yield
        return
    clock = _Clock(err, silent)
    sys.stderr = _Noticed(err, clock)
    if out is not None and out.isatty():  # what goes into a file is nothing on the terminal
        sys.stdout = _Noticed(out, clock)
    clock.start()
    try:
        yield
    finally:
        clock.ended.set()
        with clock.lock:
            clock.hide()
        sys.stdout, sys.stderr = out, err


def elapsed_and_left(seconds: float, share: float) -> str:
    """The time since the start, and what is left of it where a share above 0 is done."""
    left = f", about {minutes(seconds * (1 - share) / share)} left" if share > 0 else ""
    return f"{minutes(seconds)} elapsed{left}"


def minutes(seconds: float) -> str:
    """1:05, or 2:01:05 from an hour on."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
