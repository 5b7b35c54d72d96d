"""Growing a trained model without changing what it computes.

Width, heads, MLPs and states are tiled, with noise in opposite pairs so that the copies part company; see
glissando.lifts, and docs/growth.md for why each step is exact. New layers start as the identity. What a new size would
change silently is pinned in the configuration: head size, RoPE's frequencies, the softmax's scale, hidden widths.

    width      hidden_size, tiled; a tied head's logits are scaled by 1 / width
    heads      heads of `attention` and `tau`, those that share keys or values too
    ffn        hidden units of the MLPs
    state      channels of `spectral`, entries of the state of `liquid`
    layers     new blocks at the end (of a flow: on both of its sides), whose last projections are 0; where that is not
               the identity, as in post-norm models, x <- (1 - a) x + a block(x) with a = 0, learned
    steps      further applications of a tied depth, each with such an a
    head_size  new features of each head that nobody hears yet: keys of 0, and values that are read with 0; the keys of
               `tau` are tiled instead, as zeros would alter its energies
    vocab      new rows of the embedding and the head

More steps of an ODE solver, and more layers within a tied depth, compute something else, and raise.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.block import mlp_hidden
from glissando.errors import ConfigError, unknown_name
from glissando.lifts import Grows, Table
from glissando.mixers import MIXERS
from glissando.model import LanguageModel, ModelConfig


@dataclass(frozen=True)
class Growth:
    """By how much a model grows: factors, numbers of what is added, and new sizes.

    width      factor of the width
    heads      factor of the heads; that of the width if None
    ffn        factor of the MLPs' hidden units; that of the width if None
    state      factor of the channels of `spectral` or the state of `liquid`; that of the width if None
    layers     new blocks
    steps      new applications of a tied depth
    head_size  new size of a head
    vocab      new size of the vocabulary
    noise      deviation of what tells copies apart, relative to that of the weights; 0 keeps copies alike for ever
    seed       of the noise and of what is new
    dropout    `kept`, or `published`: min(0.1, 0.5 D / 256) at the new width D before each residual sum; the logits in
               evaluation mode are the same
    """

    width: int = 1
    heads: int | None = None
    ffn: int | None = None
    state: int | None = None
    layers: int = 0
    steps: int = 0
    head_size: int | None = None
    vocab: int | None = None
    noise: float = 0.2
    seed: int = 0
    dropout: Literal["kept", "published"] = "kept"

    def check(self) -> None:
        """Raise ConfigError for a number out of its range."""
        what = {
            **dict.fromkeys(("width", "heads", "ffn", "state"), ("a factor", 1)),
            **dict.fromkeys(("layers", "steps"), ("a number of new ones", 0)),
            **dict.fromkeys(("head_size", "vocab"), ("a new size", 1)),
        }
        optional = ("heads", "ffn", "state", "head_size", "vocab")
        for name, (meaning, least) in what.items():
            value = getattr(self, name)
            if not (value is None and name in optional) and not (_is_whole(value) and value >= least):
                raise ConfigError(f"grow: {name} is {meaning}, a whole number of at least {least}; got {value!r}")
        if self.dropout not in ("kept", "published"):
            raise unknown_name("grow: dropout", str(self.dropout), ["kept", "published"])
        if not _is_whole(self.seed):
            raise ConfigError(f"grow: seed must be a whole number, got {self.seed!r}")
        if isinstance(self.noise, bool) or not isinstance(self.noise, int | float) or not 0 <= self.noise < 1:
            raise ConfigError(f"grow: noise must be at least 0 and below 1, got {self.noise!r}; 0.2 works well")

    def factor(self, name: str) -> int:
        """That of `heads`, `ffn` or `state`, which follow the width unless they are given."""
        given = getattr(self, name)
        return self.width if given is None else given


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def grow(
    model: LanguageModel,
    *,
    width: int = 1,
    heads: int | None = None,
    ffn: int | None = None,
    state: int | None = None,
    layers: int = 0,
    steps: int = 0,
    head_size: int | None = None,
    vocab: int | None = None,
    noise: float = 0.2,
    seed: int = 0,
    dropout: Literal["kept", "published"] = "kept",
) -> LanguageModel:
    """A larger model that computes the same function; `model` stays as it is. See `Growth` for the arguments.

    A parameter that is frozen (requires_grad False) stays so as a whole, its new rows too; new parameters are trained.

    With `vocab`, the logits of the old tokens are the same; the tokenizer stays, and knows no new ones.

    Raises ConfigError for an axis that the model does not have, or that cannot be grown exactly, and says why.
    """
    by = Growth(width, heads, ffn, state, layers, steps, head_size, vocab, noise, seed, dropout)
    return grow_by(model, by).model


@dataclass(frozen=True)
class Grown:
    """A grown model, and how each of the old one's parameters and buffers went into it."""

    model: LanguageModel
    table: Table

    def moments(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Adam's moments of the parameter `name`, grown: m / (M s) and v / (M s)^2; 0 for what is new."""
        grows = self.table[name]
        assert isinstance(grows, Grows)
        ratio = 1 / (grows.copies * grows.share)
        empty = first.new_zeros(grows.shape[1])
        return grows.place(first, empty, ratio), grows.place(second, empty, ratio**2)


@torch.no_grad()
def grow_by(model: LanguageModel, by: Growth) -> Grown:
    """As `grow`, and what its optimizer's state has to know."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"grow makes language models larger, a glissando.LanguageModel; got a {type(model).__name__}")
    config = grown_config(model, by)
    followed = copy.deepcopy(config)
    for name in _used_mixers(model):  # a mixer that the old model has nothing of starts as a new one
        if hasattr(options := getattr(followed.mixers, name), "weights_follow"):
            options.weights_follow()
    like = model.embedding.weight
    with torch.random.fork_rng([]):
        torch.manual_seed(by.seed)
        grown = LanguageModel(followed, model.tokenizer).to(like.device, like.dtype)
    grown.config = config
    grown.train(model.training)
    table, generator = model.growth(grown), torch.Generator().manual_seed(by.seed)
    old, new = model.state_dict(), grown.state_dict()
    _require_whole(table, old)
    for name, grows in table.items():
        if isinstance(grows, Tensor):
            new[name].copy_(grows)
            continue
        if (shapes := grows.shape) != (list(old[name].shape), list(new[name].shape)):
            raise ValueError(f"{name} is {list(old[name].shape)} and {list(new[name].shape)}, its growth says {shapes}")
        new[name].copy_(grows.value(old[name], new[name], by.noise, generator))
    model.depth.begin(grown.depth)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in grown.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return Grown(grown, table)


def grown_config(model: LanguageModel, by: Growth) -> ModelConfig:
    """The configuration of the grown model.

    Raises ConfigError for an axis that the model does not have, or that cannot be grown exactly.
    """
    by.check()
    c, config = model.config, copy.deepcopy(model.config)
    config.hidden_size = c.hidden_size * by.width
    config.logit_scale = c.logit_scale / by.width if c.tied_head else c.logit_scale
    config.vocab_size = _grown_vocabulary(c.vocab_size, by)
    _grow_mlp(config, model.width, by)
    names = _used_mixers(model)
    _require_axes(names, by)
    for name in names:
        options: Any = getattr(c.mixers, name)
        setattr(config.mixers, name, MIXERS[name].grown_config(options, model.width, by))
    config.depth = model.depth.grown_config(c.depth, by)
    if by.dropout == "published":
        _publish_dropout(config)
    return config


def _publish_dropout(config: ModelConfig) -> None:
    """The Minimal Transformer's rule; logits in evaluation mode do not depend on it."""
    share = min(0.1, 0.5 * config.hidden_size / 256)
    config.block.mixer_dropout = share
    config.block.mlp_dropout = share if config.block.mlp.kind != "none" else 0.0


def _used_mixers(model: LanguageModel) -> list[str]:
    """Those that a layer has: a short model may not come to the end of a list."""
    used = {type(block.mixer) for block, _ in model.depth.calls()}
    return [name for name, mixer in MIXERS.items() if mixer in used]


def _grown_vocabulary(old: int, by: Growth) -> int:
    if by.vocab is not None and by.vocab < old:
        raise ConfigError(f"grow: vocab must be at least the {old} tokens that the model has, got {by.vocab}")
    return by.vocab or old


def _grow_mlp(config: ModelConfig, width: int, by: Growth) -> None:
    mlp = config.block.mlp
    if mlp.kind != "none":
        mlp.hidden = mlp_hidden(mlp, width) * by.factor("ffn")
    elif by.ffn is not None:
        raise ConfigError(f"grow: ffn {by.ffn} was given, and this model has no MLP (block.mlp.kind is none)")


def _require_axes(names: list[str], by: Growth) -> None:
    """Raise ConfigError for an axis of mixers that none of this model's has."""
    for axis in ("heads", "state", "head_size"):
        having = [name for name in names if axis in MIXERS[name].axes]
        if getattr(by, axis) is not None and not having:
            users = ", ".join(name for name, mixer in MIXERS.items() if axis in mixer.axes)
            raise ConfigError(
                f"grow: {axis} {getattr(by, axis)} was given, and this model's mixer is {', '.join(names)}, which has "
                f"none to grow; {users} would. Leave it out"
            )


def _require_whole(table: Table, old: dict[str, Tensor]) -> None:
    missing = sorted(set(old) - set(table))
    if missing:
        raise ConfigError(f"grow: nothing says how {', '.join(missing[:6])} grow; add them to the module's `growth`")
