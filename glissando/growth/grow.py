"""Growing a trained model without changing what it computes.

Width, heads, MLPs and states are tiled, with noise in opposite pairs so that the copies diverge; see
glissando.widening, and docs/growth.md for why each step is exact. New layers start as the identity. What a new
size would change silently is pinned in the configuration: head size, RoPE's frequencies, the softmax's scale, hidden
widths.

    width      hidden_size, tiled; a tied head's logits are scaled by 1 / width
    heads      heads of `attention` and `tau`, those that share keys or values too
    ffn        hidden units of the MLPs
    state      channels of `spectral`, entries of the state of `liquid`
    layers     new blocks at the end (of a flow: on both of its sides), whose last projections are 0; where that is not
               the identity, as in post-norm models, x <- (1 - a) x + a block(x) with a = 0, learned
    steps      further applications of a tied depth, each with such an a
    head_size  new features of each head that nothing reads yet: keys of 0, and values that are read with 0; the keys of
               `tau` are tiled instead, as zeros would alter its energies
    vocab      new rows of the embedding and the head

More steps of an ODE solver, and more layers within a tied depth, compute something else, and raise.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glissando.block import Block, mlp_hidden
from glissando.errors import ConfigError
from glissando.mixers import MIXERS, Mixer, method_of
from glissando.model import ComplexHead, LanguageModel, ModelConfig
from glissando.widening import Grows, Growth, Reads, Table, append, grow_norm, linear, tables, tile, under


def grow(model: LanguageModel, **growth: Any) -> LanguageModel:
    """A larger model that computes the same function. The given model does not change.

    A frozen parameter (requires_grad False) stays frozen, with its new rows; new parameters are trained.

    Args:
        model: The model to grow.
        growth: Options of `glissando.growth.Growth`: factors `width`, `heads`, `ffn` and `state`, numbers of new
            `layers` and `steps`, new sizes `head_size` and `vocab`, and `noise` and `seed`. With `vocab`, the
            logits of the old tokens are the same; the tokenizer does not change.

    Raises:
        ConfigError: The model does not have one of these axes, or the axis cannot be grown exactly; the message
            contains the reason.
    """
    return grow_by(model, Growth(**growth)).model


@dataclass(frozen=True)
class Grown:
    """A grown model, and how each of the old one's parameters and buffers went into it."""

    model: LanguageModel
    table: Table

    def moment(self, name: str, value: Tensor, power: int) -> Tensor:
        """A mean of the gradients of the parameter `name`, or of their squares (`power` 2), grown: divided by M s or
        (M s)^2; 0 for what is new."""
        grows = self.table[name]
        assert isinstance(grows, Grows)
        return grows.place(value, value.new_zeros(grows.shape[1]), (grows.copies * grows.share) ** -power)


