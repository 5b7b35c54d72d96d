"""Tied depth: a few blocks applied again and again, x <- block(x + b_s) for s = 1..S.

The bias b_s marks the step; everything else is shared. With `layers` L > 1 the blocks take
turns (1, 2, ..., L, 1, 2, ...). The applications in `gated` are x <- x + a (block(x + b_s) - x), each with a learned a
that starts at 0: growth adds them. Universal Transformers: Dehghani et al. 2019, arXiv 1807.03819; the bias per step
is the Continuous Transformer's. With `shortcuts` each application is preceded by
x <- x + c_s x_0 / rms(x_0), x_0 the depth's input (glissando/depth/shortcuts.py).
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import PositiveInt

from glissando.config import options, recorded
from glissando.depth.base import BlockFactory, DepthOptions, register_depth
from glissando.depth.discrete import Stack
from glissando.errors import ConfigError
from glissando.widening import Growth


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
