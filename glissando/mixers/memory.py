"""How mixers initialise their time scales, and forget gates."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from glissando.kernels.precise import wide

#: of the first head and of the last, in tokens of dt = 1
_Time = Annotated[float, Field(gt=0)]
Times = tuple[_Time, _Time]
#: of gates, each of which keeps 1 - 1 / horizon a token
_Horizon = Annotated[float, Field(gt=1)]
Horizons = tuple[_Horizon, _Horizon]


@torch.no_grad()
def start_forget_gate(forget: nn.Linear, horizons: tuple[float, float]) -> None:
    """Gates that keep 1 - 1 / horizon a token, whatever it is, horizons spread evenly in their logarithm."""
    low, high = (math.log2(tokens) for tokens in horizons)
    forget.weight.zero_()
    forget.bias.copy_((torch.logspace(low, high, forget.out_features, base=2.0) - 1).log())


def log_kept(forget: nn.Linear, x: Tensor, dt: Tensor | None = None) -> Tensor:
    """C (B, H, T), the sum of dt log sigmoid(forget(x)) up to each token, for x (B, T, D) and dt (B, T), 1 by default:
    in the widest type, as the sum grows and only differences of it count."""
    kept = F.logsigmoid(wide(forget(x))).transpose(1, 2)
    return (kept if dt is None else kept * dt.to(kept).unsqueeze(1)).cumsum(2)


#: the best of 3, 6, 15 and 40 tokens and of none (docs/continuous-transformer.md)
_PERIOD, _POWER, _SPREAD = 6.0, 0.7, 0.3


def starting_turns(horizons: Tensor) -> Tensor:
    """Radians a token (N,) of channels that decay within `horizons` tokens: those that decay fast turn fast.

    The period is 6 t^0.7 tokens for a horizon of t, times exp(0.3 n) with n normal.
    """
    return 2 * math.pi / (_PERIOD * horizons**_POWER) * torch.exp(_SPREAD * torch.randn(len(horizons)))
