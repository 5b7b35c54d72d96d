"""Fabric for a training: its device, precision and processes; which of them this is; how they end together."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from glissando.errors import ConfigError, TrainingError
from glissando.precision import computes_bfloat16
from glissando.sharding import shard
from glissando.training.config import TrainingConfig

# Fabric asks for the version of torchmetrics by importing it where it is installed, and torchmetrics imports
# transformers, scipy and matplotlib: seconds at the start of every training. An empty module stands in meanwhile.
_stands_in = "torchmetrics" not in sys.modules and find_spec("torchmetrics") is not None
if _stands_in:
    sys.modules["torchmetrics"] = ModuleType("torchmetrics")
try:
    from lightning_fabric import Fabric
    from lightning_fabric import seed_everything as seed_everything
    from lightning_fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning_fabric.strategies import ModelParallelStrategy
    from lightning_fabric.utilities.exceptions import MisconfigurationException
finally:
    if _stands_in:
        del sys.modules["torchmetrics"]

_together = ContextVar("_together", default=False)


def processes(training: TrainingConfig) -> tuple[int, int]:
    """(processes on this node, nodes): torchrun's where it has started us, else the configuration's, on this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return here, int(os.environ["WORLD_SIZE"]) // here
    return training.devices, 1


def rank() -> int:
    """This process's number over all nodes before they are connected, by torchrun, Fabric or Slurm."""
    return int(next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0))


def job() -> str | None:
    """The id of the job whose process torchrun has started this is (--rdzv-id, or one of its own with --standalone)."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name  # torchrun's word for no name


def build_fabric(training: TrainingConfig) -> Fabric:
    """Raises ConfigError for an accelerator, precision or strategy that this machine does not have."""
    devices, nodes = processes(training)
    strategy: Any = "ddp" if training.strategy == "ddp" or devices * nodes > 1 else "auto"
    if training.strategy == "fsdp":
        # Fabric's default is tensor parallelism within a node, which would shard no weight at all here.
        strategy = ModelParallelStrategy(shard, math.prod((devices, nodes)), tensor_parallel_size=1)
    try:
        with quiet():
            fabric = Fabric(
                accelerator=training.accelerator, strategy=strategy, devices=devices, num_nodes=nodes,
                precision=training.precision,  # type: ignore[arg-type]
            )  # fmt: skip
    except (MisconfigurationException, ImportError, ValueError, RuntimeError) as error:
        here = sorted(name for name, entry in ACCELERATOR_REGISTRY.items() if entry["accelerator"].is_available())
        raise ConfigError(
            f"training.accelerator {training.accelerator!r} with {devices} device(s), strategy {training.strategy}, "
            f"precision {training.precision} does not work here: {' '.join(str(error).split())} "
            f"Available here: {', '.join(['auto', *here])}."
        ) from error
    emulated = platform.machine().lower() in ("x86_64", "amd64") and not computes_bfloat16("cpu")
    if training.precision == "bf16-mixed" and fabric.device.type == "cpu" and emulated and rank() == 0:
        # Measured for the nano presets on a processor with AVX2 alone: 450 tokens/s, and 3,400 in 32-true.
        print(
            "this processor has no bfloat16 arithmetic: bf16-mixed is emulated, several times slower than 32-true",
            file=sys.stderr,
        )
    return fabric


def connect(fabric: Fabric) -> None:
    """Start the processes of `fabric`, or connect those that are started.

    Raises ConfigError where torchrun, after a restart, would hand out addresses of processes that have died: they stay
    in the store that it keeps over restarts, https://github.com/pytorch/pytorch/issues/135712.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) * (int(os.environ.get("WORLD_SIZE", 1)) - 1)
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            "torchrun --max-restarts keeps addresses of processes that have died, which those of a restart would wait "
            "for: give it a new store for each start, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ..."
        )
    fabric.launch()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Fabric's banners, and the compiler's notes that a model is compiled in pieces."""
    # Where lightning.pytorch is imported too, Fabric's banners are its own.
    levels = {"lightning_fabric": logging.WARNING, "lightning.pytorch": logging.WARNING, "torch._dynamo": logging.ERROR}
    with contextlib.ExitStack() as stack:
        for name, level in levels.items():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        stack.enter_context(warnings.catch_warnings())
        for message in (".*available but not used.*", ".*Dynamo detected a call to a `functools.lru_cache`.*"):
            warnings.filterwarnings("ignore", message)
        yield


@contextlib.contextmanager
def ended_together(fabric: Fabric) -> Iterator[None]:
    """An error of the first process ends those that it has started; one that all raise is reported by the first.

    Trainings in a row share their processes: inside such a context another one does nothing.
    """
    if _together.get():
        yield
        return
    atexit.register(_leave_group)  # not here: leaving may wait for other processes, and an error is reported at once
    within = _together.set(True)
    try:
        yield
    except BaseException as error:
        for process in getattr(fabric.strategy.launcher, "procs", ()):
            process.kill()  # SIGTERM asks to save, which takes all processes; these have nothing of their own to lose
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        # A process that clears up after a TrainingError may find the others gone, and trip again.
        reported = next((each for each in causes if isinstance(each, TrainingError)), None)
        if reported is not None and rank() == 0:
            raise reported from None
        if reported is not None:
            sys.exit(1)
        # A collective whose other side has gone may reach us before the signal to end.
        texts = (str(each).lower() for each in causes if isinstance(each, RuntimeError))
        if rank() > 0 and any(re.search("(closed|reset) by peer", text) for text in texts):
            sys.exit(f"process {rank()}: the connection to another process is lost; its error is reported there")
        raise
    finally:
        _together.reset(within)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        _leave_group()


def _leave_group() -> None:
    """End the group's threads: one that runs on as the interpreter ends can abort it, with status -6 for ours."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
