"""What a model costs: floating-point operations per token, from the method `flops` of its mixers and `applications` of
its depth.

A multiplication and an addition are two. Counted are

    products  of matrices: every linear map, the head, attention's weights and sums, energies; as PyTorch's own counter
              (torch.utils.flop_counter) finds them when every operation runs its plain reference
    other     recurrences (8 a complex channel: one multiply-add), matrix exponentials, Fourier transforms (5 N log2 N
    each) and short
              convolutions, which are no products of matrices

and not what is done to each number alone: norms, activations, softmax, rotations. Attention is charged for all T keys
at every one of T positions, whether a kernel skips the masked half, or sorts, or not: it is the definition's cost. What
a flow does once a call and not for every token (its network of tau) is left out, as is its control's term.

Training costs three times the forward pass: each product has two in its backward. Recomputation (gradient
checkpointing) comes on top and is not counted, as is usual.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from glissando.block import Block
from glissando.errors import ConfigError
from glissando.mixers import method_of
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
    """The FLOPs of all nn.Linear inside `module`, each applied once to a token."""
    return Flops(sum(2.0 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)))


def forward_flops(model: LanguageModel, length: int) -> Flops:
    """Per token, the mean over a sequence of `length` tokens read from its beginning.

    Raises ValueError for a length below 1, ConfigError for a mixer or depth that has no such method.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    total = Flops(2.0 * model.width * model.config.vocab_size)
    if model.lift is not None:
        total = total.plus(linear_flops(model.lift))
    for block, times in method_of(model.depth, "applications", "counting FLOPs")():
        total = total.plus(block_flops(block, length), times)
    return total.plus(Flops(*model.depth.flops()))


def block_flops(block: Block, length: int) -> Flops:
    """The FLOPs of one residual block, per token at `length` tokens."""
    taps = 0 if block.conv is None else block.conv.weight.numel()
    mixing = Flops(*method_of(block.mixer, "flops", "counting FLOPs")(length))
    return linear_flops(block).plus(mixing).plus(Flops(other=2.0 * taps))


def training_flops(model: LanguageModel, length: int) -> float:
    """Per token of a training step on sequences of `length` tokens: three times the forward pass."""
    return 3.0 * forward_flops(model, length).total


def training_flops_or_nan(model: LanguageModel, length: int) -> float:
    """As `training_flops`; NaN where a mixer or the depth of the model does not say."""
    try:
        return training_flops(model, length)
    except ConfigError:
        return math.nan
