"""AdamW by the names of parameters: built, its rates set for a step, its state taken out, grown and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.growth import Grown
from glissando.runs import OPTIMIZER, Run
from glissando.storage import load_tensors, refuse_pickle, save_tensors, verify_manifest
from glissando.training.config import AdamWOptions
from glissando.training.parts import is_sharded, optimizer_groups
from glissando.trees import load_tree


def build_optimizer(model: nn.Module, options: AdamWOptions, grown: Mapping[str, list[float]]) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone, and the factors that growth has left."""
    return torch.optim.AdamW(
        optimizer_groups(model, grown, options.weight_decay, options.eps),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        fused=not is_sharded(model),
    )


def set_rates(optimizer: torch.optim.Optimizer, options: AdamWOptions, step: int, learning_rate: float) -> None:
    """Each group's share of the learning rate; decay is by rate times weight decay, which release leaves alone."""
    for group in optimizer.param_groups:
        rate = group["rate"] ** options.held(step)
        group["lr"] = learning_rate * rate
        if group["weight_decay"]:
            group["weight_decay"] = options.weight_decay / rate


# ---------------------------------------------------------------------- state, whole in one process


def whole(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU; one that several processes hold shards of is gathered by all of them."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def place(value: Tensor, like: Tensor) -> Tensor:
    """The inverse of `whole`: a copy in the dtype and on the device, or cut into the shards, of `like`."""
    if not hasattr(like, "device_mesh"):
        return value.to(like, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements)  # type: ignore


@contextlib.contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Under FSDP2, what no block holds is gathered, which generation uses without calling the whole model."""
    if not is_sharded(model):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps of each parameter, by its name."""
    named = [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
    states = {name: optimizer.state[p] for name, p in named if p in optimizer.state}
    return {name: {key: whole(value) for key, value in state.items()} for name, state in states.items()}


def put_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the optimizer the state that it had; a parameter that is not trained any more needs none."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if name in saved:
                # The fused kernel reads the count of steps where the weights are, the others on the host.
                count = parameter.device if group.get("fused") else torch.device("cpu")
                optimizer.state[parameter] = {
                    key: value.to(count, torch.float32, copy=True) if key == "step" else place(value, parameter)
                    for key, value in saved[name].items()
                }


@torch.no_grad()
def put_weights(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a module that may be sharded."""
    ours = module.state_dict()
    if ours.keys() != saved.keys():
        raise ValueError(f"the weights differ by {sorted(ours.keys() ^ saved.keys())[:6]}")
    for name, value in saved.items():
        ours[name].copy_(place(value, ours[name]))


# ---------------------------------------------------------------------- Adam's moments through growth


class Moments(NamedTuple):
    """Of one parameter."""

    step: Tensor  # () how many gradients they have seen
    first: Tensor  # the parameter's shape
    second: Tensor

    def state(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.first, "exp_avg_sq": self.second}


def checkpoint_moments(checkpoint: Path) -> dict[str, Moments]:
    """Those of a checkpoint; none of one that an earlier version saved. Raises RunError if it is damaged."""
    verify_manifest(checkpoint)
    saved = load_tree(checkpoint, "trainer").get("optimizer", {})
    return {name: Moments(own["step"], own["exp_avg"], own["exp_avg_sq"]) for name, own in saved.items()}


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
    tensors: dict[str, Any] = load_tensors(path)
    names = sorted({name.rpartition("/")[0] for name in tensors})
    return {name: Moments(*(tensors[f"{name}/{part}"] for part in Moments._fields)) for name in names}
