"""Causal depthwise convolution of a few taps: y_t = sum_j w_j x_{t-W+1+j}, one filter a channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, past: Tensor | None = None) -> Tensor:
    """x (B, T, D), weight (D, W), past (B, W - 1, D) the inputs before x (zeros if None) -> (B, T, D).

    Computed as W shifted multiply-adds: on a CPU, torch's grouped conv1d is several times slower for W <= 8.
    """
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0)) if past is None else torch.cat([past, x], 1)
    length = x.shape[1]
    y = padded[:, width - 1 :] * weight[:, width - 1]
    for tap in range(width - 1):
        y = torch.addcmul(y, padded[:, tap : tap + length], weight[:, tap])
    return y


def next_past(x: Tensor, past: Tensor, counts: Tensor | None) -> Tensor:
    """The last W - 1 real inputs of each row: of [past, x], those that end at real token number `counts` (B,).

    `counts` None means that every token of x is real.
    """
    joined = torch.cat([past, x], 1)
    width = past.shape[1]
    if counts is None:
        return joined[:, joined.shape[1] - width :]
    index = counts.unsqueeze(1) + torch.arange(width, device=x.device)
    return joined.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
