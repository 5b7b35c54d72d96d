"""Trainings of a comparison side by side, as tasks of Ray: on this machine, or on all of a cluster.

A task trains one run in the directory of the comparison, which all machines share, and measures it. Where the
comparison is at a URL, each worker trains in a directory of its own machine, which is copied there. What a lost worker
leaves is a run with its checkpoints: the task is given to another worker, which goes on from the newest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from glissando.compare.measure import read_measured
from glissando.compare.plan import MEASURED, Comparison, Job
from glissando.compare.table import Table
from glissando.compare.worker import EVERY, Event, Order, WorkerEnding, carry_out
from glissando.errors import ConfigError, MissingExtraError, RunError, Stopped, TrainingError
from glissando.imports import imported
from glissando.training.stopping import ASKING, Stopping

#: bytes of memory that Ray shares between processes of this machine, about the least it takes
_SHARED_BYTES = 100 << 20
#: characters of a folder in which the names of Ray's sockets still fit, of which systems take about 100
_LONGEST_FOLDER = 40
#: seconds in which a file that a worker has written is seen by every machine that shares the disk
_SEEN_AFTER = 90.0


@dataclass(frozen=True)
class Cluster:
    """Where and how Ray trains.

    address  of a running cluster, as ray.init takes it; None: $RAY_ADDRESS, or else one is made of this machine, for as
             long as the comparison takes. Where the process is connected to one already, that is used
    cpus     cores of each training, which computes with as many threads
    gpus     of each training, or a fraction of one that several share; None: 1 where the cluster has any, else 0
    retries  how often a training goes on after it has lost its worker
    """

    address: str | None = None
    cpus: int = 1
    gpus: float | None = None
    retries: int = 3

    def check(self, comparison: Comparison) -> None:
        """Raise ConfigError for numbers that cannot be, or a comparison that is none of side by side; MissingExtraError
        without Ray."""
        if self.cpus < 1:
            raise ConfigError(f"--cpus must be at least 1, got {self.cpus}")
        if self.gpus is not None and not (0 <= self.gpus < 1 or self.gpus == int(self.gpus) >= 1):
            raise ConfigError(f"--gpus must be a whole number or a fraction below 1, got {self.gpus}")
        if self.retries < 0:
            raise ConfigError(f"--retries must be at least 0, got {self.retries}")
        if comparison.turns > 1:
            raise ConfigError(
                f"--turns {comparison.turns} alternates trainings in one process, and with --on ray they run side by "
                "side: leave out one of the two"
            )
        _ray()


def _ray() -> Any:
    """The package. Raises MissingExtraError without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A task without GPUs sees none: the worker sees to that itself, and Ray has nothing to warn of.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "--on ray needs ray: pip install -e '.[ray]' in a checkout, on every machine of the cluster"
        ) from error
    return ray


class Workers:
    """A context in which Ray trains jobs of a comparison. Ray is started by the first job that is not yet finished."""

    def __init__(self, cluster: Cluster, comparison: Comparison, table: Table) -> None:
        self.cluster, self.comparison, self.table = cluster, comparison, table
        self._stack = contextlib.ExitStack()
        self._ray: Any = None
        self._board: Any = None
        self._taken: Any = None  # what the board has been asked for
        self._seal, self._has_gpus = "", False
        self._jobs: list[Job] = []  # by the number of their task
        self._begun: set[int] = set()
        self._at_work: dict[int, str] = {}  # the status of each
        if "seconds" in (comparison.budget.kind, comparison.probes and comparison.probe_budget.kind):
            table.print(
                "a budget in seconds is wall time: trainings on one machine share it, so that each does less in its "
                "time than it would alone",
                stays=True,
            )

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # ---------------------------------------------------------------------- trainings

    def results(self, jobs: Sequence[Job]) -> Generator[tuple[Job, dict[str, Any]], None, None]:
        """Train and measure the jobs; each with what was measured of it, or that it has failed, as it ends.

        Raises what a training raises because of what the user gave, TrainingError for one that has lost its worker too
        often, and Stopped after a signal. Whatever ends it, the other trainings stop as a signal would make them,
        with everything saved.
        """
        if not jobs:
            return
        self._start()
        waiting = {self._submit(job): job for job in jobs}
        try:
            # Ray prints there what it knows of lost workers, in lines that would break the table.
            with contextlib.redirect_stdout(self.table.log), Stopping() as stopping:
                while waiting:
                    done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=EVERY)
                    self._show(len(waiting))
                    if stopping.asked is not None:
                        raise Stopped("the comparison was stopped", stopping.asked)
                    for task in done:
                        job = waiting.pop(task)
                        figures = self._figures(job, task)
                        self._ended(job)
                        yield job, figures
                self._show(0)
        finally:
            if waiting:
                self._stop(waiting)

    def _submit(self, job: Job) -> Any:
        config = self.comparison.config(job)
        gpus = self.cluster.gpus
        if gpus is None:
            gpus = float(self._has_gpus and config.training.accelerator != "cpu")
        order = Order(
            job, config.as_dict(), self.comparison.directory.resolve(), self._seal, os.getcwd(), imported(), sys.argv,
            self.cluster.cpus, gpus > 0, self.comparison.url,
        )  # fmt: skip
        self._jobs.append(job)
        task = self._ray.remote(_train).options(
            num_cpus=self.cluster.cpus,
            num_gpus=gpus,
            max_retries=self.cluster.retries,
            retry_exceptions=[WorkerEnding],
            scheduling_strategy="SPREAD",
        )
        return task.remote(order, self._board, len(self._jobs) - 1)

    def _figures(self, job: Job, task: Any) -> dict[str, Any]:
        """What the task has measured; raises as `results`."""
        errors = self._ray.exceptions
        try:
            outcome = self._ray.get(task)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ModuleNotFoundError) or "failed to import" in str(error):
                raise RunError(f"workers need glissando, and what it needs, on every machine: {error.cause}") from error
            if not isinstance(error.cause, WorkerEnding):
                raise  # a defect, with its traceback
            raise self._lost(job, str(error.cause)) from error
        except errors.RayError as error:
            raise self._lost(job, str(error)) from error
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None  # None: it was stopped, which only `_stop` asks for
        path = job.path(self.comparison.directory)
        if self.comparison.copy is not None:
            self.comparison.copy.fetch_run(path)
        deadline = time.monotonic() + _SEEN_AFTER
        while read_measured(path) is None:  # which the report is made from
            if time.monotonic() > deadline:
                raise RunError(
                    f"a worker has written {path / MEASURED}, which this machine does not see: name an --out on a disk "
                    "that all machines of the cluster have at the same place"
                )
            time.sleep(EVERY)
        return outcome

    def _lost(self, job: Job, why: str) -> TrainingError:
        run, reason = job.path(self.comparison.directory), why.strip().partition("\n")[0]
        path = run if self.comparison.copy is None else self.comparison.copy.url_of(run)
        return TrainingError(
            f"{job.title}: its worker was lost {self.cluster.retries + 1} times, the last time because: {reason} What "
            f"was saved is in {path}, and the same command goes on from there; --retries allows for more"
        )

    def _stop(self, waiting: dict[Any, Job]) -> None:
        """Have the trainings that are at work save, and drop the others; a second Ctrl-C ends them at once."""
        text = "stopping: each training completes the step in progress and saves; Ctrl-C again ends them at once"
        self.table.print(text, stays=True)
        try:
            self._show(len(waiting))
            for task, job in waiting.items():
                if self._jobs.index(job) not in self._begun:
                    self._ray.cancel(task)
            while waiting:
                self._board.stop.remote()  # again and again: it may have been lost, and another one made
                done, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=EVERY)
                for task in done:
                    self._ended(waiting.pop(task))
                self._show(len(waiting))
        except BaseException:
            for task in waiting:
                self._ray.cancel(task, force=True)
            raise

    # ---------------------------------------------------------------------- what is shown

    def _show(self, left: int) -> None:
        """What the workers have reported since the last time."""
        if self._taken is None:
            self._taken = self._board.take.remote()
        if not self._ray.wait([self._taken], timeout=EVERY)[0]:
            return
        taken, self._taken = self._taken, None
        try:
            reported = self._ray.get(taken)
        except self._ray.exceptions.RayActorError:
            return  # what was reported is lost, and nothing else
        for number, event in reported:
            self._take(number, self._jobs[number], event)
        if self._at_work:
            self.table.status(f"{len(self._at_work)} at work, {left} left; {next(iter(self._at_work.values()))}")

    def _take(self, number: int, job: Job, event: Event) -> None:
        kind, *values = event
        if kind == "began":
            if number in self._begun:
                self.table.print(f"{job.title}: its worker was lost; it goes on on {values[0]}", stays=True)
            self._begun.add(number)
            self._at_work[number] = f"{job.title}: begins"
            self._set_state(job.model)
        elif kind == "log":
            lines = [f"[{job.title}] {line}" for line in values[0].splitlines()]
            print("\n".join(lines), file=self.table.log, flush=True)
        elif kind == "status" and number in self._at_work:
            self._at_work[number] = values[0]
        elif kind == "print":
            self.table.print(values[0], stays=True)
        elif kind == "bits":
            self.table.set(job.model, bits_byte=values[0])
        elif kind == "speed":
            self.table.speed(*values)

    def _ended(self, job: Job) -> None:
        self._at_work.pop(self._jobs.index(job), None)
        self._set_state(job.model)

    def _set_state(self, model: str) -> None:
        """What of the model is at work, "2 run" for two seeds."""
        jobs = [self._jobs[number] for number in self._at_work]
        kinds = Counter(job.task or job.kind for job in jobs if job.model == model)
        state = ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in kinds.items())
        self.table.set(model, state=state or "waiting")

    # ---------------------------------------------------------------------- Ray itself

    def _start(self) -> None:
        """Connect to the cluster or make one. Raises ConfigError where there is none, or it is too small."""
        if self._ray is not None:
            return
        self.table.status("starting Ray")
        ray = self._ray = _ray()
        address = self.cluster.address or os.environ.get("RAY_ADDRESS") or None
        own = address is None and not ray.is_initialized()
        if own:
            self._stack.enter_context(_local_cluster(ray))
        elif not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as error:
                raise ConfigError(f"no Ray cluster answers at {address}: {error}") from error
            self._stack.callback(ray.shutdown)
        self._require_room(ray, own)
        copy = self.comparison.copy
        self._seal = self._stack.enter_context(_seal_in(self.comparison.directory)) if copy is None else copy.seal
        self._board = ray.remote(_board()).options(num_cpus=0, max_restarts=-1).remote()
        self._stack.callback(self._end_board)

    def _end_board(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._board)

    def _require_room(self, ray: Any, own: bool) -> None:
        """Raises ConfigError where no machine has the cores or GPUs of one training; a cluster may still grow."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU", 0) > 0 for node in nodes)
        needed = {"CPU": self.cluster.cpus, "GPU": self.cluster.gpus or 0}
        if any(all(node.get(name, 0) >= number for name, number in needed.items()) for node in nodes):
            return
        most = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        text = f"no machine of the cluster has {needed['CPU']} CPUs and {needed['GPU']:g} GPUs (there are: {most})"
        if own:
            raise ConfigError(f"{text}: lower --cpus or --gpus")
        self.table.print(f"{text}: trainings wait until one joins it", stays=True)


@contextlib.contextmanager
def _local_cluster(ray: Any) -> Iterator[None]:
    """One of this machine, which ends with the context; all that it writes is in a temporary folder."""
    folder = tempfile.gettempdir()
    if len(folder) > _LONGEST_FOLDER and os.path.isdir("/tmp"):
        folder = "/tmp"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # without one Ray writes a token into the home directory
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: what else the machine does would come first
    with tempfile.TemporaryDirectory(prefix="ray-", dir=folder, ignore_cleanup_errors=True) as temporary:
        try:
            try:
                with _unsignalled():
                    ray.init(
                        address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                        object_store_memory=_SHARED_BYTES, _temp_dir=temporary, _plasma_directory=temporary,
                        _node_ip_address="127.0.0.1",
                    )  # fmt: skip
            except Exception as error:
                raise TrainingError(
                    f"Ray does not start on this machine, which may be too busy: {error} Give the same command again, "
                    "or leave out --on ray"
                ) from error
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _unsignalled() -> Iterator[None]:
    """What is started in it gets no signals that ask to stop: a terminal that is closed, or `timeout`, sends them to
    all processes of the command, and it is for the command to end the others in order."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _seal_in(out: Path) -> Iterator[str]:
    """The name of a file there, for as long as the context lasts."""
    with tempfile.NamedTemporaryFile(dir=out, prefix=".cluster-") as file:
        yield Path(file.name).name


