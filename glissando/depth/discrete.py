"""Stacks of blocks: `discrete`, S different ones, and `tied`, a few that are applied again and again.

    discrete   x <- block_S(... block_1(x))
    tied       x <- block(x + b_s) for s = 1..S

The bias b_s marks the step; everything else is shared. A tied depth of L > 1 blocks lets them take turns (1, 2, ..., L,
1, 2, ...). The applications in `gated` are x <- x + a (block(x) - x), each with a learned a that starts at 0: growth
adds such blocks. With `mean_gate`, what each block of a discrete depth adds is multiplied by one gate that all share
(glissando/depth/mean_gate.py): x <- x + g (block(x) - x). With `shortcuts` each application is preceded by
x <- x + c_s x_0 / rms(x_0), x_0 the depth's input (glissando/depth/base.py).

Universal Transformers: Dehghani et al. 2019, arXiv 1807.03819; the bias per step is the Continuous Transformer's.
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
    new_shortcuts,
    register_depth,
    shortcut_source,
    shortcuts_growth,
    with_shortcut,
)
from glissando.depth.mean_gate import MeanGate
from glissando.errors import ConfigError
from glissando.mixers import EMPTY, Context
from glissando.widening import Grows, Growth, Lift, Table, append, fill, linear, tables, tile, under


@options
class DiscreteConfig(DepthOptions):
    """Options of the `discrete` depth.

    layers     blocks, each applied once
    gated      numbers of the blocks with a learned gate that starts at 0; growth adds them
    mean_gate  what blocks add is gated by its mean so far, one gate for all blocks
    shortcuts  the embedding is added before each block, with D learned weights a block that start at 0
    """

    gated: list[int] = recorded(default_factory=list)
    mean_gate: bool = False
    shortcuts: bool = False


class Stack(Depth):
    """Blocks applied in `order`, a block's number for each application, each application with a state, a learned gate
    where it is `gated`, a row of `step_bias` where steps are marked, and one of `shortcuts`."""

    undecayed = ("shortcuts",)

    def __init__(self, config: Any, make_block: BlockFactory, applications: int, marks_steps: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.gate: MeanGate | None = None  # of a discrete depth, which has one or none
        if config.layers < 1:
            raise ConfigError(f"depth.layers must be at least 1, got {config.layers}")
        # The blocks first: loading ends in them where a configuration has more than the weights can be of.
        self.blocks = nn.ModuleList([make_block(i) for i in range(config.layers)])
        self.order = [step % config.layers for step in range(applications)]
        gated, most = config.gated, applications - 1
        if len(set(gated)) < len(gated) or any(not 0 <= step <= most for step in gated):
            raise ConfigError(f"depth.gated lists applications, each once and from 0 to {most}; got {gated}")
        self.gated = {step: index for index, step in enumerate(gated)}
        self.gates = nn.Parameter(torch.zeros(len(gated))) if gated else None
        width: int = self.blocks[0].hidden_size  # type: ignore[assignment]
        self.step_bias = nn.Parameter(torch.empty(applications, width)) if marks_steps else None
        self.shortcuts = new_shortcuts(config.shortcuts, applications, width)

    def reset_parameters(self) -> None:
        for parameter in (self.gates, self.shortcuts):
            if parameter is not None:
                nn.init.zeros_(parameter)
        if self.step_bias is not None:
            nn.init.normal_(self.step_bias, std=0.02)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        return tuple(self.blocks[i].init_state(batch_size, device, dtype) for i in self.order)

    def forward(self, x: Tensor, state: tuple | None = None, ctx: Context | None = None) -> tuple[Tensor, tuple | None]:
        ctx, source, after = ctx or EMPTY, shortcut_source(self.shortcuts, x), []
        befores = (None,) * len(self.order) if state is None else state
        for step, (i, before) in enumerate(zip(self.order, befores, strict=True)):
            x = with_shortcut(x, self.shortcuts, step, source)
            read = x if self.step_bias is None else x + self.step_bias[step]
            inner, mean = (before, None) if self.gate is None or before is None else before
            y, new = self.run(self.blocks[i])(read, inner, ctx)
            if self.gate is not None:
                gate, mean = self.gate(y - x, mean, ctx)
                y, new = x + gate * (y - x), (new, mean)
            x = y if self.gates is None or step not in self.gated else x + self.gates[self.gated[step]] * (y - x)
            ctx.keep(x)
            after.append(new)
        return x, None if state is None else tuple(after)

    def applications(self) -> list[tuple[Any, int]]:
        return [(block, self.order.count(i)) for i, block in enumerate(self.blocks)]

    def growth(self, grown: Any, width: Lift) -> Table:
        steps = append(len(self.order), len(grown.order))
        table = blocks_growth(self.blocks, grown.blocks, width, "blocks")
        if self.gates is not None and grown.gates is not None:  # those of new blocks are 0
            table |= {"gates": Grows(append(len(self.gates), len(grown.gates)).silent())}
        table |= shortcuts_growth(self.shortcuts, steps, width=width)
        return table if self.step_bias is None else table | {"step_bias": Grows(steps, width)}

    def lower(self, builder: Any, x: int, control: int | None) -> tuple[int, Any]:
        states, source = [], x
        for step, i in enumerate(self.order):
            x = builder.with_shortcut(x, self.shortcuts, step, source)
            y, state = self.lowered(builder, self.blocks[i], step, x)
            x = builder.gated(self.gates, self.gated.get(step), x, y, self.blocks[i].hidden_size)
            states.append(state)
        return x, tuple(states)

    def lowered(self, builder: Any, block: nn.Module, step: int, x: int) -> tuple[int, Any]:
        """The compiled form of an application."""
        return builder.block(block, x if self.step_bias is None else builder.shifted(x, self.step_bias[step]))


@register_depth("discrete", DiscreteConfig)
class DiscreteDepth(Stack):
    """A Transformer's depth. State: each block's, and with `mean_gate` its mean beside it."""

    lower = Stack.lower  # a class's own, as a subclass may compute something else

    def __init__(self, config: DiscreteConfig, make_block: BlockFactory) -> None:
        super().__init__(config, make_block, config.layers)
        self.gate = MeanGate(self.blocks[0].hidden_size) if config.mean_gate else None  # type: ignore[arg-type]

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> tuple:
        states = Stack.init_state(self, batch_size, device, dtype)
        if self.gate is None:
            return states
        return tuple((state, self.gate.init_state(batch_size, device, dtype)) for state in states)

    def flops(self) -> tuple[float, float]:
        """The mean gate, once a block: two maps and a recurrence of real numbers."""
        if self.gate is None:
            return 0.0, 0.0
        maps = self.gate.up.weight.numel() + self.gate.down.weight.numel()
        return 2.0 * maps * len(self.blocks), 2.0 * self.gate.up.in_features * len(self.blocks)

    def grow(self, options: DiscreteConfig, by: Growth) -> DiscreteConfig:
        if by.steps:
            raise ConfigError(
                f"grow: steps {by.steps} are applications of a tied depth; this one is discrete, add layers"
            )
        new = range(options.layers, options.layers + by.layers)
        exact = all(block.can_be_identity() for block in self.blocks)  # type: ignore[operator]
        return replace(options, layers=new.stop, gated=[*options.gated, *([] if exact else new)])

    def growth(self, grown: DiscreteDepth, width: Lift) -> Table:
        table = super().growth(grown, width)
        if self.gate is None or grown.gate is None:
            return table
        inner = fill(self.gate.up.out_features, grown.gate.up.out_features)
        up, down = linear(self.gate.up, inner, width), linear(self.gate.down, tile(1, 1), inner)
        return table | under("gate", tables({"up": up, "down": down}))

    def lowered(self, builder: Any, block: nn.Module, step: int, x: int) -> tuple[int, Any]:
        y, state = builder.block(block, x)
        if self.gate is None:
            return y, state
        size: int = block.hidden_size  # type: ignore[assignment]
        change, gated = builder.add(y, x, size, -1.0), builder.register(size)
        gate, mean = self.gate.lower(builder, change)
        builder.emit("GATE", x, change, gated, size, gate)
        return gated, (state, mean)


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
class TiedDepth(Stack):
    """`layers` blocks in turn, `n_steps` applications in all; one state for each application."""

    lower = Stack.lower  # a class's own, as a subclass may compute something else

    def __init__(self, config: TiedConfig, make_block: BlockFactory) -> None:
        if config.n_steps is None or config.n_steps < config.layers:
            raise ConfigError(
                f"a tied depth needs depth.n_steps, how many times its {config.layers} layers are applied in all, at "
                f"least once each; got {config.n_steps}. Set for example depth.n_steps {6 * config.layers}"
            )
        super().__init__(config, make_block, config.n_steps, marks_steps=True)

    def grow(self, options: TiedConfig, by: Growth) -> TiedConfig:
        if by.layers:
            raise ConfigError(
                f"grow: {by.layers} more layers would change the order of applications in a tied depth, and so the "
                "result; add applications with steps"
            )
        assert options.n_steps is not None
        new = range(options.n_steps, options.n_steps + by.steps)
        return replace(options, n_steps=new.stop, gated=[*options.gated, *new])
