"""Which parameters are trained, and the optimizer by their names: built, its rates set for a step, its state kept."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glissando.depth import Depth
from glissando.errors import ConfigError
from glissando.sharding import copied, is_sharded, local, place
from glissando.training.config import MuonOptions, OptimizerOptions
from glissando.training.muon import MuonWithAdamW, growth_rate
from glissando.training.shares import Share, shares


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Stop training the parameters whose names match a shell pattern.

    Raises ConfigError for a pattern that matches nothing, or if nothing is left to train.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not (matches := fnmatch.filter(named, pattern)):
            raise ConfigError(
                f"training.freeze pattern {pattern!r} matches no parameter; names look like {', '.join([*named][:6])}"
            )
        for name in matches:
            named[name].requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise ConfigError("training.freeze leaves nothing to train")


def inner_part(model: nn.Module) -> nn.Module:
    """The depth of a model of glissando; any other module itself."""
    depth = getattr(model, "depth", None)
    return depth if isinstance(depth, Depth) else model


def build_optimizer(
    model: nn.Module, options: OptimizerOptions, grown: Mapping[str, list[float]], precision: str
) -> torch.optim.Optimizer:
    """AdamW, or Muon with it, with the factors that growth has left; weight decay on matrices alone. `precision` is
    that of the training."""
    fused = not is_sharded(model)
    if not isinstance(options, MuonOptions):
        groups = optimizer_groups(model, grown, options.weight_decay, options.eps)
        return torch.optim.AdamW(groups, options.learning_rate, betas=(options.beta1, options.beta2), fused=fused)
    linear = [m for m in inner_part(model).modules() if isinstance(m, nn.Linear)]
    maps = {id(m.weight) for m in linear}
    matrices = {name for name, p in model.named_parameters() if id(p) in maps} & decayed_names(model)
    by_muon = optimizer_groups(model, grown, options.weight_decay, options.eps, matrices, muon=True)
    others = {name for name, _ in model.named_parameters()} - matrices
    rest = optimizer_groups(model, grown, options.weight_decay, options.eps, others)
    return MuonWithAdamW(by_muon, rest, options, precision, fused)


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay applies to: no vectors and biases of any shape, nor what a module lists in
    `undecayed`, vectors that are written in two dimensions."""
    exempt = {id(getattr(m, name, None)) for m in model.modules() for name in getattr(m, "undecayed", ())}
    return {
        name
        for name, p in model.named_parameters()
        if p.ndim >= 2 and id(p) not in exempt and not name.endswith("bias")
    }


def optimizer_groups(
    model: nn.Module,
    grown: Mapping[str, list[float]],
    weight_decay: float,
    eps: float,
    names: Collection[str] | None = None,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """The trained parameters, of `names` if given, in groups: those that decay and those that do not, of one `Share`,
    and all sharded or none, together; for Muon, or for AdamW.

    `rate` multiplies the learning rate, `names` are the parameters'.
    """
    decayed, growth = decayed_names(model), shares(model, grown)
    groups: dict[tuple[bool, Share, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (names is not None and name not in names):
            continue
        decays, share = name in decayed, growth[name]
        rate = growth_rate(share) if muon else share.rate
        factors = {"weight_decay": weight_decay / rate if decays else 0.0, "eps": eps * share.eps, "rate": rate}
        kind = decays, share, local(parameter) is parameter
        group = groups.setdefault(kind, {"params": [], "names": [], **factors})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def set_rates(optimizer: torch.optim.Optimizer, options: OptimizerOptions, step: int, learning_rate: float) -> None:
    """Each group's share of the learning rate; decay is by rate times weight decay, which release leaves alone."""
    for group in optimizer.param_groups:
        rate = group["rate"] ** options.held(step)
        group["lr"] = learning_rate * rate
        if group["weight_decay"]:
            group["weight_decay"] = options.weight_decay / rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps of each parameter, by its name: copies on the CPU, sharded as the parameter is."""
    states = {name: optimizer.state[p] for name, p, _ in _trained(optimizer) if p in optimizer.state}
    return {name: {key: copied(value) for key, value in state.items()} for name, state in states.items()}


def empty_state(optimizer: torch.optim.Optimizer, saved: Collection[str]) -> dict[str, Tensor]:
    """A tensor for each of the saved ones, parameter/KEY, which becomes the optimizer's state, sharded as the parameter
    is; none for a parameter that is not trained any more."""
    trained, places = {name: p for name, p, _ in _trained(optimizer)}, dict[str, Tensor]()
    for full in saved:
        name, _, key = full.rpartition("/")
        if (parameter := trained.get(name)) is not None:
            places[full] = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
            optimizer.state[parameter][key] = places[full]
    return places


def put_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the optimizer the state that it had; a parameter that is not trained any more needs none."""
    for name, parameter, group in _trained(optimizer):
        if name in saved:
            # The fused kernel reads the count of steps where the weights are, the others on the host.
            count = parameter.device if group.get("fused") else torch.device("cpu")
            optimizer.state[parameter] = {
                key: value.to(count, torch.float32, copy=True) if key == "step" else place(value, parameter)
                for key, value in saved[name].items()
            }


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Each parameter with its name and its group."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield name, parameter, group
