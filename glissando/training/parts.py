"""Parameters by name: which are trained, which part of the model each belongs to, and the size of its gradient."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glissando.errors import ConfigError
from glissando.growth.shares import Share, shares


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Stop training the parameters whose names match a shell pattern.

    Raises ConfigError for a pattern that matches nothing, or if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"training.freeze pattern {pattern!r} matches no parameter; names look like {', '.join(names[:6])}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("training.freeze leaves nothing to train")


def optimizer_groups(
    model: nn.Module, grown: Mapping[str, list[float]], weight_decay: float, eps: float
) -> list[dict[str, Any]]:
    """The trained parameters in groups for AdamW: matrices before vectors, those of one `Share` together.

    `rate` multiplies the learning rate, `names` are the parameters'.
    """
    named, own = {id(p): name for name, p in model.named_parameters()}, shares(model, grown)
    groups: dict[tuple[str, Share], list[nn.Parameter]] = {}
    for kind, parameters in zip(("matrices", "vectors"), split_by_decay(model), strict=True):
        for parameter in parameters:
            groups.setdefault((kind, own[named[id(parameter)]]), []).append(parameter)
    return [
        {
            "params": parameters,
            "names": [named[id(p)] for p in parameters],
            "weight_decay": weight_decay * share.decay if kind == "matrices" else 0.0,
            "eps": eps * share.eps,
            "rate": share.rate,
            "name": kind,
        }
        for (kind, share), parameters in groups.items()
    ]


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters that weight decay acts on, and the others: vectors, and biases of any shape.

    A module names those of its parameters that have two dimensions and are vectors all the same in `undecayed`.
    """
    exempt = {id(getattr(m, name)) for m in model.modules() for name in getattr(m, "undecayed", ()) if hasattr(m, name)}
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in exempt and not name.endswith("bias")
            (matrices if is_matrix else vectors).append(parameter)
    return matrices, vectors


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to.

    depth.blocks.3.mixer.qkv.weight -> depth.blocks.3.mixer;   depth.time.0.bias -> depth.time
    """
    pieces = name.split(".")
    if pieces[0] != "depth":
        return pieces[0]
    if pieces[-1] in ("weight", "bias"):
        pieces = pieces[:-1]
    if pieces[-1].isdigit():  # one of several layers without names
        return ".".join(pieces[:-1])
    numbered = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: (numbered[-1] + 2 if numbered else 2)])


def part_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """The norm of each part from those of its parameters."""
    parts: dict[str, list[float]] = {}
    for name, norm in norms.items():
        parts.setdefault(part_of(name), []).append(norm)
    return {part: math.hypot(*inside) for part, inside in parts.items()}


def local(tensor: Tensor) -> Tensor:
    """This process's share of a sharded tensor, and any other tensor as it is; the storage is the same."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_sharded(model: nn.Module) -> bool:
    return any(local(p) is not p for p in model.parameters())


def local_norms(tensors: Iterable[Tensor]) -> Tensor:
    """(n,) norms of what this process holds of each tensor, without waiting for the device."""
    return torch.stack(torch._foreach_norm([local(t) for t in tensors]))