def _board() -> type:
    """What workers report to and the command reads, an actor of Ray. A class of a function goes to its process as it
    is, which then imports nothing of this library."""

    class Board:
        def __init__(self) -> None:
            self.events: list[tuple[int, Event]] = []
            self.stopping = False

        def tell(self, number: int, events: list[Event]) -> bool:
            self.events += [(number, event) for event in events]
            return self.stopping

        def take(self) -> list[tuple[int, Event]]:
            taken, self.events = self.events, []
            return taken

        def stop(self) -> None:
            self.stopping = True

    return Board


def _train(order: Order, board: Any, number: int) -> dict[str, Any] | Exception | None:
    """The task."""
    sender = _Sender(board, number)
    try:
        return carry_out(order, sender)
    finally:
        sender.wait()


class _Sender:
    """Sends events to the board, and waits for no answer: whether to stop is that of an earlier time."""

    def __init__(self, board: Any, number: int) -> None:
        self.board, self.number = board, number
        self.answer: Any = None
        self.stop = False

    def __call__(self, events: list[Event]) -> bool:
        ray = _ray()
        with contextlib.suppress(ray.exceptions.RayError):
            if self.answer is not None and ray.wait([self.answer], timeout=0)[0]:
                self.stop = self.stop or ray.get(self.answer)
            self.answer = self.board.tell.remote(self.number, events)
        return self.stop

    def wait(self) -> None:
        """Until the last events have arrived: the task's result comes after them."""
        with contextlib.suppress(_ray().exceptions.RayError):
            _ray().wait([self.answer], timeout=5)
