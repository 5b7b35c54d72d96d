"""A new mixer is one class: an exponential moving average of what came before, one decay a channel.

    h_t = a h_{t-1} + (1 - a) x_t,   y = W h,   a = sigmoid(log-odds), learned

The laws that every mixer obeys (tests/test_laws.py) are tried on it here. To make it part of the library, put the
class in glissando/mixers/ and add its line to `MixerConfigs`; the laws then collect it by themselves.

    python examples/add_a_mixer.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from glissando.flops import Flops
from glissando.mixers.base import Context, Mixer


@dataclass
class AverageConfig:
    """Options of the mixer: the decay that every channel starts with."""

    decay: float = 0.9


class AverageState(NamedTuple):
    h: Tensor  # (B, D): the whole past in D numbers


class Average(Mixer):
    """See the file's docstring for the equation."""

    def __init__(self, config: AverageConfig, hidden_size: int) -> None:
        super().__init__()
        odds = torch.tensor(config.decay).logit()
        self.log_odds = nn.Parameter(odds.repeat(hidden_size))
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def init_state(self, batch_size, device=None, dtype=None) -> AverageState:  # type: ignore[no-untyped-def]
        return AverageState(self.log_odds.new_zeros(batch_size, len(self.log_odds), device=device, dtype=dtype))

    def flops(self, length: int) -> Flops:
        return Flops(other=3.0 * len(self.log_odds))

    def mix(self, x: Tensor, state: AverageState | None, ctx: Context) -> tuple[Tensor, AverageState | None]:
        decay = self.log_odds.sigmoid()
        h = torch.zeros_like(x[:, 0]) if state is None else state.h
        real = torch.ones_like(x[..., :1], dtype=torch.bool) if ctx.mask is None else ctx.mask.unsqueeze(-1)
        outputs = []
        for now, token in zip(x.unbind(1), real.unbind(1), strict=True):
            h = torch.where(token, decay * h + (1 - decay) * now, h)
            outputs.append(h)
        return self.out(torch.stack(outputs, 1)), None if state is None else AverageState(h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="nothing here takes long")
    parser.parse_args()
    torch.manual_seed(0)
    mixer = Average(AverageConfig(), 8).double()
    x = torch.randn(2, 10, 8, dtype=torch.float64)
    whole, _ = mixer(x)
    first, state = mixer(x[:, :4], mixer.init_state(2))
    second, _ = mixer(x[:, 4:], state)
    gap = float((torch.cat([first, second], 1) - whole).detach().abs().max())
    print(f"split law: |forward(ab) - forward(a), forward(b, state)| = {gap:.1e}")
    assert gap < 1e-12


if __name__ == "__main__":
    main()
