"""Softmax attention: RoPE, grouped heads, full or sliding window; optional forget gate, importance and output gate.

    y_i = Wo [ silu(Wg x_i) * sum_j softmax_j( q_i . k_j / sqrt(K) + g_j + C_i - C_j ) v_j ]
                                                                       over j <= i (and i - j < window)
    C_t = sum_{s <= t} log sigmoid(w_f . x_s + b_f)                    (forget gate; zero without it)

With `keys: previous` a key is the query of the token before it, k_j = q_{j-1}: a token attends to what came right after
tokens like it. Like tokens have like queries before anything is learned, but for what `rope` turns them by.

State: the keys and values of the tokens seen (of the last `window` ones), and with a forget gate or importance one
number per key and head. Bytes per layer and row at context L, with G key/value heads: 2 G K L element_size, plus 8 H L;
and H K element_size for the latest query with `keys: previous`.

Vaswani et al. 2017, arXiv 1706.03762; forget gate: Lin et al. 2025, arXiv 2503.02130, eq. 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.config import check_choices, starting
from glissando.errors import ConfigError
from glissando.flops import Flops
from glissando.lifts import Lift, Table, append, append_pairs, join, linear, tables, tile
from glissando.mixers.base import Context, Mixer, require_parts
from glissando.mixers.memory import check_horizons, log_kept, start_forget_gate
from glissando.mixers.rope import check_rope
from glissando.mixers.slots import append as append_slots
from glissando.mixers.slots import at_last, cut, latest_of, shifted
from glissando.ops.attention import attention
from glissando.ops.rope import rotate, rotation_after
from glissando.state import zeros_position

if TYPE_CHECKING:
    from glissando.growth import Growth


@dataclass
class AttentionConfig:
    """Options of the `attention` mixer.

    heads            H; hidden_size must be a multiple unless head_size is given
    kv_heads         G key/value heads shared by groups of query heads; H if None
    head_size        K; hidden_size / heads if None
    keys             `own`: a projection of their own; `previous`: a key is the query of the token before it
    scale            multiplies q . k; 1 / sqrt(K) if None
    window           how many latest tokens are visible; all if None
    bias             biases on the four projections
    rope             rotate queries and keys by position
    rope_base        slowest rotation is about 1 / rope_base
    rope_width       denominator of the frequencies' exponent; the head size if None
    rope_on_value    rotate values too (not rotated back): the Minimal Transformer's text
    forget_gate      C: data-dependent decay of the logits
    horizons         forget gates start with these horizons in tokens, from the first head to the last
    importance       g: a linear map of x, a number for each key and head
    output_gate      silu of a linear map of x multiplies what was heard
    dropout          on the attention weights
    """

    heads: int = 4
    kv_heads: int | None = None
    head_size: int | None = None
    keys: Literal["own", "previous"] = "own"
    scale: float | None = None
    window: int | None = None
    bias: bool = False
    rope: bool = True
    rope_base: float = 10000.0
    rope_width: int | None = None
    rope_on_value: bool = False
    forget_gate: bool = False
    horizons: tuple[float, float] = starting((8.0, 1024.0), of="mixer.forget", forget_gate=True)
    importance: bool = False
    output_gate: bool = False
    dropout: float = 0.0


class AttentionState(NamedTuple):
    """Slots [0, length) of k and v are real; what lies behind them is room to grow and never read."""

    k: Tensor  # (B, G, slots, K), already rotated
    v: Tensor  # (B, G, slots, K)
    decay: Tensor | None  # (B, H, slots) float64: C - g at each key
    total: Tensor | None  # (B, H) float64: C at the latest token
    latest: Tensor | None  # (B, H, K): rotated query of the latest token, the next one's key; 0 before any
    length: Tensor  # (B,) int64
    position: Tensor  # (B,) int64, tokens seen

    @property
    def filled(self) -> Tensor:
        return self.length

    @property
    def room(self) -> int:
        return self.k.shape[2]

    def with_room(self, room: int) -> AttentionState:
        decay = None if self.decay is None else cut(self.decay, room)
        return self._replace(k=cut(self.k, room), v=cut(self.v, room), decay=decay)


class Attention(Mixer):
    """See the module's docstring for the equation."""

    axes = frozenset({"heads", "head_size"})

    def __init__(self, config: AttentionConfig, hidden_size: int) -> None:
        super().__init__()
        check_choices(config, "attention")
        for name in ("heads", "kv_heads", "head_size"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise ConfigError(f"attention.{name} must be at least 1, got {value}")
        if config.scale is not None and not (math.isfinite(config.scale) and config.scale > 0):
            raise ConfigError(f"attention.scale must be above 0 and finite, got {config.scale}")
        check_rope("attention", config)
        check_horizons("attention", config.horizons)
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
        self.shifts = config.keys == "previous"
        if self.shifts and self.kv_heads != self.heads:
            raise ConfigError(
                f"attention.keys `previous` makes a key of each of the {self.heads} heads' queries, and kv_heads is "
                f"{self.kv_heads}; leave kv_heads out, or use keys: own"
            )
        self._split = [self.heads, 0 if self.shifts else self.kv_heads, self.kv_heads]
        self.qkv = nn.Linear(hidden_size, sum(self._split) * self.head_size, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_size, hidden_size, bias=config.bias)
        self.forget = nn.Linear(hidden_size, self.heads) if config.forget_gate else None
        self.importance = nn.Linear(hidden_size, self.heads, bias=False) if config.importance else None
        inner = self.heads * self.head_size
        self.gate = nn.Linear(hidden_size, inner, bias=False) if config.output_gate else None

    def reset_parameters(self) -> None:
        if self.forget is not None:
            start_forget_gate(self.forget, self.config.horizons)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> AttentionState:
        place = self._placement(device, dtype)
        empty = torch.zeros(batch_size, self.kv_heads, 0, self.head_size, **place)
        position = zeros_position(batch_size, place["device"])
        decay = total = None
        if self.forget is not None or self.importance is not None:
            decay = torch.zeros(batch_size, self.heads, 0, device=place["device"], dtype=torch.float64)
            total = None if self.forget is None else decay.new_zeros(batch_size, self.heads)
        latest = empty.new_zeros(batch_size, self.heads, self.head_size) if self.shifts else None
        return AttentionState(empty, empty, decay, total, latest, position, position)

    @classmethod
    def grown_config(cls, options: AttentionConfig, hidden_size: int, by: Growth) -> AttentionConfig:
        """Heads times a factor, of the same size; or of a larger one, whose scale and frequencies stay."""
        heads, size = by.factor("heads"), options.head_size or hidden_size // options.heads
        new = by.head_size or size
        if new != size and options.keys == "previous":
            raise ConfigError(
                f"attention with keys: previous cannot grow its head_size {size} to {new}: a new feature of queries "
                "that are keys too would start at zero on both sides and never learn; grow `heads`"
            )
        if new < size or (options.rope and new % 2):
            raise ConfigError(
                f"head_size must be at least the {size} that the heads have, and even with RoPE; got {new}"
            )
        return replace(
            options,
            heads=options.heads * heads,
            kv_heads=None if options.kv_heads is None else options.kv_heads * heads,
            head_size=new,
            rope_width=(options.rope_width or size) if options.rope else options.rope_width,
            scale=options.scale if new == size else options.scale or 1 / math.sqrt(size),
        )

    def growth(self, grown: Attention, width: Lift) -> Table:
        heads, groups = tile(self.heads, grown.heads), tile(self.kv_heads, grown.kv_heads)
        size = (append_pairs if self.config.rope else append)(self.head_size, grown.head_size)
        qkv = join(heads * size, *[] if self.shifts else [groups * size.silent()], groups * size)
        named = {
            "qkv": linear(self.qkv, qkv, width),
            "out": linear(self.out, width, heads * size),
            "gate": linear(self.gate, heads * size, width),
            "forget": linear(self.forget, heads, width),
            "importance": linear(self.importance, heads, width),
        }
        return tables(named)

    def flops(self, length: int) -> Flops:
        """q k' and p v, with as many keys as the window has."""
        return Flops(4.0 * self.heads * self.head_size * min(length, self.config.window or length))

    def mix(self, x: Tensor, state: AttentionState | None, ctx: Context) -> tuple[Tensor, AttentionState | None]:
        q, k, v = self._project(x, state)
        decay, importance = self._cumulative_decay(x), self._importance(x)
        if state is not None:
            lowers = self.forget is not None or self.importance is not None
            require_parts(state, decay=lowers, total=self.forget is not None, latest=self.shifts)
        if state is None:
            y = self._attend(q, k, v, "causal", _lowered(decay, importance), decay)
        else:
            # Without a mask a plain number will do: a token's cost in decoding is mostly in calls like these.
            counts = x.shape[1] if ctx.mask is None else ctx.counts(x)
            y, state = self._attend_with_past(q, k, v, decay, importance, state, counts, ctx.donate)
        y = y.transpose(1, 2).flatten(2)
        return self.out(y if self.gate is None else y * F.silu(self.gate(x))), state

    def _project(self, x: Tensor, state: AttentionState | None) -> tuple[Tensor, ...]:
        """Rotated q (B, H, T, K), k and v (B, G, T, K)."""
        q, k, v = self._rotated(x, None if state is None else state.position)
        return q, shifted(q, None if state is None else state.latest) if self.shifts else k, v

    def _rotated(self, x: Tensor, position: Tensor | None) -> tuple[Tensor, ...]:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size))
        if not self.config.rope:
            parts = heads.split(self._split, 2)
        elif self.config.rope_on_value:
            parts = rotate(heads, self._rotation(x, position)).split(self._split, 2)
        else:
            q_and_k, v = heads.split([sum(self._split[:2]), self.kv_heads], 2)
            parts = (*rotate(q_and_k, self._rotation(x, position)).split(self._split[:2], 2), v)
        return tuple(part.transpose(1, 2) for part in parts)

    def _rotation(self, x: Tensor, position: Tensor | None) -> Tensor:
        """cos and sin (2, 1 or B, T, 1, K/2)."""
        base, width = self.config.rope_base, self.config.rope_width or self.head_size
        dtype = self.qkv.weight.dtype
        return rotation_after(position, x.shape[1], self.head_size, base, width, dtype, x.device).unsqueeze(-2)

    def _cumulative_decay(self, x: Tensor) -> Tensor | None:
        """C over the tokens of x alone: (B, H, T) float64, so that differences stay exact at any length."""
        if self.forget is None:
            return None
        return log_kept(self.forget, x)

    def _importance(self, x: Tensor) -> Tensor | None:
        """g (B, H, T) float64."""
        return None if self.importance is None else self.importance(x).double().transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | str,
        decay: Tensor | None,
        own_decay: Tensor | None,
    ) -> Tensor:
        """decay (B, H, L) is C - g at the keys, own_decay (B, H, T) C at the queries."""
        bias = None
        if decay is not None:
            # Any constant per row may be added. With C at the middle query the keys that matter, those near the
            # queries, have small exponents however long the past is.
            middle = 0 if own_decay is None else own_decay[..., own_decay.shape[-1] // 2].detach().unsqueeze(-1)
            bias = middle - decay
        dropout = self.config.dropout if self.training else 0.0
        scale = self.config.scale
        window = self.config.window if visible == "causal" and self._windowed(k.shape[2]) else None
        return attention(q, k, v, visible=visible, window=window, key_bias=bias, scale=scale, dropout=dropout)  # type: ignore[arg-type]

    def _windowed(self, keys: int) -> bool:
        """Whether the window hides any of so many keys from the last query."""
        return self.config.window is not None and self.config.window < keys

    def _attend_with_past(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        importance: Tensor | None,
        state: AttentionState,
        counts: Tensor | int,
        donate: bool,
    ) -> tuple[Tensor, AttentionState]:
        lengths = state.length.tolist()
        new, end = k.shape[2], max(lengths, default=0) + k.shape[2]
        uniform = len(set(lengths)) <= 1

        def append(slots: Tensor, latest: Tensor) -> Tensor:
            return append_slots(slots, latest, state.length, end, uniform, donate)

        keys, values = append(state.k, k), append(state.v, v)
        decays, total = None, None
        if decay is not None and state.total is not None:
            decay = decay + state.total.unsqueeze(-1)
            total = at_last(decay, counts, state.total)
        lowered = _lowered(decay, importance)
        if lowered is not None and state.decay is not None:
            decays = append(state.decay.unsqueeze(-1), lowered.unsqueeze(-1)).squeeze(-1)
        # Slots that have left every row's window may still be there, see _keep_window.
        first = 0 if self.config.window is None else max(0, min(lengths, default=0) + 1 - self.config.window)
        visible = self._visible_with_past(state.length, new, first, end, uniform)
        near = None if decays is None else decays[..., first:end]
        heard, said = (slots[:, :, first:end].to(q.dtype) for slots in (keys, values))
        y = self._attend(q, heard, said, visible, near, decay)
        latest = latest_of(q, counts, state.latest)
        after = AttentionState(keys, values, decays, total, latest, state.length + counts, state.position + counts)
        return y, self._keep_window(after, end, donate)

    def _visible_with_past(self, start: Tensor, new: int, first: int, end: int, uniform: bool) -> Tensor | str:
        """Which of the slots from `first` to `end` each query sees: query i of a row that held `start` tokens stands in
        slot start + i and sees up to there."""
        window = self.config.window
        if uniform and new == 1:
            return "all"
        if uniform and (new == end - first or self._windowed(end - first)):
            return "causal"
        slots = torch.arange(first, end, device=start.device)
        own = start.unsqueeze(1) + torch.arange(new, device=start.device)
        age = own.unsqueeze(-1) - slots
        visible = age >= 0 if window is None else (age >= 0) & (age < window)
        return visible.unsqueeze(1)

    def _keep_window(self, state: AttentionState, end: int, donate: bool) -> AttentionState:
        """The state with the latest `window` slots; a donated one keeps older ones until its room is full, and is then
        moved to its own beginning, so that a token costs neither a copy of the window nor memory."""
        window, room = self.config.window, state.k.shape[2]
        if window is None or end <= window:
            return state
        in_place = donate and room <= max(64, 2 * window)
        if in_place and end < room:
            return state
        first = (state.length - window).clamp_min(0)
        index = first.unsqueeze(1) + torch.arange(window, device=first.device)

        def keep(slots: Tensor) -> Tensor:
            wanted = index.clamp_max(slots.shape[2] - 1)
            view = wanted.reshape(wanted.shape[0], 1, window, *[1] * (slots.ndim - 3))
            latest = slots.gather(2, view.expand(-1, slots.shape[1], -1, *slots.shape[3:]))
            if not in_place:
                return latest
            slots[:, :, :window] = latest
            return slots

        decay = None if state.decay is None else keep(state.decay)
        length = state.length.clamp_max(window)
        return state._replace(k=keep(state.k), v=keep(state.v), decay=decay, length=length)


def _lowered(decay: Tensor | None, importance: Tensor | None) -> Tensor | None:
    """C - g: what a key's logit is lowered by."""
    if decay is None or importance is None:
        return -importance if decay is None and importance is not None else decay
    return decay - importance
