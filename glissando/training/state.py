"""Where a training is: one value that is the checkpoint, whole on disk or not there, without pickle."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from glissando.checkpoints import (
    SHARDS,
    TRAINER,
    TRAINER_TENSORS,
    WEIGHTS,
    below,
    by_parameter,
    intact_advice,
    saved_optimizer,
    saved_weights,
)
from glissando.errors import RunError
from glissando.kernels.precise import widest_float
from glissando.runs import CONFIG
from glissando.sharding import local, local_norms
from glissando.storage import RETRAIN, load_tensors, publishing, read_json, save_tensors, verify_manifest
from glissando.training.optimizer import empty_state
from glissando.training.task import Sums

log = logging.getLogger(__name__)


def over_processes(part: Sums, gradients: list[Tensor], world_size: int) -> tuple[Sums, list[float]]:
    """The sums of all processes and the norm of each gradient, as numbers: the one wait for the device."""
    norms = local_norms(gradients)
    measured = [name for name, value in part.also.items() if isinstance(value, Tensor)]
    sums = torch.stack([part.loss, *(part.also[name].to(part.loss) for name in measured)])
    if world_size == 1:
        numbers = torch.cat([norms, sums.to(norms.dtype)]).tolist()
        values, (loss, *also) = numbers[: len(gradients)], numbers[len(gradients) :]
        return Sums(loss, part.targets, part.flops, part.also | dict(zip(measured, also, strict=True))), values
    most, counted = widest_float(sums.device), [name for name in part.also if name not in measured]
    counts = sums.new_tensor([part.targets, part.flops, *(part.also[name] for name in counted)], dtype=most)
    # Of a sharded gradient no process has the whole norm, of another each of them.
    shares = [1.0 if local(gradient) is not gradient else 1 / world_size for gradient in gradients]
    squares = norms.to(most).square() * norms.new_tensor(shares, dtype=most) if 1.0 in shares else norms.new_zeros(0)
    total = torch.cat([counts, sums.to(most), squares])
    torch.distributed.all_reduce(total)
    targets, flops, *rest = total.tolist()
    names = [*counted, "loss", *measured]
    totals = dict(zip(names, rest, strict=False))
    values = [math.sqrt(square) for square in rest[len(names) :]] or norms.tolist()
    return Sums(totals.pop("loss"), int(targets), flops, totals), values


@dataclass
class TrainState:
    """All of a checkpoint.

    step                optimizer steps done. The data go on from here: their order follows from data.seed and the step
    tokens, flops       targets scored and operations so far, over all processes
    seconds             of the whole run, resumptions added up, and of it on validations
    valid_stride        one of so many held-out batches is scored; 0 before the first validation
    unlogged            sums since the last row of metrics.csv
    best, best_step     the best validation; `waited` validations since
    samples             size of samples.txt
    logged              SHA-256 and size of metrics.csv
    model, optimizer    tensors by parameter, whole, or of a sharded training this process's shards
    schedule, hooks     what the schedule and each hook keep
    random              state of the random numbers of each process
    lanes               of each shard of the batch and each turn, next one first, the tensors of the state after its
                        rows, where rows continue
    """

    step: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    validation_seconds: float = 0.0
    valid_stride: int = 0
    unlogged: Sums = field(default_factory=Sums)
    best: float = math.inf
    best_step: int = -1
    waited: int = 0
    samples: int = 0
    logged: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    random: list[dict[str, Any]] = field(default_factory=list)
    lanes: list[list[Tensor]] = field(default_factory=list)

    def save(self, path: Path, files: Mapping[str, bytes] | None = None, group: Any = None) -> None:
        """Writes the directory `path`, with small `files` beside, or leaves what stands there.

        group   of the processes that each write their own shards, all of which call this; None: tensors are whole

        Raises RunError if it cannot be written, TypeError for a value that JSON does not have.
        """
        rest = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        model, optimizer, lanes = rest.pop("model"), rest.pop("optimizer"), rest.pop("lanes")
        rest |= {"unlogged": dataclasses.asdict(self.unlogged), "lanes": [len(tensors) for tensors in lanes]}
        kept = {f"lanes/{lane}/{n}": leaf for lane, tensors in enumerate(lanes) for n, leaf in enumerate(tensors)}
        moments = {
            f"optimizer/{name}/{key}": value for name, slots in optimizer.items() for key, value in slots.items()
        }

        def fill(directory: Path) -> None:
            if group is None:
                save_tensors(directory / WEIGHTS, model)
            save_tensors(directory / TRAINER_TENSORS, kept if group else kept | moments)
            for name, data in {**(files or {}), TRAINER: json.dumps(rest).encode()}.items():
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(data)

        if group is None:
            with publishing(path) as directory:
                fill(directory)
            return
        from glissando.shards import publish_shards

        publish_shards(path, {f"model/{name}": value for name, value in model.items()} | moments, fill, group)

    @classmethod
    def load(cls, path: str | Path, tensors: bool = True) -> TrainState:
        """The state that was saved at `path`, each file checked, tensors on the CPU and whole, whether they were saved
        as shards or not: `TrainState.load(sharded).save(path)` makes one checkpoint of the other.

        tensors   False: of shards no model and no optimizer, which `read_shards` reads

        Raises RunError if it is missing, incomplete, damaged, or of a version that saved something else.
        """
        directory = Path(path)
        is_sharded = (directory / SHARDS).is_dir()
        checked = None if is_sharded else [TRAINER, TRAINER_TENSORS]
        verify_manifest(directory, checked, partial(intact_advice, directory))
        rest, kept = read_json(directory / TRAINER, "a training"), load_tensors(directory / TRAINER_TENSORS)
        names = {each.name for each in dataclasses.fields(cls)} - {"model", "optimizer"}
        if rest.keys() != names:
            raise RunError(
                f"{path} was saved by another version of glissando, and only that version can resume it. Start a new "
                "training from its weights: glissando train --from RUN"
            )
        rest["lanes"] = [[kept[f"lanes/{lane}/{n}"] for n in range(count)] for lane, count in enumerate(rest["lanes"])]
        rest["unlogged"] = Sums(**rest["unlogged"])
        if is_sharded and not tensors:
            return cls(**rest)  # `read_shards` reads the others next
        optimizer = saved_optimizer(directory) if is_sharded else by_parameter(below("optimizer", kept))
        return cls(**rest, model=saved_weights(directory), optimizer=optimizer)


def read_shards(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives a sharded module and its optimizer what a sharded checkpoint holds of them: this process reads its share of
    every tensor, whatever the number of processes that wrote it. Raises as `TrainState.load`."""
    from glissando.shards import read_into, saved_tensors

    targets = {f"model/{name}": value for name, value in module.state_dict().items()}
    saved = saved_tensors(path)
    if {name for name in saved if name.startswith("model/")} != targets.keys():
        raise RunError(f"{path} holds the weights of another model than its {CONFIG} describes. {RETRAIN}")
    slots = empty_state(optimizer, [name.removeprefix("optimizer/") for name in saved if name not in targets])
    targets |= {f"optimizer/{name}": value for name, value in slots.items()}
    read_into(path, targets)


def rng_state() -> dict[str, Any]:
    """The state of the random numbers of Python, NumPy, torch on the CPU and each CUDA device, as plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in cuda],
    }


def restore_rng(states: list[dict[str, Any]], rank: int) -> None:
    """Put back this process's `rng_state`, on CUDA of the devices that both machines have.

    Logs a warning if the checkpoint was saved with fewer processes: this one keeps the state that it has.
    """
    if rank >= len(states):
        log.warning("the checkpoint has no random state for process %d, which starts with a new one", rank)
        return
    version, internal, gauss = states[rank]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states[rank]["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.as_tensor(states[rank]["torch"], dtype=torch.uint8))
    for device, state in zip(range(torch.cuda.device_count()), states[rank]["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.as_tensor(state, dtype=torch.uint8), device)