@torch.no_grad()
def grow_by(model: LanguageModel, by: Growth) -> Grown:
    """As `grow`, and what its optimizer's state has to know."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"grow needs a glissando.LanguageModel; got a {type(model).__name__}")
    config = grown_config(model, by)
    like = model.embedding.weight
    with torch.random.fork_rng([]):
        torch.manual_seed(by.seed)
        grown = LanguageModel(_with_weights(config, model), model.tokenizer).to(like.device, like.dtype)
    grown.config = config
    grown.train(model.training)
    table, generator = model_table(model, grown), torch.Generator().manual_seed(by.seed)
    old, new = model.state_dict(), grown.state_dict()
    if missing := sorted(set(old) - set(table)):
        raise ConfigError(
            f"grow: the method `growth` of a part leaves out {', '.join(missing[:6])}; add them to its table"
        )
    for name, grows in table.items():
        if isinstance(grows, Tensor):
            new[name].copy_(grows)
            continue
        if (shapes := grows.shape) != (list(old[name].shape), list(new[name].shape)):
            raise ValueError(
                f"{name} is {list(old[name].shape)} and {list(new[name].shape)}, its growth table has {shapes}"
            )
        new[name].copy_(grows.value(old[name], new[name], by.noise, generator))
    _begin(model.depth, grown.depth)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in grown.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return Grown(grown, table)


def grown_config(model: LanguageModel, by: Growth) -> ModelConfig:
    """The configuration of the grown model.

    Raises ConfigError for an axis that the model does not have, or that cannot be grown exactly.
    """
    c, config = model.config, copy.deepcopy(model.config)
    config.hidden_size = c.hidden_size * by.width
    config.logit_scale = c.logit_scale / by.width if c.tied_head else c.logit_scale
    if by.vocab is not None and by.vocab < c.vocab_size:
        raise ConfigError(f"grow: vocab must be at least the {c.vocab_size} tokens that the model has, got {by.vocab}")
    config.vocab_size = by.vocab or c.vocab_size
    if config.block.mlp.kind != "none":
        config.block.mlp.hidden = mlp_hidden(config.block.mlp, model.width) * by.factor("ffn")
    elif by.ffn is not None:
        raise ConfigError(f"grow: ffn {by.ffn} was given, and this model has no MLP (block.mlp.kind is none)")
    _require_axes(model, by)
    grown = [method_of(MIXERS.class_of(o), "grow", "grow")(o, model.width, by) for o in _used_options(model)]
    config.mixer = [*grown, *copy.deepcopy(c.mixers[len(grown) :])] if isinstance(c.mixer, list) else grown[0]
    config.depth = method_of(model.depth, "grow", "grow")(c.depth, by)
    return config


def _used_options(model: LanguageModel) -> list[Any]:
    """The options of the mixers that a layer has: a short model may not come to the end of a list."""
    layers = sum(isinstance(module, Mixer) for module in model.modules())
    return model.config.mixers[:layers]


def _with_weights(config: ModelConfig, model: LanguageModel) -> ModelConfig:
    """`config` without the files that only a new mixer reads, but for mixers that `model` has none of."""
    used = len(_used_options(model))
    config = copy.copy(config)
    mixers = [o.without_files() if i < used and hasattr(o, "without_files") else o for i, o in enumerate(config.mixers)]
    config.mixer = mixers if isinstance(config.mixer, list) else mixers[0]
    return config


def _require_axes(model: LanguageModel, by: Growth) -> None:
    """Raise ConfigError for an axis of mixers that none of this model's has."""
    names = sorted({MIXERS.kind_of(options) for options in _used_options(model)})
    for axis in ("heads", "state", "head_size"):
        if getattr(by, axis) is not None and not any(axis in growth_axes(MIXERS[name]) for name in names):
            users = ", ".join(name for name in MIXERS if axis in growth_axes(MIXERS[name]))
            raise ConfigError(
                f"grow: {axis} {getattr(by, axis)} was given, and this model's mixer is {', '.join(names)}, which has "
                f"none to grow; {users} would. Leave it out"
            )


def growth_axes(mixer: type[Mixer]) -> frozenset[str]:
    """Which of `heads`, `state` and `head_size` a class of mixers can grow."""
    return getattr(mixer, "growth_axes", frozenset())


def model_table(model: LanguageModel, grown: LanguageModel) -> Table:
    """How every parameter and buffer goes into those of `grown`."""
    size = tile(model.config.hidden_size, grown.config.hidden_size)
    pair = model.width // model.config.hidden_size
    width = size * tile(pair, pair)
    words = append(model.config.vocab_size, grown.config.vocab_size)
    table = under("embedding", {"weight": Grows(words, size)})
    table |= under("depth", method_of(model.depth, "growth", "grow")(grown.depth, width))
    if model.position_embedding is not None:
        places = model.position_embedding.num_embeddings
        table |= under("position_embedding", {"weight": Grows(tile(places, places), size)})
    table |= tables({"lift": linear(model.lift, width, size), "norm": grow_norm(model.norm, width)})
    if isinstance(model.head, ComplexHead):
        bias = {} if model.head.bias is None else {"bias": Grows(words, tile(2, 2))}
        table |= under("head", {"weight": Grows(words, Reads(size), tile(2, 2)), **bias})
    elif isinstance(model.head, nn.Linear):
        table |= under("head", linear(model.head, words, width))
    return table if model.head_bias is None else table | {"head_bias": Grows(words)}


def _begin(depth: nn.Module, grown: nn.Module) -> None:
    """Make the blocks that `grown` has and `depth` has not the identity."""
    old = {name for name, module in depth.named_modules() if isinstance(module, Block)}
    blocks = {name: module for name, module in grown.named_modules() if isinstance(module, Block)}
    for name, block in blocks.items():
        if name not in old:
            block.begin_after([blocks[other] for other in blocks if other in old])
