"""Tensors that several processes hold shards of, under FSDP2, and numbers that processes agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glissando.block import Block


def shard(objective: Any, mesh: Any) -> Any:
    """FSDP2: `objective.model` cut into shards over the processes of `mesh`, each of its blocks a unit.

    A flow's field is in the unit of what no block holds: that is gathered once for all evaluations, those of the
    backward pass too. A scalar cannot be cut: each process holds it, and its gradient is averaged over them.
    """
    from torch.distributed.fsdp import fully_shard

    over, model = mesh["data_parallel"], objective.model
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for module in [m for m in model.modules() if isinstance(m, Block) and m is not getattr(model.depth, "field", None)]:
        fully_shard(module, mesh=over, ignored_params=scalars)
    fully_shard(model, mesh=over, ignored_params=scalars)

    def average(scalar: Tensor) -> None:
        assert scalar.grad is not None
        torch.distributed.all_reduce(scalar.grad, group=over.get_group())
        scalar.grad /= over.size()

    for scalar in scalars:
        scalar.register_post_accumulate_grad_hook(average)
    return objective


def local(tensor: Tensor) -> Tensor:
    """This process's share of a sharded tensor, and any other tensor as it is; the storage is the same."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_sharded(model: nn.Module) -> bool:
    return any(local(p) is not p for p in model.parameters())


def local_norms(tensors: Iterable[Tensor]) -> Tensor:
    """(n,) norms of what this process holds of each tensor, without waiting for the device."""
    return torch.stack(torch._foreach_norm([local(t) for t in tensors]))


def gathered(tensor: Tensor) -> Tensor:
    """`tensor` where it is; one that several processes hold shards of is gathered by all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU of what this process holds of `tensor`; a sharded one stays so."""
    return tensor.detach().to("cpu", copy=True)


def place(value: Tensor, like: Tensor) -> Tensor:
    """The inverse of `gathered`: a copy in the dtype and on the device, or cut into the shards, of `like`."""
    if not hasattr(like, "device_mesh"):
        return value.to(like, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements)  # type: ignore


@torch.no_grad()
def put_weights(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a module that may be sharded. Raises ValueError if their names are others."""
    targets = module.state_dict()
    if targets.keys() != saved.keys():
        raise ValueError(f"the weights differ by {sorted(targets.keys() ^ saved.keys())[:6]}")
    for name, value in saved.items():
        targets[name].copy_(place(value, targets[name]))


@contextlib.contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Gather what no block holds, which generation uses without calling the whole model."""
    if not is_sharded(model):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def all_gathered(value: Any, world_size: int) -> list[Any]:
    """Each process's value, on each of them; no tensor, on whose way as an object Lightning and torch disagree."""
    if world_size == 1:
        return [value]
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone
