"""The head that answers a question: what will be at a time after the last observation.

    y(t + e) = C [exp((-l + i w) e) * (W h_t)] + MLP([h_t, log(1 + e), exp(-e)])

h_t are the features after step t, e the horizon in units of the time scale; l > 0 and w are learned, a pair of numbers
each: what decays and turns by a law of its own is exact at any horizon, and the rest is the MLP's. The head reads the
features and writes nothing, so that a question changes neither a state nor the answer to another question.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: rates and angular frequencies of new pairs, per time scale
_RATES, _TURNS = (0.02, 1.0), (0.05, 2.0)


class HorizonHead(nn.Module):
    """A question (B, T) about features (B, T, D) -> (B, T, outputs).

    Args:
        width: D.
        outputs: Numbers of an answer.
        pairs: Number of pairs that decay and turn.
        ahead: U, number of known-future columns.
    """

    def __init__(self, width: int, outputs: int, pairs: int, ahead: int = 0) -> None:
        super().__init__()
        self.pairs = nn.Linear(width, 2 * pairs)
        self.rate, self.turn = nn.Parameter(torch.empty(pairs)), nn.Parameter(torch.empty(pairs))
        self.inner = nn.Linear(width + 2 + ahead, width)
        self.out = nn.Linear(2 * pairs + width, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates and turns evenly over their logarithms, and the last map zero: training starts from the anchor."""
        share = torch.linspace(0, 1, len(self.rate), device=self.rate.device)
        with torch.no_grad():
            for part, (low, high) in ((self.rate, _RATES), (self.turn, _TURNS)):
                part.copy_(low * (high / low) ** share)
            self.rate.copy_(self.rate.expm1().log())  # what softplus makes of it is the rate
            self.turn[1::2] *= -1
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, h: Tensor, horizon: Tensor, ahead: Tensor | None = None) -> Tensor:
        """The answers.

        Args:
            h: (B, T, D).
            horizon: (B, T), in units of the time scale.
            ahead: (B, T, U).
        """
        e = horizon.unsqueeze(-1)
        x, y = self.pairs(h).unflatten(-1, (-1, 2)).unbind(-1)
        decay, angle = torch.exp(-F.softplus(self.rate) * e), self.turn * e
        cosine, sine = decay * angle.cos(), decay * angle.sin()
        turned = torch.cat([x * cosine - y * sine, x * sine + y * cosine], -1)
        known = [h, e.log1p(), torch.exp(-e), *([] if ahead is None else [ahead])]
        inner = F.silu(self.inner(torch.cat(known, -1).to(h.dtype)))
        return self.out(torch.cat([turned.to(h.dtype), inner], -1))
