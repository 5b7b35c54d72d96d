"""How a model starts its weights: one of three schemes for linear maps and tables, then what each part starts itself.

scaled  N(0, 0.02); the last projection of a branch that ends in the residual is divided by the root of their number
torch   PyTorch's defaults
xavier  Glorot's uniform for matrices, N(0, 0.02) for tables
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import nn

from glissando.block import Block
from glissando.depth import Depth
from glissando.depth.discrete import Stack

Scheme = Literal["scaled", "torch", "xavier"]


def residual_branches(depth: Depth) -> int:
    """How many branches are added to the representation from the embedding to the head; a flow counts as one block."""
    if isinstance(depth, Stack):
        return sum(_branches(depth.blocks[i]) for i in depth.order)
    return sum(_branches(block) for block in depth.modules() if isinstance(block, Block))


def _branches(block: nn.Module) -> int:
    return 1 if getattr(block, "mlp", None) is None else 2


def initialize(model: nn.Module, depth: Depth, scheme: Scheme) -> None:
    """Start the linear maps and tables of `model` by the scheme, then let each part start its own parameters."""
    if scheme != "torch":
        for module in model.modules():
            if isinstance(module, nn.Embedding) or (scheme == "scaled" and isinstance(module, nn.Linear)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    if scheme == "scaled":
        std = 0.02 / math.sqrt(max(1, residual_branches(depth)))
        for block in (module for module in model.modules() if isinstance(module, Block)):
            # A liquid mixer's `out` is its layer's: its modes start from an empty state and are quiet by themselves;
            # with smaller projections it was measured to learn more slowly.
            for last in (getattr(block.mixer, "out", None), getattr(block.mlp, "down", None)):
                if isinstance(last, nn.Linear):
                    nn.init.normal_(last.weight, std=std)
    for reset in (own_initialization(module) for module in model.modules() if module is not model):
        if reset is not None:
            reset()


def own_initialization(module: nn.Module) -> Callable[[], None] | None:
    """The `reset_parameters` of a module that is not PyTorch's own."""
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) and not type(module).__module__.startswith("torch.") else None
