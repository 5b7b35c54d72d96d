"""Tied depth: a few blocks applied again and again, x <- block(x + b_s) for s = 1..S.

The bias b_s marks the step; everything else is shared. With `layers` L > 1 the blocks take
turns (1, 2, ..., L, 1, 2, ...). The applications in `gated` are x <- x + a (block(x + b_s) - x), each with a learned a
that starts at 0: growth adds them. Universal Transformers: Dehghani et al. 2019, arXiv 1807.03819; the bias per step
is the Continuous Transformer's. With `shortcuts` each application is preceded by
x <- x + c_s x_0 / rms(x_0), x_0 the depth's input (glissando/depth/shortcuts.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from glissando.config import options, recorded
from glissando.depth.base import (
    BlockFactory,
    Depth,
    DepthOptions,
    blocks_growth,
    gates_growth,
    register_depth,
    shortcuts_growth,
)
from glissando.depth.discrete import learned_gates
from glissando.depth.shortcuts import new_shortcuts, shortcut_source, with_shortcut
from glissando.errors import ConfigError
from glissando.mixers import EMPTY, Context
from glissando.widening import Grows, Growth, Lift, Table, append


@options
class TiedConfig(DepthOptions):
    """Options of the `tied` depth.

    layers     blocks with weights of their own, applied in turn
    n_steps    applications in all, at least one for each block
    gated      numbers of the applications with a learned gate that starts at 0; growth adds them
    shortcuts  the embedding is added before each application, with D learned weights each that start at 0
    """

    n_steps: PositiveInt | None = None
    gated: list[int] = recorded(default_factory=list)
    shortcuts: bool = False


@register_depth("tied", TiedConfig)
class TiedDepth(Depth):
    """`layers` blocks in turn, `n_steps` applications in all; one state for each application."""

    undecayed = ("shortcuts",)

    def __init__(self, config: TiedConfig, make_block: BlockFactory) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        if config.n_steps is None or config.n_steps < config.layers:
            raise ConfigError(
                f"a tied depth needs depth.n_steps, how many times its {config.layers} layers are applied in all, at "
                f"least once each; got {config.n_steps}. Set for example depth.n_steps: {6 * config.layers}"
            )
        self.blocks = nn.ModuleList([make_block(i) for i in range(config.layers)])
        self.gated, self.gates = learned_gates(config.gated, config.n_steps)
        width: int = self.blocks[0].hidden_size  # type: ignore[assignment]
        self.step_bias = nn.Parameter(torch.empty(config.n_steps, width))
        self.shortcuts = new_shortcuts(config.shortcuts, config.n_steps, width)

    def reset_parameters(self) -> None:
        if self.gates is not None:
            nn.init.zeros_(self.gates)
        nn.init.normal_(self.step_bias, std=0.02)
        if self.shortcuts is not None:
            nn.init.zeros_(self.shortcuts)

    @property
    def order(self) -> list[int]:
        """The block of each application."""
        return [step % len(self.blocks) for step in range(len(self.step_bias))]

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        return tuple(self.blocks[i].init_state(batch_size, device, dtype) for i in self.order)  # type: ignore[operator]

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, tuple | None]:
        ctx, source, after = ctx or EMPTY, shortcut_source(self.shortcuts, x), []
        befores = (None,) * len(self.step_bias) if state is None else state
        for step, (i, before) in enumerate(zip(self.order, befores, strict=True)):
            x = with_shortcut(x, self.shortcuts, step, source)
            y, new = self.run(self.blocks[i])(x + self.step_bias[step], before, ctx)
            x = y if self.gates is None or step not in self.gated else x + self.gates[self.gated[step]] * (y - x)
            ctx.keep(x)
            after.append(new)
        return x, None if state is None else tuple(after)

    def applications(self) -> list[tuple[Any, int]]:
        return [(block, self.order.count(i)) for i, block in enumerate(self.blocks)]

    def grow(self, options: TiedConfig, by: Growth) -> TiedConfig:
        if by.layers:
            raise ConfigError(
                f"grow: {by.layers} more layers would change the order of applications in a tied depth, and so the "
                "result; add applications with steps"
            )
        assert options.n_steps is not None
        new = range(options.n_steps, options.n_steps + by.steps)
        return replace(options, n_steps=new.stop, gated=[*options.gated, *new])

    def growth(self, grown: TiedDepth, width: Lift) -> Table:
        steps = append(len(self.step_bias), len(grown.step_bias))
        table = blocks_growth(self.blocks, grown.blocks, width, "blocks") | gates_growth(self.gates, grown.gates)
        return table | shortcuts_growth(self.shortcuts, steps, width=width) | {"step_bias": Grows(steps, width)}

    def lower(self, builder: Any, x: int, control: int | None) -> tuple[int, Any]:
        states, source = [], x
        for step, i in enumerate(self.order):
            x = builder.with_shortcut(x, self.shortcuts, step, source)
            block = self.blocks[i]
            y, state = builder.block(block, builder.shifted(x, self.step_bias[step]))
            x = builder.gated(self.gates, self.gated.get(step), x, y, block.hidden_size)
            states.append(state)
        return x, tuple(states)
