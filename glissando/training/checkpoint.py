"""Checkpoints of a training run: directories that are either complete or not there, without pickle.

A checkpoint holds `model.*` (the state dict) and `trainer.*` (everything else Lightning saves: loops,
optimizers, schedulers, callbacks, random numbers), each as safetensors plus JSON, and `manifest.json`,
written last. Save at the end of an optimizer step: gradients accumulated so far are not part of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from glissando.errors import RunError
from glissando.runs import checkpoint_path, checkpoint_step, checkpoints, keep_newest, latest_checkpoint
from glissando.storage import (
    MANIFEST,
    find_published,
    publish_directory,
    remove_directory,
    verify_manifest,
)
from glissando.trees import load_tree, save_tree

__all__ = [
    "PatientCheckpointIO",
    "RandomState",
    "SafeCheckpointIO",
    "ShardedStrategy",
    "checkpoint_path",
    "checkpoint_step",
    "checkpoints",
    "keep_newest",
    "latest_checkpoint",
    "restore_rng",
    "rng_state",
    "to_plain",
]

log = logging.getLogger(__name__)

RANDOM_STATE = "random_state"
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


class SafeCheckpointIO(CheckpointIO):
    """Lets Lightning save to and resume from directories: `Trainer(plugins=[SafeCheckpointIO()])`.

    Adds the random state of this process unless the `RandomState` callback has put in that of every rank.
    Lightning calls it on rank 0 alone; under DDP every rank loads.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes `checkpoint` as the directory `path`, or leaves what stands there.

        Raises RunError if it cannot be written, TypeError that names a value that cannot be saved.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported: checkpoints are local directories")
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        rest.setdefault(RANDOM_STATE, [rng_state()])
        model, trainer = to_plain(checkpoint.get("state_dict", {})), _plain_checkpoint(rest)

        def fill(directory: Path) -> None:
            save_tree(directory, model, "model")
            save_tree(directory, trainer, "trainer")

        publish_directory(path, fill)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: str | torch.device | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The dict that was saved at `path`, each file checked; tensors on the CPU or on `map_location`.

        `weights_only` is Lightning's name for "unpickle no objects"; nothing is ever unpickled here.
        Raises RunError if the checkpoint is missing, incomplete, damaged or a pickle.
        """
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise TypeError(f"map_location must be a device or its name, got {map_location!r}")
        directory = find_published(path)
        _require_directory(directory)
        verify_manifest(directory)
        checkpoint = {"state_dict": load_tree(directory, "model"), **load_tree(directory, "trainer")}
        return _map_tensors(checkpoint, lambda t: t.to(map_location)) if map_location is not None else checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Deletes the checkpoint at `path`, if there is one."""
        if Path(path).is_dir():
            remove_directory(path)


class PatientCheckpointIO(SafeCheckpointIO):
    """Keeps the error of a failed save in `problem`: rank 0 alone writes, and must still meet the others after it."""

    problem: RunError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """As SafeCheckpointIO, but raises no RunError."""
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except RunError as error:
            self.problem = error


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 and tensor parallelism whose checkpoints go through the checkpoint plugin, as everywhere else.

    Lightning's own strategy saves through the plugin but loads with `torch.load`, and refuses to save over a
    directory. Rank 0 gathers the whole model; checkpoints are the same with any number of processes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, save_distributed_checkpoint=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Saves what rank 0 has gathered."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads on every rank and shards the model's and the optimizers' state."""
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            set_optimizer_state_dict(self.model, optimizer, _by_name(state, optimizer, self.model), options=options)
        return checkpoint


