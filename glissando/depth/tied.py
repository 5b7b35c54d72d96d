"""Tied depth: a few blocks applied again and again, x <- block(x + b_s) for s = 1..S.

The bias b_s tells an application which step it is; everything else is shared. With `layers` L > 1 the blocks take
turns (1, 2, ..., L, 1, 2, ...). Universal Transformers: Dehghani et al. 2019, arXiv 1807.03819; the bias per step is
the Continuous Transformer's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glissando.depth.base import BlockFactory, SequentialDepth
from glissando.errors import ConfigError
from glissando.lifts import Grows, Lift, Table, append

if TYPE_CHECKING:
    from glissando.depth import DepthConfig
    from glissando.growth import Growth


class TiedDepth(SequentialDepth):
    """`layers` blocks in turn, `n_steps` applications in all; one state for each application."""

    options = frozenset({"layers", "n_steps", "gated"})

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        if config.n_steps is None or config.n_steps < config.layers:
            raise ConfigError(
                f"a tied depth needs depth.n_steps, how many times its {config.layers} layers are applied in all, at "
                f"least once each; got {config.n_steps}. Set for example depth.n_steps: {6 * config.layers}"
            )
        super().__init__([make_block(i) for i in range(config.layers)], config.n_steps, config.gated)
        width: Any = self.blocks[0].hidden_size
        self.step_bias = nn.Parameter(torch.empty(config.n_steps, width))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.step_bias, std=0.02)

    def grown_config(self, config: DepthConfig, by: Growth) -> DepthConfig:
        if by.layers:
            raise ConfigError(
                f"grow: {by.layers} more layers would take other turns in a tied depth, and so compute something else; "
                "add applications with steps"
            )
        new = range(config.n_steps or 0, (config.n_steps or 0) + by.steps)
        return replace(config, n_steps=new.stop, gated=[*config.gated, *new])

    def growth(self, grown: Any, width: Lift) -> Table:
        steps = append(len(self.step_bias), len(grown.step_bias))
        return super().growth(grown, width) | {"step_bias": Grows(steps, width)}

    @property
    def order(self) -> list[int]:
        return [step % len(self.blocks) for step in range(len(self.step_bias))]

    def enter(self, x: Tensor, step: int) -> Tensor:
        return x + self.step_bias[step]
