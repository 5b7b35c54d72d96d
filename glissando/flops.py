"""What a model costs: floating-point operations per token, from one function for every mixer and depth.

A multiplication and an addition are two. Counted are

    products  of matrices: every linear map, the head, attention's weights and sums, energies; as PyTorch's own counter
              (torch.utils.flop_counter) finds them when every operation runs its plain reference
    other     recurrences (8 a complex channel: one multiply-add), matrix exponentials, Fourier transforms (5 N log2 N
    each) and short
              convolutions, which are no products of matrices

and not what is done to each number alone: norms, activations, softmax, rotations. Attention is charged for all T keys
at every one of T positions, whether a kernel skips the masked half, or sorts, or not: it is the definition's cost. What
a flow does once a call and not for every token (its network of tau) is left out, as is its control's term. Where
tokens may halt, none is taken to.

Training costs three times the forward pass: each product has two in its backward. Recomputation (gradient
checkpointing, `checkpoint`, the backward sweep of `reversible`) comes on top and is not counted, as is usual.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import NamedTuple

from torch import nn

from glissando.block import Block
from glissando.depth import Depth, DiscreteDepth, FlowDepth, TiedDepth
from glissando.errors import ConfigError
from glissando.mixers import Attention, Delta, Liquid, Mixer, Spectral, Tau
from glissando.mixers.liquid_dynamics import Diagonal
from glissando.model import LanguageModel


class Flops(NamedTuple):
    """Operations per token; see the module."""

    products: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.other

    def plus(self, other: Flops, times: float = 1.0) -> Flops:
        """self + times other."""
        return Flops(self.products + times * other.products, self.other + times * other.other)


def linear_flops(module: nn.Module) -> Flops:
    """Those of all nn.Linear inside `module`, each applied once to a token."""
    return Flops(sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)))


def forward_flops(model: LanguageModel, length: int) -> Flops:
    """Per token, the mean over a sequence of `length` tokens read from its beginning.

    Raises ValueError for a length below 1, ConfigError for a mixer or depth that has no function registered here.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    total = Flops(2.0 * model.width * model.config.vocab_size)
    if model.lift is not None:
        total = total.plus(linear_flops(model.lift))
    for block, times in applications(model.depth):
        total = total.plus(block_flops(block, length), times)
    return total.plus(depth_flops(model.depth))


def block_flops(block: Block, length: int) -> Flops:
    """Those of one residual block, per token at `length` tokens."""
    taps = 0 if block.conv is None else block.conv.weight.numel()
    return linear_flops(block).plus(mixer_flops(block.mixer, length)).plus(Flops(other=2.0 * taps))


def training_flops(model: LanguageModel, length: int) -> float:
    """Per token of a training step on sequences of `length` tokens: three times the forward pass."""
    return 3.0 * forward_flops(model, length).total


def training_flops_or_nan(model: LanguageModel, length: int) -> float:
    """As `training_flops`; NaN where nothing is registered for a mixer or the depth of the model."""
    try:
        return training_flops(model, length)
    except ConfigError:
        return math.nan


# ---------------------------------------------------------------------- mixers


@singledispatch
def mixer_flops(mixer: Mixer, length: int) -> Flops:
    """Operations per token at `length` tokens, beside those of the mixer's linear maps."""
    raise ConfigError(
        f"no FLOPs are registered for the mixer {type(mixer).__name__}; register a function "
        "with glissando.flops.mixer_flops.register"
    )


@mixer_flops.register
def _(mixer: Attention, length: int) -> Flops:
    """q k' and p v, with as many keys as the window has."""
    return Flops(4.0 * mixer.heads * mixer.head_size * min(length, mixer.config.window or length))


@mixer_flops.register
def _(mixer: Tau, length: int) -> Flops:
    """x'L of every query and key where L is no diagonal, and p v."""
    energies = 0 if mixer.config.laplacian_weights == "diagonal" else mixer.key_size**2
    return Flops(2.0 * mixer.sides * mixer.heads * energies + 2.0 * mixer.heads * mixer.head_size * length)


@mixer_flops.register
def _(mixer: Delta, length: int) -> Flops:
    """S^T k and k u' of each write, and S^T q: the definition's cost, whatever a chunked form spends."""
    return Flops(other=(4.0 * mixer.config.writes + 2.0) * mixer.heads * mixer.key_size * mixer.value_size)


@mixer_flops.register
def _(mixer: Spectral, length: int) -> Flops:
    """The recurrence, and the filter's two transforms."""
    n = mixer.channels
    return Flops(other=8.0 * n + (10.0 * n * math.log2(n) if mixer.config.filter else 0.0))


@mixer_flops.register
def _(mixer: Liquid, length: int) -> Flops:
    """A mode's state and its input, each times a complex number. Dense: B u and the step, and a matrix exponential:
    five products for its polynomial, and about three squarings."""
    n = mixer.size
    return Flops(other=8.0 * n) if isinstance(mixer.dynamics, Diagonal) else Flops(4.0 * n * n, 8 * 2.0 * (n + 1) ** 3)


# ---------------------------------------------------------------------- depths


@singledispatch
def applications(depth: Depth) -> list[tuple[Block, int]]:
    """Each block, and how often it is applied to a token."""
    raise ConfigError(
        f"nothing is registered for how often the depth {type(depth).__name__} applies its blocks; register a "
        "function with glissando.flops.applications.register"
    )


@applications.register
def _(depth: DiscreteDepth) -> list[tuple[Block, int]]:
    return [(block, 1) for block in depth.blocks]  # type: ignore[misc]


@applications.register
def _(depth: TiedDepth) -> list[tuple[Block, int]]:
    return [(block, depth.order.count(i)) for i, block in enumerate(depth.blocks)]  # type: ignore[misc]


@applications.register
def _(depth: FlowDepth) -> list[tuple[Block, int]]:
    return [(depth.field, depth.n_evaluations), *((block, 1) for block in (*depth.before, *depth.after))]


@singledispatch
def depth_flops(depth: Depth) -> Flops:
    """Operations per token of a depth beside those of its blocks."""
    return Flops()


@depth_flops.register
def _(depth: DiscreteDepth) -> Flops:
    """The mean gate, once a block: two maps and a recurrence of real numbers."""
    if depth.gate is None:
        return Flops()
    each = linear_flops(depth.gate).plus(Flops(other=2.0 * depth.gate.up.in_features))
    return Flops().plus(each, len(depth.blocks))
