"""A checkpoint's tensors as shards: each process of a sharded training writes its own, and none gathers them.

torch.distributed.checkpoint plans who writes and reads what. Its own files hold a pickle (.metadata); these are
safetensors alone, of which torch's HuggingFaceStorageReader reads shapes and offsets:

    shards/shard-00000.safetensors   what process 0 held of each tensor, and where in the whole tensor it belongs

A tensor that every process holds whole is written by the first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from glissando.checkpoints import SHARDS
from glissando.errors import RunError
from glissando.storage import MANIFEST, RETRAIN, publishing, record, save_manifest, save_tensors

#: under this name of a file's header torch's reader expects the offsets of its tensors
_OFFSETS = "DCP_SHARDING_INFO"


def publish_shards(target: Path, tensors: Mapping[str, Tensor], fill: Callable[[Path], None], group: Any) -> None:
    """Makes `target` the directory of all processes' shards and of what `fill(directory)` of the first adds, complete
    with its manifest, or not at all. Called by every process of `group`, which is not used by anything else meanwhile.

    `tensors` are this process's: DTensors and, alike in every process, plain ones.
    Raises RunError, on every process, if one cannot write its shards; on the first alone for what follows.
    """
    with contextlib.ExitStack() as stack:
        writer = _Writer(target, fill, stack)
        planner = DefaultSavePlanner(False, False, dedup_save_to_lowest_rank=True)
        _calling(lambda: dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group))


class _Writer(StorageWriter):
    """Into the temporary directory of `publishing`, which the first process enters on `stack`."""

    def __init__(self, target: Path, fill: Callable[[Path], None], stack: contextlib.ExitStack) -> None:
        self.target, self.fill, self.stack = target, fill, stack
        self.folder = target

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.folder = self.stack.enter_context(publishing(self.target))
            (self.folder / SHARDS).mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each process learns its file's path."""
        path = self.folder / SHARDS
        return [replace(p, storage_data=str(path / f"shard-{n:05d}.safetensors")) for n, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path, written = Path(plan.storage_data), dict[str, Any]()
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        known = {item.index.fqn: item.tensor_data for item in plan.items if item.tensor_data is not None}
        where = {name: {"saved_offsets": list(t.chunk.offsets), "shape": list(t.size)} for name, t in known.items()}
        header = {"format": "pt", _OFFSETS: json.dumps(where)}
        save_tensors(path, tensors, header, lambda new: written.update(record(new)))
        done: Future[list[WriteResult]] = Future()
        file = (f"{SHARDS}/{path.name}", written)
        done.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, file) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the first process, once all have written: digests are those that each took of its own file."""
        files = dict(result.storage_data for written in results for result in written)
        self.fill(self.folder)
        rest = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        names = [name.as_posix() for name in rest if name.parts[0] != SHARDS and name.name != MANIFEST]
        save_manifest(self.folder, files | {name: record(self.folder / name) for name in names})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_whole(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """The tensors named part/NAME, each put together from its shards, on the CPU, by NAME.

    Raises RunError where shards are missing or malformed; their digests are the caller's to check.
    """
    known = {name: value for name, value in _metadata(checkpoint).items() if name.startswith(f"{part}/")}
    tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in known.items()}
    read_into(checkpoint, tensors)
    return {name.removeprefix(f"{part}/"): value for name, value in tensors.items()}


def tensor_names(checkpoint: Path) -> list[str]:
    """Those of all tensors, part/NAME. Raises as `read_whole`."""
    return [*_metadata(checkpoint)]


def read_into(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, of a sharded one this process's share alone, without waiting for other processes.

    Raises as `read_whole`, and where one has another shape.
    """
    planner, reader = DefaultLoadPlanner(False, False), HuggingFaceStorageReader(str(checkpoint / SHARDS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        _calling(lambda: dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=True))


def _metadata(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Of every tensor, all of which must be there: torch's reader takes what there is for the whole."""
    from safetensors import SafetensorError, safe_open

    folder, shapes = checkpoint / SHARDS, dict[str, list[int]]()
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        for path in folder.iterdir():
            with safe_open(path, "pt") as file:
                where = json.loads(file.metadata()[_OFFSETS])
            shapes |= {name: entry["shape"] for name, entry in where.items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is incomplete or malformed ({error}). {RETRAIN}") from error
    known = {name: value for name, value in found.items() if isinstance(value, TensorStorageMetadata)}
    for name, value in known.items():
        if sum(math.prod(chunk.sizes) for chunk in value.chunks) != math.prod(shapes[name]):
            raise RunError(f"{folder} has not all of {name}: a shard is missing. {RETRAIN}")
    return known


def _calling(work: Callable[[], object]) -> None:
    """The first failure of a process, as an exception of its own kind, in place of torch's, which is no Exception."""
    try:
        work()
    except CheckpointException as error:
        failed = [failure for failure, _ in error.failures.values()]
        first = next((each for each in failed if isinstance(each, RunError)), failed[0])
        if isinstance(first, RunError):
            raise first from None
        if isinstance(first, OSError):
            raise RunError(f"could not use {first.filename}: {first.strerror}. Free space; save again.") from first
        raise RuntimeError(f"{type(first).__name__}: {first}") from first