def _by_name(state: Mapping[str, Any], optimizer: Optimizer, model: Module) -> dict[str, Any]:
    """An optimizer's state with parameter names for numbers, which count differently with and without sharding."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    name_of = dict(zip(numbers, own, strict=True))
    groups = [{**group, "params": [name_of[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {name_of[n]: value for n, value in state["state"].items()}, "param_groups": groups}


class RandomState(Callback):
    """Saves the random state of every rank with each checkpoint, and restores it on resume.

    Setting up the data draws numbers too, so the state is restored when the checkpoint is loaded and once
    more: inside an epoch before the first batch, because the interrupted run had drawn for this epoch before
    it saved; between epochs before the epoch, where Lightning sets up the data a second time.
    """

    def __init__(self) -> None:
        self._pending: Mapping[str, Any] | None = None
        self._inside_epoch = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Gathers the states; Lightning calls this on every rank."""
        states: list[Any] = [rng_state()]
        # After `fit` the processes are no longer connected; rank 0 then saves its own state alone.
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            states = [None] * trainer.world_size
            # NumPy arrays, because Lightning and torch disagree on how a tensor travels as an object.
            torch.distributed.all_gather_object(states, _map_tensors(rng_state(), Tensor.numpy))
        checkpoint[RANDOM_STATE] = to_plain(states)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores this rank's state; warns if the checkpoint was saved with fewer ranks."""
        if trainer.state.fn != "fit":
            return
        states = checkpoint.get(RANDOM_STATE, [])
        if trainer.global_rank >= len(states):
            log.warning("the checkpoint has no random state for rank %d: it starts afresh", trainer.global_rank)
            return
        restore_rng(states[trainer.global_rank])
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        self._pending = states[trainer.global_rank]
        self._inside_epoch = progress["current"]["ready"] > 0 and not progress["is_last_batch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Between epochs: restores the state if Lightning is about to set up the data again."""
        again = not getattr(trainer.fit_loop, "is_resuming", False) and not trainer.fit_loop.restarting
        if self._pending is not None and not self._inside_epoch:
            if trainer.current_epoch > 0 and again:
                restore_rng(self._pending)
            self._pending = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Inside an epoch: restores what setting up the data has drawn from."""
        if self._pending is not None:
            restore_rng(self._pending)
            self._pending = None


def rng_state() -> dict[str, Any]:
    """The state of the random numbers of Python, NumPy, torch on the CPU and each CUDA device, as a tree."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).copy()),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng(tree: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`. CUDA states are restored for the devices that both machines have."""
    version, internal, gauss = tree["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = tree["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(tree["torch"].cpu())
    for device, state in zip(range(torch.cuda.device_count()), tree["cuda"], strict=False):
        torch.cuda.set_rng_state(state.cpu(), device)


def to_plain(value: Any, path: str = "", lenient: bool = False) -> Any:
    """`value` in the types of a tree: mappings to dict, NumPy scalars to numbers, arrays to tensors, ...

    Sets become sorted lists; enums, paths, dtypes and devices lose their type. Raises TypeError that names
    the path of anything else; if `lenient`, logs a warning and keeps its repr instead.
    """
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return value
    if isinstance(value, enum.Enum):
        return to_plain(value.value, path, lenient)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_plain_key(k, path): to_plain(v, f"{path}[{k!r}]", lenient) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        items = [to_plain(item, f"{path}[{index}]", lenient) for index, item in enumerate(ordered)]
        return tuple(items) if isinstance(value, tuple) else items
    return _plain_leaf(value, path, lenient)


def _plain_leaf(value: Any, path: str, lenient: bool) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if isinstance(value, os.PathLike | torch.dtype | torch.device):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not lenient:
        raise TypeError(f"checkpoint{path}: cannot save a {kind_name} without pickle; save plain values instead")
    log.warning("checkpoint%s: a %s is saved as its text alone", path, kind_name)
    return repr(value)


def _plain_key(key: Any, path: str) -> str | int:
    plain = to_plain(key, path)
    if type(plain) not in (str, int):
        raise TypeError(f"checkpoint{path}: key {key!r} is a {type(key).__name__}; keys are str or int")
    return plain


def _plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str | int, Any]:
    """Hyper-parameters may hold any object and are not needed to resume, so they are the one lenient part."""
    return {
        _plain_key(key, ""): to_plain(value, f"[{key!r}]", lenient=key in _HYPER_PARAMETERS)
        for key, value in checkpoint.items()
    }


def _require_directory(path: Path) -> None:
    if not path.exists():
        raise RunError(f"no checkpoint at {path}; the run's complete ones are its checkpoints/step-* directories")
    if not path.is_dir():
        raise RunError(
            f"{path} is a file; a checkpoint is a directory. Pickled checkpoints are refused because loading "
            "one runs code: load it where you trust it and save its state dict with safetensors."
        )
    if not (path / MANIFEST).is_file():
        raise RunError(f"{path} is not a complete checkpoint: {MANIFEST} is missing. Load the previous checkpoint.")


def _map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, function) for value in tree)
    return tree
