"""Adam's moments by the names of parameters: out of a checkpoint, through growth, into a run and a new optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.growth import Grown
from glissando.runs import OPTIMIZER, Run
from glissando.storage import load_tensors, refuse_pickle, save_tensors, verify_manifest
from glissando.training.checkpoint import SafeCheckpointIO


class Moments(NamedTuple):
    """Of one parameter."""

    step: Tensor  # () how many gradients they have seen
    first: Tensor  # the parameter's shape
    second: Tensor


def checkpoint_moments(checkpoint: Path) -> dict[str, Moments]:
    """Those of a checkpoint; none where its optimizer has not said whose they are, as before models could grow.

    Raises RunError if the checkpoint is damaged.
    """
    (state,) = SafeCheckpointIO().load_checkpoint(checkpoint)["optimizer_states"]
    found: dict[str, Moments] = {}
    for group in state["param_groups"]:
        for number, name in zip(group["params"], group.get("names", ()), strict="names" in group):
            if number in state["state"]:
                own = state["state"][number]
                found[name] = Moments(own["step"], own["exp_avg"], own["exp_avg_sq"])
    return found


def grow_moments(moments: Mapping[str, Moments], grown: Grown) -> dict[str, Moments]:
    """Those of the grown model's parameters; what is new starts without."""
    return {name: Moments(own.step, *grown.moments(name, own.first, own.second)) for name, own in moments.items()}


def write_moments(run: Run, moments: Mapping[str, Moments]) -> None:
    """Into optimizer.safetensors; the run's manifest is to be written after it."""
    tensors = {f"{name}/{part}": value for name, own in moments.items() for part, value in own._asdict().items()}
    save_tensors(run.path / OPTIMIZER, tensors, {"format": "pt"})


def read_moments(run: Run) -> dict[str, Moments]:
    """Those of a run that was made by growing; none of any other, or of one of its checkpoints.

    Raises RunError if the file is damaged.
    """
    path = run.path / OPTIMIZER
    if run.checkpoint is not None or not path.is_file():
        return {}
    refuse_pickle(path)
    verify_manifest(run.path, [OPTIMIZER])
    tensors = load_tensors(path)
    names = sorted({name.rpartition("/")[0] for name in tensors})
    return {name: Moments(*(tensors[f"{name}/{part}"] for part in Moments._fields)) for name in names}


def put_moments(optimizer: torch.optim.Optimizer, model: nn.Module, moments: Mapping[str, Moments]) -> None:
    """Give a new AdamW the state it would have had; a parameter that is not trained any more needs none."""
    fused = {id(p): bool(group.get("fused")) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if name in moments and id(parameter) in fused:
            own = moments[name]
            step = own.step.clone().float()
            # The fused kernel reads the count where the weights are, the others on the host.
            state: dict[str, Any] = {"step": step.to(parameter.device) if fused[id(parameter)] else step}
            state["exp_avg"] = own.first.to(parameter, copy=True)
            state["exp_avg_sq"] = own.second.to(parameter, copy=True)
            optimizer.state[parameter] = state
