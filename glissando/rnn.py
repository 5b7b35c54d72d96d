"""Mixers as recurrent layers with the call of torch.nn.LSTM: y, h = layer(x, h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from glissando.errors import InputError
from glissando.mixers import MIXERS, Context, build_mixer
from glissando.state import State


class RNN(nn.Module):
    """One recurrent layer: u = W x + b, then a mixer over u. Its hidden state is the state of the mixer.

    Args:
        input_size: Number of inputs of a step.
        hidden_size: Number of outputs of a step.
        mixer: A name or {"kind": NAME, ...}, see glissando.mixers.
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
        """The outputs of all steps, and the state after the last one.

        Args:
            x: Inputs (B, T, input_size).
            h: State to continue from; None: an empty past. As with nn.LSTM, a state is returned in both cases.
            dt: Duration (B, T) of each step, 1 by default.
            mask: (B, T) bool, True at real steps; padding comes last.

        Returns:
            Outputs (B, T, hidden_size) and the new state.

        Raises:
            InputError: x has another shape.
            ContextError: The mixer does not accept dt.
        """
        if x.ndim != 3 or x.shape[-1] != self.input_size:
            raise InputError(f"x must be (batch, time, {self.input_size}), got {tuple(x.shape)}")
        shape = tuple(x.shape[:2])
        for name, signal in (("dt", dt), ("mask", mask)):
            if signal is not None and not isinstance(signal, Tensor):
                hint = f"torch.full({shape}, {signal!r})" if isinstance(signal, int | float) else "torch.as_tensor"
                raise InputError(f"{name} must be a tensor (batch, time), here {shape}, got {signal!r}; use {hint}")
            if signal is not None and tuple(signal.shape) != shape:
                raise InputError(f"{name} must be (batch, time), here {shape}, got {tuple(signal.shape)}")
        state = self.init_state(len(x)) if h is None else h
        return self.mixer(self.input(x), state, Context(mask=mask, dt=dt))

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward


class LiquidRNN(RNN):
    """The liquid mixer with the call of nn.LSTM and of the cells of ncps: `y, h = LiquidRNN(4, 32)(x, h, dt)`.

    Args:
        input_size: Number of inputs of a step.
        hidden_size: Number of outputs of a step.
        **options: Options of the liquid mixer, see glissando.mixers.LiquidConfig.
    """

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, {"kind": "liquid", **options})
