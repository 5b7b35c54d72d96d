"""Softmax attention: RoPE, grouped heads, full or sliding window, optional forget gate.

    y_i = Wo sum_j softmax_j( q_i . k_j / sqrt(K) + C_i - C_j ) v_j,   j <= i (and i - j < window)
    C_t = sum_{s <= t} log sigmoid(w_f . x_s + b_f)                    (forget gate; zero without it)

State: the keys and values of the tokens seen (of the last `window` ones), and with a forget gate one number per
key and head. Bytes per layer and row at context L, with G key/value heads: 2 G K L element_size, plus 8 H L.

Vaswani et al. 2017, arXiv 1706.03762; forget gate: Lin et al. 2025, arXiv 2503.02130, eq. 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.errors import ConfigError
from glissando.mixers.base import Context, Mixer
from glissando.ops.attention import attention
from glissando.ops.rope import rotate, rotation, rotation_from_zero
from glissando.state import zeros_position


@dataclass
class AttentionConfig:
    """Options of the `attention` mixer.

    heads            H; hidden_size must be a multiple unless head_size is given
    kv_heads         G key/value heads shared by groups of query heads; H if None
    head_size        K; hidden_size / heads if None
    window           how many latest tokens are visible; all if None
    bias             biases on the four projections
    rope             rotate queries and keys by position
    rope_base        slowest rotation is about 1 / rope_base
    rope_width       denominator of the frequencies' exponent; the head size if None
    rope_on_value    rotate values too (not rotated back): the Minimal Transformer's text
    forget_gate      data-dependent decay of the logits
    dropout          on the attention weights
    """

    heads: int = 4
    kv_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    bias: bool = False
    rope: bool = True
    rope_base: float = 10000.0
    rope_width: int | None = None
    rope_on_value: bool = False
    forget_gate: bool = False
    dropout: float = 0.0


#: positions whose rotations are kept once they are needed: 16 MiB at head size 64
_TABLE = 1 << 16


class AttentionState(NamedTuple):
    """Slots [0, length) of k and v are real; what lies behind them is room to grow and never read."""

    k: Tensor  # (B, G, slots, K), already rotated
    v: Tensor  # (B, G, slots, K)
    decay: Tensor | None  # (B, H, slots) float64: C at each key
    total: Tensor | None  # (B, H) float64: C at the latest token
    length: Tensor  # (B,) int64
    position: Tensor  # (B,) int64, tokens seen


class Attention(Mixer):
    """See the module's docstring for the equation."""

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        for name in ("heads", "kv_heads", "head_size"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ConfigError(f"attention.{name} must be at least 1, got {value}")
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"attention.dropout must be at least 0 and below 1, got {config.dropout}")
        self.config = config
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        if config.head_size is None and hidden_size % self.heads:
            raise ConfigError(
                f"hidden_size {hidden_size} is not a multiple of {self.heads} heads; "
                "change one of them or give attention.head_size"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        self.head_size = config.head_size or hidden_size // self.heads
        if config.rope and self.head_size % 2:
            raise ConfigError(f"RoPE needs an even head size, got {self.head_size}")
        if config.window is not None and config.window < 1:
            raise ConfigError(f"attention.window must be at least 1, got {config.window}")
        self._split = [self.heads, self.kv_heads, self.kv_heads]
        self.qkv = nn.Linear(hidden_size, sum(self._split) * self.head_size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_size, hidden_size, bias=config.bias)
        self.forget = nn.Linear(hidden_size, self.heads) if config.forget_gate else None

    def reset_parameters(self) -> None:
        """Forget gates start with horizons from 8 to 1024 tokens, spread over the heads in powers of two."""
        if self.forget is not None:
            horizon = torch.logspace(3, 10, self.heads, base=2.0)
            with torch.no_grad():
                self.forget.weight.zero_()
                self.forget.bias.copy_((horizon - 1).log())

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> AttentionState:
        place = self._placement(device, dtype)
        empty = torch.zeros(batch_size, self.kv_heads, 0, self.head_size, **place)
        position = zeros_position(batch_size, place["device"])
        decay = total = None
        if self.forget is not None:
            decay = torch.zeros(batch_size, self.heads, 0, device=place["device"], dtype=torch.float64)
            total = decay.new_zeros(batch_size, self.heads)
        return AttentionState(empty, empty, decay, total, position, position)

    def mix(self, x: Tensor, state: AttentionState | None, ctx: Context) -> tuple[Tensor, AttentionState | None]:
        q, k, v = self._project(x, None if state is None else state.position)
        decay = self._cumulative_decay(x)
        if state is None:
            y = self._attend(q, k, v, self._visible_from_zero(x), decay, decay)
        else:
            # Without a mask a plain number will do: a token's cost in decoding is mostly in calls like these.
            counts = x.shape[1] if ctx.mask is None else ctx.counts(x)
            y, state = self._attend_with_past(q, k, v, decay, state, counts, ctx.donate)
        return self.out(y.transpose(1, 2).flatten(2)), state

    def _project(self, x: Tensor, position: Tensor | None) -> tuple[Tensor, ...]:
        """Rotated q (B, H, T, K), k and v (B, G, T, K)."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size))
        if not self.config.rope:
            parts = heads.split(self._split, 2)
        elif self.config.rope_on_value:
            parts = rotate(heads, self._rotation(x, position)).split(self._split, 2)
        else:
            q_and_k, v = heads.split([self.heads + self.kv_heads, self.kv_heads], 2)
            parts = (*rotate(q_and_k, self._rotation(x, position)).split(self._split[:2], 2), v)
        return tuple(part.transpose(1, 2) for part in parts)

    def _rotation(self, x: Tensor, position: Tensor | None) -> Tensor:
        """cos and sin (2, 1 or B, T, 1, K/2)."""
        base, width = self.config.rope_base, self.config.rope_width or self.head_size
        dtype, length = self.qkv.weight.dtype, x.shape[1]
        if position is None:
            table = rotation_from_zero(length, self.head_size, base, width, dtype, x.device)
            return table.unsqueeze(1).unsqueeze(-2)
        starts = position.tolist()
        if min(starts) == max(starts) and starts[0] + length <= _TABLE:
            # Decoding: all rows stand at one place, and a slice of a table that every layer shares is free.
            table = rotation_from_zero(_TABLE, self.head_size, base, width, dtype, x.device)
            return table[:, None, starts[0] : starts[0] + length, None]
        positions = position.unsqueeze(1) + torch.arange(length, device=x.device)
        return rotation(positions, self.head_size, base, width, dtype).unsqueeze(-2)

    def _cumulative_decay(self, x: Tensor) -> Tensor | None:
        """C over the tokens of x alone: (B, H, T) float64, so that differences stay exact at any length."""
        if self.forget is None:
            return None
        return F.logsigmoid(self.forget(x).double()).transpose(1, 2).cumsum(-1)

    def _visible_from_zero(self, x: Tensor) -> Tensor | str:
        length, window = x.shape[1], self.config.window
        if window is None or window >= length:
            return "causal"
        slots = torch.arange(length, device=x.device)
        age = slots.unsqueeze(1) - slots
        return (age >= 0) & (age < window)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | str,
        decay: Tensor | None,
        own_decay: Tensor | None,
    ) -> Tensor:
        """decay (B, H, L) is C at the keys, own_decay (B, H, T) at the queries."""
        bias = None
        if decay is not None and own_decay is not None:
            # Any constant per row may be added. With C at the middle query the keys that matter, those near the
            # queries, have small exponents however long the past is.
            bias = own_decay[..., own_decay.shape[-1] // 2].detach().unsqueeze(-1) - decay
        dropout = self.config.dropout if self.training else 0.0
        return attention(q, k, v, visible=visible, key_bias=bias, dropout=dropout)  # type: ignore[arg-type]

    def _attend_with_past(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: AttentionState,
        counts: Tensor | int,
        donate: bool,
    ) -> tuple[Tensor, AttentionState]:
        lengths = state.length.tolist()
        new, end = k.shape[2], max(lengths) + k.shape[2]
        uniform = min(lengths) == max(lengths)

        def append(slots: Tensor, latest: Tensor) -> Tensor:
            return _append(slots, latest, state.length, end, uniform, donate)

        keys, values = append(state.k, k), append(state.v, v)
        decays, total = None, None
        if decay is not None and state.decay is not None and state.total is not None:
            decay = decay + state.total.unsqueeze(-1)
            decays = append(state.decay.unsqueeze(-1), decay.unsqueeze(-1)).squeeze(-1)
            total = _at_last(decay, counts, state.total)
        visible = self._visible_with_past(state.length, new, end, uniform)
        near = None if decays is None else decays[..., :end]
        y = self._attend(q, keys[:, :, :end], values[:, :, :end], visible, near, decay)
        after = AttentionState(keys, values, decays, total, state.length + counts, state.position + counts)
        return y, self._keep_window(after, end)

    def _visible_with_past(self, start: Tensor, new: int, end: int, uniform: bool) -> Tensor | str:
        """Query i of a row that held `start` tokens stands in slot start + i and sees the slots up to there."""
        window = self.config.window
        if uniform and new == 1 and (window is None or end <= window):
            return "all"
        if uniform and new == end and window is None:
            return "causal"
        slots = torch.arange(end, device=start.device)
        own = start.unsqueeze(1) + slots[:new]
        age = own.unsqueeze(-1) - slots
        visible = age >= 0 if window is None else (age >= 0) & (age < window)
        return visible.unsqueeze(1)

    def _keep_window(self, state: AttentionState, end: int) -> AttentionState:
        window = self.config.window
        if window is None or end <= window:
            return state
        first = (state.length - window).clamp_min(0)
        index = first.unsqueeze(1) + torch.arange(window, device=first.device)

        def keep(slots: Tensor) -> Tensor:
            wanted = index.clamp_max(slots.shape[2] - 1)
            view = wanted.reshape(wanted.shape[0], 1, window, *[1] * (slots.ndim - 3))
            return slots.gather(2, view.expand(-1, slots.shape[1], -1, *slots.shape[3:]))

        decay = None if state.decay is None else keep(state.decay)
        length = state.length.clamp_max(window)
        return state._replace(k=keep(state.k), v=keep(state.v), decay=decay, length=length)


def _at_last(decay: Tensor, counts: Tensor | int, before: Tensor) -> Tensor:
    """decay (B, H, T) at each row's last real token; `before` (B, H) in a row that has none."""
    if isinstance(counts, int):
        return decay[..., counts - 1]
    index = (counts - 1).clamp_min(0).view(-1, 1, 1).expand(-1, decay.shape[1], 1)
    return torch.where((counts > 0).unsqueeze(1), decay.gather(2, index).squeeze(2), before)


def _append(slots: Tensor, new: Tensor, start: Tensor, end: int, uniform: bool, donate: bool) -> Tensor:
    """`new` (B, G, T, K) written behind each row's `start` slots; in place, with room to spare, if donated."""
    begin = end - new.shape[2]
    if not donate and uniform:
        return torch.cat([slots[:, :, :begin], new], 2)
    room = slots.shape[2]
    if room < end:
        # Doubling makes the copies of a growing cache cost O(1) a token.
        slots = F.pad(slots, (0, 0, 0, (max(end, 64, 2 * room) if donate else end) - room))
    if uniform:
        slots[:, :, begin:end] = new
        return slots
    index = start.unsqueeze(1) + torch.arange(new.shape[2], device=start.device)
    index = index.view(index.shape[0], 1, -1, 1).expand(-1, new.shape[1], -1, new.shape[3])
    return slots.scatter_(2, index, new) if donate else slots.scatter(2, index, new)
