"""The contract of a depth: how the representation flows from the embedding to the head.

A depth is built from its options and a factory of blocks, and obeys the mixers' contract: init_state,
forward(x, state, ctx), reset_parameters, accepts. State: one of its blocks' states for each application.

What else is known about a depth it returns by further methods, each optional, as a mixer does:

    applications()              (block, how often it is applied to a token), of each block
    flops()                     (products, other): operations per token beside those of its blocks
    grow(options, by)           its options with the layers or steps that are added; raises ConfigError for what would
                                compute something else
    growth(grown, width)        how its parameters go into those of `grown`, where old blocks have their old names
    picture(compute)            a glissando.mixers.Picture of what happens along depth while `compute()` runs the model
    lower(builder, x, control)  its compiled decoding step
    export_form(capacity)       the module that is traced in its place

Several depths have learned shortcuts from their input, the embedding. Before each application s of a block

    x <- x + c_s x_0 / rms(x_0),     rms(x_0) = sqrt(mean(x_0^2) + eps)

x_0 (B, T, D) is what enters the depth, and c_s are D numbers that start at 0, so that a model with shortcuts starts as
the one without. Gates act behind the shortcut: they scale what the block adds and not what the shortcut does. The field
of a flow reads h + c x_0 / rms(x_0) at every evaluation. Shortcuts from the embedding are of the modded-nanogpt
speedruns (Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt), where two numbers a block weigh x and x_0.
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
from glissando.kernels.plain import same_operations
from glissando.kernels.rms_norm import rms_norm
from glissando.mixers import Context, Signal
from glissando.state import State
from glissando.widening import Grows, Lift, Table, join, under

#: of the rms of what shortcuts add
EPS = 1e-6
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

    def flops(self) -> tuple[float, float]:
        """(products, other): operations per token beside those of the blocks."""
        return 0.0, 0.0

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


def blocks_growth(old: Iterable[nn.Module], grown: Iterable[nn.Module], width: Lift, name: str) -> Table:
    """How the blocks of a list `name` go into those of another, whose new ones come last."""
    table: Table = {}
    for number, (block, new) in enumerate(zip(old, grown, strict=False)):
        table |= under(f"{name}.{number}", block.growth(new, width))  # type: ignore[operator]
    return table


def new_shortcuts(requested: bool, applications: int, hidden_size: int) -> nn.Parameter | None:
    """c (S, D) for S applications of blocks; None where no shortcuts are requested."""
    return nn.Parameter(torch.zeros(applications, hidden_size)) if requested else None


def shortcut_source(shortcuts: Tensor | None, x: Tensor) -> Tensor | None:
    """x_0 / rms(x_0) of the depth's input x (B, T, D); None without shortcuts."""
    return None if shortcuts is None else rms_norm(x, x.new_ones(x.shape[-1]), EPS)


def with_shortcut(x: Tensor, shortcuts: Tensor | None, application: int, source: Tensor | None) -> Tensor:
    """x + c_s x_0 / rms(x_0), or x without shortcuts."""
    return x if shortcuts is None or source is None else x + shortcuts[application] * source


def shortcuts_growth(shortcuts: Tensor | None, *rows: Lift, width: Lift) -> Table:
    """Shortcuts to new blocks are 0, so that these start as the identity."""
    return {} if shortcuts is None else {"shortcuts": Grows(join(*rows).silent(), width)}


def apply_blocks(
    blocks: Iterable[Callable[..., Any]],
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
