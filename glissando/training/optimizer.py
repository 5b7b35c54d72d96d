"""AdamW by the names of parameters: built, its rates set for a step, its state taken out and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glissando.training.config import AdamWOptions
from glissando.training.parts import is_sharded, optimizer_groups


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
