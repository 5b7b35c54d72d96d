"""A checkpoint's tensors as shards: each process of a sharded training writes its own, and none gathers them.

The format is that of torch.distributed.checkpoint, as safetensors: its other files hold pickles. `dcp.load` with a
HuggingFaceStorageReader of the folder `shards` opens it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from glissando.checkpoints import SHARDS
from glissando.errors import RunError
from glissando.storage import RETRAIN, publishing


def publish_shards(target: Path, tensors: Mapping[str, Tensor], fill: Callable[[Path], None], group: Any) -> None:
    """Makes `target` the directory of all processes' shards and of what `fill(directory)` of the first adds, complete
    with its manifest, or not at all. Called by every process of `group`, which is not used by anything else meanwhile.

    `tensors` are this process's: DTensors and, alike in every process, plain ones, which the first writes.
    Raises RunError, on every process, if one cannot write its shards; on the first alone for what follows.
    """
    with contextlib.ExitStack() as stack:
        folder: list[Any] = [None]
        if distributed.get_rank(group) == 0:
            try:
                folder = [stack.enter_context(publishing(target))]
            except RunError as error:
                folder = [error]
        distributed.broadcast_object_list(folder, group=group, group_src=0)
        if isinstance(folder[0], RunError):
            raise folder[0]
        writer = HuggingFaceStorageWriter(str(folder[0] / SHARDS), save_distributed=True)
        planner = DefaultSavePlanner(False, False, dedup_save_to_lowest_rank=True)
        _calling(lambda: dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group))
        if distributed.get_rank(group) == 0:
            fill(folder[0])


def read_whole(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """The tensors named part/NAME, each put together from its shards, on the CPU, by NAME.

    Raises RunError where shards are malformed; their digests are the caller's to check.
    """
    known = {name: value for name, value in saved_tensors(checkpoint).items() if name.startswith(f"{part}/")}
    tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in known.items()}
    read_into(checkpoint, tensors)
    return {name.removeprefix(f"{part}/"): value for name, value in tensors.items()}


def read_into(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, of a sharded one this process's share alone, without waiting for other processes.

    Raises as `read_whole`, and where one has another shape.
    """
    planner, reader = DefaultLoadPlanner(False, False), HuggingFaceStorageReader(str(checkpoint / SHARDS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        _calling(lambda: dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True))


def saved_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of all tensors, by their names part/NAME. Raises as `read_whole`."""
    from safetensors import SafetensorError

    try:
        saved = HuggingFaceStorageReader(str(checkpoint / SHARDS)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{checkpoint / SHARDS} is malformed ({error}). {RETRAIN}") from error
    return {name: value for name, value in saved.items() if isinstance(value, TensorStorageMetadata)}


def _calling(work: Callable[[], object]) -> None:
    """The first failure of a process, as an exception of its own kind, in place of torch's, which is no Exception."""
    try:
        work()
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        if isinstance(first, OSError):
            raise RunError(f"could not use {first.filename}: {first.strerror}. Free space; save again.") from first
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
