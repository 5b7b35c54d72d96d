"""Which of several processes this is, before Lightning connects them, and how they end together."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from glissando.errors import Stopped, TrainingError
from glissando.training.config import TrainingConfig


def processes(training: TrainingConfig) -> tuple[int, int]:
    """(processes on this node, nodes): torchrun's where it has started us, else the configuration's."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return here, int(os.environ["WORLD_SIZE"]) // here
    return training.devices, training.num_nodes


def rank() -> int:
    """This process's number over all nodes, from what torchrun, Slurm or Lightning's launcher has set.

    Lightning sets LOCAL_RANK and no RANK; where each node is started by hand, NODE_RANK tells them apart.
    Such a number is exact for the first process and differs between the others.
    """
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"]) + 1000 * int(os.environ.get("NODE_RANK", 0))
    return int(os.environ.get("SLURM_PROCID", 0))


@contextlib.contextmanager
def ended_together(trainer: Trainer) -> Iterator[None]:
    """An error of the first process ends those that it has started; what all raise, the first one alone tells.

    Lightning makes a second Ctrl-C an exit with status 1, and a SIGTERM before the first step one with status 0; here
    both are a KeyboardInterrupt again.
    """
    atexit.register(_leave_group)  # not here: leaving may wait for other processes, and an error is told at once
    try:
        yield
    except SystemExit as error:
        if isinstance(error, SIGTERMException):
            if rank() == 0:
                print("\nstopped before the first step; nothing new is saved", file=sys.stderr)
            raise Stopped("training was stopped before its first step", signal.SIGTERM) from error
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except BaseException as error:
        _end_started(trainer)
        told = _training_error(error)
        if told is None:
            if rank() > 0 and _lost_another(error):
                sys.exit(f"process {rank()}: the connection to another process is lost; what ended it is told there")
            raise
        if rank() > 0:
            sys.exit(1)
        raise told from None
    _disconnect()


def _training_error(error: BaseException | None) -> TrainingError | None:
    """The TrainingError behind `error`: a process that clears up after one may find the others gone, and trip again."""
    while error is not None and not isinstance(error, TrainingError):
        error = error.__cause__ or error.__context__
    return error


def _lost_another(error: BaseException | None) -> bool:
    """Whether `error` is that of a collective whose other side has gone: it may reach us before the signal to end."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and ("closed by peer" in text or "reset by peer" in text):
            return True
        error = error.__cause__ or error.__context__
    return False


def _disconnect() -> None:
    if _in_group():
        torch.distributed.barrier()
        _leave_group()


def _leave_group() -> None:
    """End the group's threads: one that runs on as the interpreter ends can abort it, with status -6 for ours."""
    if _in_group():
        torch.distributed.destroy_process_group()


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _end_started(trainer: Trainer) -> None:
    kill = getattr(trainer.strategy.launcher, "kill", None)
    if kill is not None:
        # SIGTERM asks to save, which takes all processes; and those that started have nothing of their own to lose.
        kill(getattr(signal, "SIGKILL", signal.SIGTERM))
