"""One training of a comparison in a worker process of a cluster: what `glissando.compare.cluster` has Ray call there.

The worker trains in the directory of the comparison, which all machines share, or in a directory of its own that is
copied to the comparison's URL. It reports to the command, in whose table it is shown.
"""

from __future__ import annotations

import contextlib
import copy as copies
import dataclasses
import io
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from glissando import __version__
from glissando.compare.at_url import Copy
from glissando.compare.plan import Job
from glissando.compare.training import train_and_measure
from glissando.config import from_dict
from glissando.errors import ConfigError, GlissandoError, RunError, Stopped
from glissando.imports import import_file
from glissando.process import prepare_to_train
from glissando.remote import work_directory
from glissando.run_files import alone
from glissando.runs import TOKENIZER
from glissando.training.config import RunConfig

#: seconds between two reports of a worker
EVERY = 0.5
#: seconds in which the lock of a machine that is lost is free: NFS takes 90
_LOCKED_FOR = 120.0

#: what happened, such as ("status", "37 %"); see `Reporter`
Event = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker needs to know.

    config   of the run, as plain values: what --import registers is not known before the files are imported
    out      the directory of the comparison, absolute; the run is in it
    seal     a file in it that this command has made: a worker that does not see it sees another directory; with a URL
             the comparison's id
    url      of the comparison; then `out` is on the command's machine alone
    folder   where the command was started, which relative paths of texts begin at
    imports  files to import
    argv     the command line, which the run's record has
    threads  that compute
    gpus     whether it has any
    machine  the command's
    version  of this library, in the command's process
    """

    job: Job
    config: dict[str, Any]
    out: Path
    seal: str
    folder: str
    imports: list[str]
    argv: list[str]
    threads: int
    gpus: bool
    url: str | None = None
    machine: str = dataclasses.field(default_factory=platform.node)
    version: str = __version__


class WorkerEnding(Exception):
    """A worker that was asked to end by a signal of its own, as when its machine is shut down: all is saved, and
    another one can go on."""


def carry_out(order: Order, send: Callable[[list[Event]], bool]) -> dict[str, Any] | Exception | None:
    """Train and measure; what was measured, None where the command asked to stop, and an error that stems from what the
    user gave, as a value: it is the command that raises it.

    send    takes what happened since the last time, and returns whether the command has asked to stop

    Raises WorkerEnding where it is this worker alone that has to end.
    """
    # Ctrl-C is for the command, which asks the workers to stop, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reporter = Reporter(send)
    reporter.tell("began", platform.node(), os.getpid())
    try:
        copy = None if order.url is None else Copy(order.url, work_directory(order.url).resolve())
        _prepare(order, copy)
        config, path = _config(order, copy), order.job.path(order.out if copy is None else copy.path)
        _wait_for(path, reporter)
        return train_and_measure(config, order.job, path, reporter, None if copy is None else copy.url_of(path))
    except Stopped as error:
        if reporter.stop_asked():
            return None
        raise WorkerEnding(f"{platform.node()}: {error}") from error
    except GlissandoError as error:
        if order.machine != platform.node():  # where something may be missing that the user has
            error.args = (f"on {platform.node()}: {error}",)
        return error
    except OSError as error:
        return error
    finally:
        reporter.flush()


def _config(order: Order, copy: Copy | None) -> RunConfig:
    """Of the run; the comparison's tokenizer, which is in the command's `out`, is taken from this machine's copy."""
    config = copies.deepcopy(order.config)
    tokenizer = config["data"]["tokenizer"]
    if copy is not None and tokenizer.get("path") == str(order.out / TOKENIZER):
        tokenizer["path"] = str(copy.path / TOKENIZER)
    return from_dict(RunConfig, config)


def _prepare(order: Order, copy: Copy | None) -> None:
    """Make this process as the command's. Raises ConfigError or RunError where it cannot see what that sees."""
    if order.version != __version__:
        raise RunError(f"the worker has glissando {__version__} and the command {order.version}: install the same")
    if copy is not None:
        copy.require(order.seal)
    elif not (order.out / order.seal).is_file():
        raise RunError(
            f"the worker does not see {order.out}, or sees another directory there: name an --out on a disk that all "
            "machines of the cluster have at the same place"
        )
    with contextlib.suppress(OSError):  # which matters where a path is relative, and that is then said of it
        os.chdir(order.folder)
    for file in order.imports:
        try:
            import_file(file)
        except ConfigError as error:
            raise ConfigError(f"{error}; all machines of the cluster need it at the same place") from error
    sys.argv = list(order.argv)
    if not order.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is asked for
    prepare_to_train()
    torch.set_num_threads(order.threads)


def _wait_for(run: Path, reporter: Reporter) -> None:
    """Wait while the run's directory is locked: on a network disk the lock of a lost machine outlives it.

    Raises RunError where it stays so, as another process trains there.
    """
    deadline = time.monotonic() + _LOCKED_FOR
    while run.is_dir():
        try:
            with alone(run):
                return
        except RunError as error:
            if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() > deadline:
                raise
        reporter.status(f"{run} is locked by another process")
        if reporter.stop_asked():
            raise Stopped
        time.sleep(EVERY)


class Reporter:
    """What a training is shown on in a worker: as `glissando.compare.table.Table`, to which it all goes.

    Events are ("began", machine, pid), ("log", text), ("print", text), ("status", text), ("bits", text) and ("speed",
    model, training, tokens/s). The state of a model is the table's to say, as other trainings of it may go on.
    """

    def __init__(self, send: Callable[[list[Event]], bool]) -> None:
        self.log = io.StringIO()
        self._send, self._events, self._status = send, list[Event](), ""
        self._sent, self._stop = time.monotonic(), False

    def tell(self, *event: Any) -> None:
        """Report at once."""
        self._events.append(event)
        self.flush()

    def set(self, model: str, **cells: Any) -> None:
        if "bits_byte" in cells:
            self._events.append(("bits", cells["bits_byte"]))

    def status(self, text: str) -> None:
        self._status = text
        self.stop_asked()

    def print(self, text: str, stays: bool = False) -> None:
        self._events.append(("print", text))

    def speed(self, model: str, training: str, tokens_per_second: float) -> None:
        self._events.append(("speed", model, training, tokens_per_second))

    def stop_asked(self) -> bool:
        """Whether the command has asked to stop, as of the last report."""
        if time.monotonic() - self._sent >= EVERY:
            self.flush()
        return self._stop

    def flush(self) -> None:
        """Report what has not been reported."""
        self._events += list(self._pending())
        events, self._events, self._sent = self._events, [], time.monotonic()
        self._stop = self._send(events) or self._stop

    def _pending(self) -> Iterator[Event]:
        if text := self.log.getvalue():
            self.log.seek(0)
            self.log.truncate()
            yield ("log", text)
        if self._status:
            yield ("status", self._status)
            self._status = ""
