"""How depths grow: more layers, more applications, more width."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from glissando.block import Block
from glissando.depth import Depth, DiscreteDepth, FlowDepth, TiedDepth
from glissando.errors import ConfigError
from glissando.growth.blocks import begin_blocks, block_table, can_be_identity
from glissando.growth.lifts import Grows, Lift, Table, append, fill, join, linear, tables, tile, under
from glissando.growth.rules import Growth


@singledispatch
def grown_depth(depth: Depth, options: Any, by: Growth) -> Any:
    """The depth's options with the layers or steps that are added. Raises ConfigError for what would compute something
    else."""
    raise ConfigError(f"grow: no rule is registered for how the depth {type(depth).__name__} grows")


@singledispatch
def depth_table(depth: Depth, grown: Any, width: Lift) -> Table:
    """How its parameters go into those of `grown`, where the old blocks have their old names."""
    raise ConfigError(f"grow: no rule is registered for how the depth {type(depth).__name__} grows")


def begin(depth: Depth, grown: Depth) -> None:
    """Make the blocks that `grown` has and `depth` has not the identity."""
    old = {name for name, module in depth.named_modules() if isinstance(module, Block)}
    blocks = {name: module for name, module in grown.named_modules() if isinstance(module, Block)}
    begin_blocks([b for name, b in blocks.items() if name not in old], [b for n, b in blocks.items() if n in old])


@grown_depth.register
def _(depth: DiscreteDepth, options: Any, by: Growth) -> Any:
    if by.steps:
        raise ConfigError(f"grow: steps {by.steps} are applications of a tied depth; this one is discrete, add layers")
    new = range(options.layers, options.layers + by.layers)
    exact = all(can_be_identity(block) for block in depth.blocks)  # type: ignore[arg-type]
    return replace(options, layers=new.stop, gated=[*options.gated, *([] if exact else new)])


@grown_depth.register
def _(depth: TiedDepth, options: Any, by: Growth) -> Any:
    if by.layers:
        raise ConfigError(
            f"grow: {by.layers} more layers would change the order of applications in a tied depth, and so the result; "
            "add applications with steps"
        )
    new = range(options.n_steps, options.n_steps + by.steps)
    return replace(options, n_steps=new.stop, gated=[*options.gated, *new])


@grown_depth.register
def _(depth: FlowDepth, options: Any, by: Growth) -> Any:
    if by.steps:
        raise ConfigError(
            f"{by.steps} more steps of a solver are another approximation of the flow and cannot be exact; "
            "load the model with another depth.n_steps, or add layers"
        )
    if by.layers and not can_be_identity(depth.field):
        raise ConfigError(
            "a new layer starts as the identity with a last projection of 0, and the mixer of this flow has "
            "no such projection; grow the width instead"
        )
    return replace(options, layers=options.layers + by.layers)


def _blocks_table(depth: Any, grown: Any, width: Lift, name: str) -> Table:
    table: Table = {}
    for number, (old, new) in enumerate(zip(getattr(depth, name), getattr(grown, name), strict=False)):
        table |= under(f"{name}.{number}", block_table(old, new, width))
    return table


def _gates_table(depth: Any, grown: Any) -> Table:
    if depth.gates is None or grown.gates is None:
        return {}
    return {"gates": Grows(append(len(depth.gates), len(grown.gates)).silent())}


def _shortcuts_table(depth: Any, *rows: Lift, width: Lift) -> Table:
    """Of new blocks they are 0, so that these start as the identity."""
    return {} if depth.shortcuts is None else {"shortcuts": Grows(join(*rows).silent(), width)}


@depth_table.register
def _(depth: DiscreteDepth, grown: Any, width: Lift) -> Table:
    table = _blocks_table(depth, grown, width, "blocks") | _gates_table(depth, grown)
    table |= _shortcuts_table(depth, append(len(depth.blocks), len(grown.blocks)), width=width)
    if depth.gate is None or grown.gate is None:
        return table
    inner = fill(depth.gate.up.out_features, grown.gate.up.out_features)
    up, down = linear(depth.gate.up, inner, width), linear(depth.gate.down, tile(1, 1), inner)
    return table | under("gate", tables({"up": up, "down": down}))


@depth_table.register
def _(depth: TiedDepth, grown: Any, width: Lift) -> Table:
    table = _blocks_table(depth, grown, width, "blocks") | _gates_table(depth, grown)
    steps = append(len(depth.step_bias), len(grown.step_bias))
    return table | _shortcuts_table(depth, steps, width=width) | {"step_bias": Grows(steps, width)}


@depth_table.register
def _(depth: FlowDepth, grown: Any, width: Lift) -> Table:
    first, _, second = depth.time
    table = under("field", block_table(depth.field, grown.field, width))
    table |= tables({"time.0": linear(first, width, tile(1, 1)), "time.2": linear(second, width, width)})
    table |= _blocks_table(depth, grown, width, "before") | _blocks_table(depth, grown, width, "after")
    before, after = append(len(depth.before), len(grown.before)), append(len(depth.after), len(grown.after))
    table |= _shortcuts_table(depth, before, tile(1, 1), after, width=width)
    if depth.control is not None:
        controls = depth.control.in_features
        table |= under("control", linear(depth.control, width, tile(controls, controls)))
    return table | {"alpha": Grows(tile(1, 1))}
