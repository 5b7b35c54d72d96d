"""A gate by the mean of what a block has contributed so far: what is added to the residual is multiplied by

    g_t = sigmoid(w gelu(W m_t + b) + c),     m_t = sum_{s <= t} dt_s y_s / sum_{s <= t} dt_s

The Liquid State-Space Model's gate, one for all layers, took the mean over the whole sequence, future included.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.kernels.precise import widest_float
from glissando.kernels.scan import scan
from glissando.mixers import Context
from glissando.precision import upcast, without_autocast


class MeanState(NamedTuple):
    mean: Tensor  # (B, D), at least float32
    time: Tensor  # (B,) in the widest type, what has passed


class MeanGate(nn.Module):
    """See the module's docstring for the equation."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden_size, max(hidden_size // 4, 1)), nn.Linear(max(hidden_size // 4, 1), 1)

    def init_state(self, batch_size: int, device: torch.device | None, dtype: torch.dtype | None) -> MeanState:
        like = self.up.weight
        device, dtype = device or like.device, torch.promote_types(dtype or like.dtype, torch.float32)
        mean = torch.zeros(batch_size, like.shape[1], device=device, dtype=dtype)
        return MeanState(mean, torch.zeros(batch_size, dtype=widest_float(device), device=device))

    def lower(self, builder: Any, y: int) -> tuple[int, Any]:
        """The compiled step for the registers y: those of the gate, and the state."""
        size, hidden = self.up.in_features, self.up.out_features
        mean, passed, read = builder.keep_fixed(size), builder.keep_exact(), builder.register(size)
        builder.emit("MEAN", y, read, size, mean.at, passed.at)
        h = builder.activate("gelu", builder.linear(self.up.weight, self.up.bias, read), hidden)
        gate = builder.activate("sigmoid", builder.linear(self.down.weight, self.down.bias, h), 1)
        return gate, MeanState(mean, passed)

    def forward(self, y: Tensor, state: MeanState | None, ctx: Context) -> tuple[Tensor, MeanState | None]:
        """y (B, T, D) -> the gate (B, T, 1)."""
        before = self.init_state(len(y), y.device, y.dtype) if state is None else state
        most = widest_float(y.device)
        weight = torch.ones(y.shape[:2], dtype=most, device=y.device) if ctx.dt is None else ctx.dt.to(most)
        if ctx.mask is not None:
            weight = weight * ctx.mask
        passed = before.time.unsqueeze(1) + weight.cumsum(1)
        share = weight / torch.where(passed > 0, passed, 1.0)  # before any time there is nothing to take a mean of
        share = share.to(before.mean.dtype).unsqueeze(-1)
        # A number that does not count may be NaN, which no share of 0 takes away.
        added = share * torch.where(share > 0, upcast(y), 0.0)
        with without_autocast(y.device.type):
            mean, last = scan((1 - share).expand_as(y), added, before.mean)
        gate = torch.sigmoid(self.down(F.gelu(self.up(mean.to(y.dtype)))))
        if state is None:
            return gate, None
        after = MeanState(last, passed[:, -1].clone())  # a view would keep all
        return gate, after
