"""Forget gates: how they start."""

from __future__ import annotations

import math

import torch
from torch import nn

from glissando.errors import ConfigError


def check_horizons(mixer: str, horizons: tuple[float, float]) -> None:
    """Raise ConfigError unless there are two, both finite and above 1 token."""
    if not isinstance(horizons, tuple | list) or len(horizons) != 2 or not all(1 < h < math.inf for h in horizons):
        raise ConfigError(f"{mixer}.horizons must be two numbers of tokens above 1, got {horizons}")


@torch.no_grad()
def start_forget_gate(forget: nn.Linear, horizons: tuple[float, float]) -> None:
    """Gates that keep 1 - 1 / horizon a token whatever the token, horizons spread evenly in their logarithm."""
    low, high = (math.log2(tokens) for tokens in horizons)
    forget.weight.zero_()
    forget.bias.copy_((torch.logspace(low, high, forget.out_features, base=2.0) - 1).log())
