"""How a residual block grows, and how a new one starts as the identity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from glissando.block import MLP, Block
from glissando.errors import ConfigError
from glissando.growth.lifts import Grows, Lift, Table, grow_norm, join, linear, tables, tile, under
from glissando.growth.rules import mixer_rule


def block_table(block: Block, grown: Block, width: Lift) -> Table:
    """How a block's parameters go into those of `grown`. Raises ConfigError if that has another mixer."""
    if type(block.mixer) is not type(grown.mixer):
        raise ConfigError(
            f"grow: where a {type(block.mixer).__name__} stood there would be a {type(grown.mixer).__name__}, as "
            "model.mixer alternates and the layer gets another number: add as many layers as keep the order"
        )
    table = tables(
        {
            "mixer_norm": grow_norm(block.mixer_norm, width),
            "mixer": mixer_rule(block.mixer).table(block.mixer, grown.mixer, width),
            "mlp_norm": {} if block.mlp_norm is None else grow_norm(block.mlp_norm, width),
            "mlp": {} if block.mlp is None or grown.mlp is None else _mlp_table(block.mlp, grown.mlp, width),
        }
    )
    if block.conv is not None:
        taps = block.conv.weight.shape[1]
        table |= under("conv", {"weight": Grows(width, tile(taps, taps))})
    return table if block.mixer_scale is None else table | {"mixer_scale": Grows(tile(1, 1))}


def _mlp_table(mlp: MLP, grown: MLP, width: Lift) -> Table:
    hidden = tile(mlp.down.in_features, grown.down.in_features)
    up = join(hidden, hidden) if mlp.kind == "swiglu" else hidden
    return tables({"up": linear(mlp.up, up, width), "down": linear(mlp.down, width, hidden)})


def can_be_identity(block: Block) -> bool:
    """Whether a block is the identity once its last projections are 0: x + 0 is x, and norm(x + 0) is not."""
    return block.order == "pre" and bool(mixer_rule(block.mixer).silence(block.mixer))


@torch.no_grad()
def begin_blocks(new: Iterable[nn.Module], old: Iterable[nn.Module]) -> None:
    """Make `new` blocks the identity where they can be (others have a gate), with what only a trained one knows.

    The parameters set to 0 get gradients all the same, and all others do once these have moved.
    """
    known = [block for block in old if isinstance(block, Block)]
    for block in new:
        assert isinstance(block, Block)
        rule = mixer_rule(block.mixer)
        like = next((other.mixer for other in known if type(other.mixer) is type(block.mixer)), None)
        if like is not None and rule.begin is not None:
            rule.begin(block.mixer, like)
        if can_be_identity(block):
            for parameter in (*rule.silence(block.mixer), *([] if block.mlp is None else block.mlp.down.parameters())):
                parameter.zero_()
