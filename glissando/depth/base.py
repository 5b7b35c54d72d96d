"""The contract of a depth: how the representation flows from the embedding to the head.

A depth is built from a factory of blocks and obeys the mixers' contract: init_state, forward(x, state, ctx).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glissando.block import Block
from glissando.errors import ConfigError
from glissando.flops import Flops
from glissando.lifts import Grows, Lift, Table, append, under
from glissando.mixers import EMPTY, Context, Signal
from glissando.state import State

if TYPE_CHECKING:
    from glissando.growth import Growth

#: layer number -> a new block; the number picks the mixer where several alternate
BlockFactory = Callable[[int], Block]


class Depth(nn.Module, ABC):
    """Blocks put one after the other, or one block applied many times, or a flow."""

    #: the fields of DepthConfig that it reads; others must be left at their defaults
    options: frozenset[str] = frozenset({"layers"})

    @property
    @abstractmethod
    def honours(self) -> frozenset[Signal]:
        """The per-token signals that every part of this depth honours, or that the depth itself uses."""

    @abstractmethod
    def calls(self) -> list[tuple[Block, int]]:
        """Each block, and how often it is applied on the way forward."""

    def extra_flops(self) -> Flops:
        """Operations per token beside those of the blocks, see glissando.flops."""
        return Flops()

    @abstractmethod
    def grown_config(self, config: Any, by: Growth) -> Any:
        """`config`, a DepthConfig, with the layers or steps that are added.

        Raises ConfigError for what would compute something else.
        """

    @abstractmethod
    def growth(self, grown: Any, width: Lift) -> Table:
        """How its parameters go into those of `grown`, where the old blocks have their old names."""

    @abstractmethod
    def begin(self, grown: Any) -> None:
        """Make the blocks that `grown` has and this depth has not the identity."""

    @property
    @abstractmethod
    def n_residuals(self) -> int:
        """How many branches are added to the representation on its way: initialisation scales them by it."""

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> (B, T, D) and the state after it; None in, None out."""


class SequentialDepth(Depth):
    """Applications of blocks one after the other. State: a tuple with one state for each application.

    The applications in `gated` are x <- x + a (block(x) - x), each with a learned a that starts at 0.
    """

    def __init__(self, blocks: list[Block], n_applications: int, gated: list[int]) -> None:
        super().__init__()
        if len(set(gated)) < len(gated) or any(not 0 <= step < n_applications for step in gated):
            raise ConfigError(
                f"depth.gated lists applications, each once and from 0 to {n_applications - 1}; got {gated}"
            )
        self.blocks = nn.ModuleList(blocks)
        self.gated = {step: index for index, step in enumerate(gated)}
        self.gates = nn.Parameter(torch.zeros(len(gated))) if gated else None
        self.gradient_checkpointing = False

    def reset_parameters(self) -> None:
        if self.gates is not None:
            nn.init.zeros_(self.gates)

    @property
    @abstractmethod
    def order(self) -> list[int]:
        """The block of each application."""

    def enter(self, x: Tensor, step: int) -> Tensor:
        """What application `step` is given."""
        return x

    @property
    def honours(self) -> frozenset[Signal]:
        return reduce(frozenset.__and__, [block.honours for block in self.blocks])  # type: ignore[misc]

    def growth(self, grown: Any, width: Lift) -> Table:
        table: Table = {}
        for number, (old, new) in enumerate(zip(self.blocks, grown.blocks, strict=False)):
            table |= under(f"blocks.{number}", old.growth(new, width))  # type: ignore[operator]
        if self.gates is not None and grown.gates is not None:
            table["gates"] = Grows(append(len(self.gates), len(grown.gates)).silent())
        return table

    def begin(self, grown: SequentialDepth) -> None:
        begin_blocks(grown.blocks[len(self.blocks) :], [*grown.blocks[: len(self.blocks)]])

    def calls(self) -> list[tuple[Block, int]]:
        return [(block, self.order.count(i)) for i, block in enumerate(self.blocks)]  # type: ignore[misc]

    @property
    def n_residuals(self) -> int:
        return sum(self.blocks[i].n_residuals for i in self.order)  # type: ignore[misc]

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        return tuple(self.blocks[i].init_state(batch_size, device, dtype) for i in self.order)  # type: ignore[operator]

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, tuple | None]:
        ctx, order, after = ctx or EMPTY, self.order, []
        befores = [None] * len(order) if state is None else state
        for step, (i, before) in enumerate(zip(order, befores, strict=True)):
            y, new = self._apply_step(step, i, x, before, ctx)
            x = self._gate(x, y, step)
            after.append(new)
        return x, None if state is None else tuple(after)

    def apply_block(self, i: int, x: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        """Block i on x; None in, None out."""
        return self.blocks[i](x, state, ctx)

    def _gate(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        return y if self.gates is None or step not in self.gated else x + self.gates[self.gated[step]] * (y - x)

    def _apply_step(self, step: int, i: int, x: Tensor, before: State, ctx: Context) -> tuple[Tensor, State]:
        def run(h: Tensor) -> tuple[Tensor, State]:
            return self.apply_block(i, self.enter(h, step), before, ctx)

        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(run, x, use_reentrant=False)
        return run(x)


def begin_blocks(new: Iterable[nn.Module], old: list[nn.Module]) -> None:
    """Make `new` blocks the identity where they can be (others have a gate), with what only a trained one knows."""
    for block in new:
        assert isinstance(block, Block)
        like = next((other.mixer for other in old if type(other.mixer) is type(block.mixer)), None)
        if like is not None:
            block.mixer.begin_like(like)
        if block.can_rest:
            block.rest()
