"""The contract of a depth: how the representation flows from the embedding to the head.

A depth is built from its options and a factory of blocks, and obeys the mixers' contract: init_state,
forward(x, state, ctx), reset_parameters, accepts. State: one of its blocks' states for each application.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glissando.block import Block
from glissando.config import Registry, options
from glissando.depth.shortcuts import with_shortcut
from glissando.mixers import Context, Signal
from glissando.ops.plain import same_operations
from glissando.state import State

#: layer number -> a new block; the number picks the mixer where several alternate
BlockFactory = Callable[[int], Block]


class Depth(nn.Module, ABC):
    """Blocks put one after the other, or one block applied many times, or a flow.

    A depth that calls its blocks by `run` has an attribute `gradient_checkpointing`, False at first.
    """

    @property
    def accepts(self) -> frozenset[Signal]:
        """The per-token signals that every block accepts, or that the depth itself uses."""
        return accepted_by_blocks(self)

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> (B, T, D) and the state after it; None in, None out. `ctx.keep(x)` after each block."""

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    def reset_parameters(self) -> None:
        """Start the parameters that are its own and not its blocks'."""

    def run(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """The block, recomputed in the backward pass with gradient checkpointing and where gradients are computed."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return partial(checkpoint, block, use_reentrant=False, context_fn=same_operations)
        return block


def accepted_by_blocks(depth: Depth) -> frozenset[Signal]:
    """The per-token signals that every block of a depth accepts."""
    return frozenset.intersection(*[block.accepts for block in depth.modules() if isinstance(block, Block)])


@options
class DepthOptions:
    """Options of every depth.

    layers  number of blocks with weights of their own; of a flow, half of them (rounded down) come before it
    """

    layers: NonNegativeInt = 4


#: depths by name
DEPTHS: Registry[Depth] = Registry("depth", "discrete", DepthOptions)
#: @register_depth("ring", RingConfig) makes a class, built as cls(config, make_block), a depth
register_depth = DEPTHS.register


def build_depth(options: Any, make_block: BlockFactory) -> Depth:
    """A depth of the registered class that these options are of, its blocks made by `make_block`."""
    return DEPTHS.class_of(options)(options, make_block)


def through(
    blocks: Iterable[nn.Module],
    x: Tensor,
    states: tuple,
    ctx: Context,
    shortcuts: Tensor | None = None,
    source: Tensor | None = None,
) -> tuple[Tensor, tuple]:
    """Blocks one after the other, each with its state or None, and with its row of `shortcuts` from `source`."""
    after = []
    for number, (block, before) in enumerate(zip(blocks, states, strict=True)):
        x, new = block(with_shortcut(x, shortcuts, number, source), before, ctx)
        ctx.keep(x)
        after.append(new)
    return x, tuple(after)
