"""Trainings of a comparison side by side, as tasks of Ray: on this machine, or on a cluster that shares a disk.

A task trains one run in the comparison's directory and measures it, as the command itself would. Ray gives the task of
a lost worker to another one, which resumes the run from its newest checkpoint. A file in the directory asks the
trainings to stop.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glissando.allocator import prepare_to_train
from glissando.compare.log import EVERY, STOP, Log
from glissando.compare.plan import PLAN, Comparison, Job
from glissando.compare.training import train_and_measure
from glissando.config import from_dict
from glissando.errors import ConfigError, GlissandoError, MissingExtraError, RunError, Stopped, TrainingError
from glissando.imports import import_file, imported
from glissando.training.config import RunConfig
from glissando.training.stopping import Stopping

_RETRIES = 3  # of a training whose worker was lost


@dataclass(frozen=True)
class Cluster:
    """Where and how Ray trains.

    cpus  cores of each training, and its number of threads
    gpus  of each training, or a fraction of one; None: 1 where the cluster has any, else 0

    The cluster is that of $RAY_ADDRESS, or else one that is started on this machine for the time of the comparison. A
    process that is connected to Ray uses that connection.
    """

    cpus: int = 1
    gpus: float | None = None

    def results(
        self, comparison: Comparison, jobs: Sequence[Job], log: Log
    ) -> Generator[tuple[Job, dict[str, Any]], None, None]:
        """Train and measure the jobs; each with its figures, or the record of its failure, as it ends.

        Raises what a training raises because of what the user gave, TrainingError for a training that has lost its
        worker too often, and Stopped after a signal. The other trainings then stop with everything saved.
        """
        if not jobs:
            return
        ray, stop = require_ray(), comparison.out / STOP
        with _connected(ray), contextlib.redirect_stdout(log.kept), Stopping() as stopping:
            waiting = {self._submit(ray, comparison, job): job for job in jobs}
            try:
                while waiting:
                    done, _ = ray.wait(list(waiting), num_returns=1, timeout=EVERY)
                    log.status(f"on Ray: {len(waiting)} trainings left of {len(jobs)}")
                    if stopping.asked is not None:
                        raise Stopped("the comparison was stopped", stopping.asked)
                    for task in done:
                        job = waiting.pop(task)
                        yield job, _figures(ray, task, job, job.path(comparison.out))
            finally:
                if waiting:
                    log.print("stopping: each training completes the step in progress and saves")
                    stop.touch()
                    ray.wait(list(waiting), num_returns=len(waiting), timeout=None)
                    stop.unlink(missing_ok=True)

    def _submit(self, ray: Any, comparison: Comparison, job: Job) -> Any:
        config, has_gpus = comparison.config(job), ray.cluster_resources().get("GPU", 0) > 0
        gpus = float(has_gpus and config.training.accelerator != "cpu") if self.gpus is None else self.gpus
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= gpus for node in nodes):
            raise ConfigError(
                f"no machine of the cluster has {self.cpus} CPUs and {gpus:g} GPUs: lower --cpus or --gpus"
            )
        task = ray.remote(_train).options(
            num_cpus=self.cpus, num_gpus=gpus, max_retries=_RETRIES, retry_exceptions=[WorkerEnding]
        )
        out = comparison.out.resolve()
        return task.remote(job, config.as_dict(), out, self.cpus, gpus > 0, os.getcwd(), imported(), sys.argv)


def _figures(ray: Any, task: Any, job: Job, path: Path) -> dict[str, Any]:
    try:
        figures = ray.get(task)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, GlissandoError | OSError):
            raise cause from None
        if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(cause, WorkerEnding):
            raise  # a defect, with its traceback
        raise TrainingError(
            f"{job.title}: its worker was lost {_RETRIES + 1} times, the last time because: "
            f"{str(cause or error).strip().partition(chr(10))[0]} What was saved is in {path}: the same command goes "
            "on from there"
        ) from error
    if figures is None:
        raise Stopped("the comparison was stopped")
    return figures


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to the cluster, or start one on this machine whose files are in a temporary folder."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address and "RAY_AUTH_TOKEN_PATH" not in os.environ:  # or Ray writes one into the home directory
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: everything else would come first
    # The names of sockets must fit in a hundred characters, so that a long TMPDIR does not serve.
    folder = "/tmp" if len(tempfile.gettempdir()) > 40 and os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="ray-", dir=folder, ignore_cleanup_errors=True) as temporary:
        options: dict[str, Any] = {"address": address}
        if not address:
            options = {
                "address": "local", "include_dashboard": False, "object_store_memory": 100 << 20,
                "_temp_dir": temporary, "_plasma_directory": temporary, "_node_ip_address": "127.0.0.1",
            }  # fmt: skip
        # Processes that start now ignore Ctrl-C: the command gets it, and ends them in order.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:
            where = f"no Ray cluster answers at {address}" if address else "Ray does not start on this machine"
            raise ConfigError(f"{where}: {error}") from error
        finally:
            signal.signal(signal.SIGINT, before)
        try:
            yield
        finally:
            ray.shutdown()


def require_ray() -> Any:
    """The package. Raises MissingExtraError without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "--on ray needs ray: pip install -e '.[ray]' in a checkout, on every machine of the cluster"
        ) from error
    return ray


# ---------------------------------------------------------------------- in the worker


class WorkerEnding(Exception):
    """The worker's machine shuts down: all is saved, and another worker can go on."""


def _train(
    job: Job, config: dict[str, Any], out: Path, threads: int, gpus: bool, folder: str, imports: list[str],
    argv: list[str],
) -> dict[str, Any] | None:  # fmt: skip
    """The task: the figures; None where the command asked to stop.

    config  plain values, as --import registers classes
    """
    if not (out / PLAN).is_file():
        raise RunError(
            f"a worker does not see the comparison in {out}: name an --out on a disk that all machines of the cluster "
            "have at the same place"
        )
    os.chdir(folder)
    for file in imports:  # all machines of the cluster need them at the same place
        import_file(file)
    sys.argv = list(argv)
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA is asked for
    prepare_to_train()
    torch.set_num_threads(threads)
    try:
        with contextlib.closing(Log(out, io.StringIO())) as log:
            return train_and_measure(from_dict(RunConfig, config), job, job.path(out), log)
    except Stopped as error:
        if (out / STOP).exists():
            return None
        raise WorkerEnding(str(error)) from error
