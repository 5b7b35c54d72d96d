"""What mixers start their memory with, and forget gates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def log_kept(forget: nn.Linear, x: Tensor) -> Tensor:
    """C (B, H, T), the sum of log sigmoid(forget(x)) up to each token, for x (B, T, D): float64, as the sum grows and
    only differences of it count."""
    return F.logsigmoid(forget(x).double()).transpose(1, 2).cumsum(-1)


#: of 3, 6, 15, 40 tokens and no turn the best (docs/continuous-transformer.md)
_PERIOD, _POWER, _SPREAD = 6.0, 0.7, 0.3


def starting_turns(horizons: Tensor) -> Tensor:
    """Radians a token (N,) of channels that decay within `horizons` tokens: those that decay fast turn fast.

    The period is 6 t^0.7 tokens for a horizon of t, times exp(0.3 n) with n normal.
    """
    return 2 * math.pi / (_PERIOD * horizons**_POWER) * torch.exp(_SPREAD * torch.randn(len(horizons)))
