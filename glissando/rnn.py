"""Mixers as recurrent layers with the call of torch.nn.LSTM: y, h = layer(x, h)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from glissando.errors import InputError
from glissando.mixers import MIXERS, Context, build_mixer
from glissando.state import State


class RNN(nn.Module):
    """One layer: u = W x + b, then a mixer over u; the hidden state is the mixer's.

    input_size, hidden_size  numbers a step has before and after
    mixer                    a name or {"kind": NAME, ...}, see glissando.mixers
    """

    def __init__(self, input_size: int, hidden_size: int, mixer: Any = "liquid") -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.input = nn.Linear(input_size, hidden_size)
        self.mixer = build_mixer(MIXERS.read(mixer), hidden_size)

    def init_state(self, batch_size: int) -> State:
        """The state before any step."""
        return self.mixer.init_state(batch_size)

    def forward(
        self, x: Tensor, h: State = None, dt: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """x (B, T, input_size) -> y (B, T, hidden_size) and the state after it, also where h is None, as in nn.LSTM.

        dt (B, T) is the time of each step, 1 by default;  mask (B, T) bool, True at real steps, padding last.

        Raises InputError for another shape of x, ContextError where the mixer does not accept dt.
        """
        if x.ndim != 3 or x.shape[-1] != self.input_size:
            raise InputError(f"x must be (batch, time, {self.input_size}), got {tuple(x.shape)}")
        state = self.init_state(len(x)) if h is None else h
        return self.mixer(self.input(x), state, Context(mask=mask, dt=dt))


class LiquidRNN(RNN):
    """The liquid mixer as a drop-in for nn.LSTM and for the cells of ncps: y, h = LiquidRNN(4, 32)(x, h, dt).

    options  those of the liquid mixer, see glissando.mixers.LiquidConfig
    """

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, {"kind": "liquid", **options})
