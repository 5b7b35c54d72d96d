"""Axis two: how the representation flows from input to output.

Adding a depth is two edits: its file, and one line in `DEPTHS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from glissando.depth.base import BlockFactory, Depth
from glissando.depth.discrete import DiscreteDepth
from glissando.depth.flow import FlowConfig, FlowDepth
from glissando.depth.tied import TiedDepth
from glissando.errors import ConfigError, unknown_name

DEPTHS: dict[str, type[Depth]] = {"discrete": DiscreteDepth, "tied": TiedDepth, "flow": FlowDepth}


@dataclass
class DepthConfig:
    """kind of depth (see DEPTHS).

    layers   blocks with weights of their own; `flow`: those around the flow
    n_steps  tied: how many times a block is applied, all blocks together; flow: steps of the solver
    gated    discrete, tied: applications x <- x + a (block(x) - x) with a learned a that starts at 0; growth adds them
    control  flow: names of the control's dimensions; none if empty
    flow     further options of the flow
    mean_gate  discrete: what blocks add is gated by its mean so far, one gate for all blocks
    """

    kind: str = "discrete"
    layers: int = 4
    n_steps: int | None = None
    gated: list[int] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    flow: FlowConfig = field(default_factory=FlowConfig)
    mean_gate: bool = False


def build_depth(config: DepthConfig, make_block: BlockFactory) -> Depth:
    """The depth `config.kind`, its blocks made by `make_block`.

    Raises UnknownNameError for a kind that is not registered, ConfigError for an option that the kind would ignore.
    """
    if config.kind not in DEPTHS:
        raise unknown_name("depth", config.kind, DEPTHS)
    kind, default = DEPTHS[config.kind], DepthConfig()
    for name in (f.name for f in fields(config) if f.name not in ("kind", *kind.options)):
        if getattr(config, name) != getattr(default, name):
            users = ", ".join(other for other, depth in DEPTHS.items() if name in depth.options)
            raise ConfigError(
                f"depth.{name} is {getattr(config, name)}, but a {config.kind} depth has no use for it; leave it out, "
                f"or choose a depth.kind that has: {users}"
            )
    return kind(config, make_block)


__all__ = ["DEPTHS", "BlockFactory", "Depth", "DepthConfig", "FlowConfig", "build_depth"]
