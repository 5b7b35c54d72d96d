"""Discrete depth: a stack of S different blocks, x <- block_S(... block_1(x)).

With `mean_gate`, what each block adds is multiplied by one gate that all share (glissando/depth/mean_gate.py):
x <- x + g (block(x) - x).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glissando.depth.base import BlockFactory, SequentialDepth
from glissando.depth.mean_gate import MeanGate
from glissando.errors import ConfigError
from glissando.flops import Flops, linear_flops
from glissando.lifts import Lift, Table, fill, linear, tables, tile, under
from glissando.mixers import Context
from glissando.state import State

if TYPE_CHECKING:
    from glissando.depth import DepthConfig
    from glissando.growth import Growth


class DiscreteDepth(SequentialDepth):
    """A Transformer's depth: `layers` blocks, each applied once. State: each block's, and its mean where gated."""

    options = frozenset({"layers", "gated", "mean_gate"})

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        super().__init__([make_block(i) for i in range(config.layers)], config.layers, config.gated)
        self.gate = MeanGate(self.blocks[0].hidden_size) if config.mean_gate else None  # type: ignore[arg-type]

    def grown_config(self, config: DepthConfig, by: Growth) -> DepthConfig:
        if by.steps:
            raise ConfigError(
                f"grow: steps {by.steps} are applications of a tied depth; this one is discrete, add layers"
            )
        new = range(config.layers, config.layers + by.layers)
        gated = [] if all(block.can_rest for block, _ in self.calls()) else list(new)
        return replace(config, layers=config.layers + by.layers, gated=[*config.gated, *gated])

    def growth(self, grown: DiscreteDepth, width: Lift) -> Table:
        table = super().growth(grown, width)
        if self.gate is None or grown.gate is None:
            return table
        inner = fill(self.gate.up.out_features, grown.gate.up.out_features)
        up, down = linear(self.gate.up, inner, width), linear(self.gate.down, tile(1, 1), inner)
        return table | under("gate", tables({"up": up, "down": down}))

    @property
    def order(self) -> list[int]:
        return list(range(len(self.blocks)))

    def extra_flops(self) -> Flops:
        """Its gate, once a block: two maps and a recurrence of real numbers."""
        if self.gate is None:
            return Flops()
        each = linear_flops(self.gate).plus(Flops(other=2.0 * self.gate.up.in_features))
        return Flops().plus(each, len(self.blocks))

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        states = super().init_state(batch_size, device, dtype)
        if self.gate is None:
            return states
        return tuple((state, self.gate.init_state(batch_size, device, dtype)) for state in states)

    def apply_block(self, i: int, x: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        if self.gate is None:
            return super().apply_block(i, x, state, ctx)
        inner, mean = (None, None) if state is None else state
        y, inner = self.blocks[i](x, inner, ctx)
        gate, mean = self.gate(y - x, mean, ctx)
        return x + gate * (y - x), None if state is None else (inner, mean)
