"""Softmax attention: RoPE, grouped heads, full or sliding window; optional forget gate.

    y_i = Wo sum_j softmax_j( q_i . k_j / sqrt(K) + C_i - C_j ) v_j    over j <= i (and i - j < window)
    C_t = sum_{s <= t} log sigmoid(w_f . x_s + b_f)                    (forget gate; zero without it)

With `keys: previous` a key is the query of the token before it, k_j = q_{j-1}: a token attends to what came right after
tokens like it. Like tokens have like queries before anything is learned, but for what `rope` turns them by.

With dt `rope` rotates by time, C_t sums dt log sigmoid, and a `window` still counts tokens. Without `rope` and
`forget_gate` nothing depends on time, and values turned by `rope_on_value` depend on the position itself: dt is
refused.

State: the keys and values of the tokens seen (of the last `window` ones), and with a forget gate one
number per key and head. Bytes per layer and row at context L, with G key/value heads: 2 G K L element_size, plus 8 H L;
and H K element_size for the latest query with `keys: previous`.

Vaswani et al. 2017, arXiv 1706.03762; forget gate: Lin et al. 2025, arXiv 2503.02130, eq. 5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from glissando.config import options, recorded
from glissando.errors import ConfigError, NotCompiled
from glissando.kernels.loop import exporting
from glissando.kernels.precise import widest_float
from glissando.kernels.rope import rotate, rotation_after
from glissando.mixers.attention.attend import attention
from glissando.mixers.base import Context, Mixer, head_size_of, initialized, placement, register_mixer, require_parts
from glissando.mixers.memory import log_kept, start_forget_gate
from glissando.mixers.rope import ROPE_BASE, check_rope
from glissando.mixers.slots import append as append_slots
from glissando.mixers.slots import at_last, cut, latest_of, shifted
from glissando.state import zeros_position
from glissando.widening import Growth, Lift, Table, append, append_pairs, join, linear, tables, tile

#: initial horizons of the forget gates in tokens, from the first head to the last
_HORIZONS = (8.0, 1024.0)


@options
class AttentionConfig:
    """Options of the `attention` mixer.

    heads            H; hidden_size must be a multiple of it unless head_size is given
    kv_heads         G key/value heads, shared by groups of query heads; None: H
    head_size        K; None: hidden_size / heads
    keys             `own`: keys have their own projection; `previous`: a key is the query of the token before it
    scale            factor of q . k; None: 1 / sqrt(K); growth sets it
    window           number of latest tokens that are visible; None: all
    bias             biases on the four projections
    rope             rotate queries and keys by position
    rope_width       denominator of the frequencies' exponent; None: the head size
    rope_on_value    also rotate values, without rotating back, as the publication of the Minimal Transformer describes
    forget_gate      data-dependent decay of the logits, C
    dropout          on the attention weights
    """

    heads: PositiveInt = 4
    kv_heads: PositiveInt | None = None
    head_size: PositiveInt | None = None
    keys: Literal["own", "previous"] = "own"
    scale: Annotated[float, Field(gt=0)] | None = recorded(default=None)
    window: PositiveInt | None = None
    bias: bool = False
    rope: bool = True
    rope_width: PositiveInt | None = None
    rope_on_value: bool = False
    forget_gate: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        check_rope("attention", self)
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        if self.keys == "previous" and (self.kv_heads or self.heads) != self.heads:
            raise ConfigError(
                f"attention.keys `previous` makes a key of each of the {self.heads} heads' queries, and kv_heads is "
                f"{self.kv_heads}; leave kv_heads out, or use keys: own"
            )


class AttentionState(NamedTuple):
    """Slots [0, length) of k and v are real; those behind them are spare and never read."""

    k: Tensor  # (B, G, slots, K), already rotated
    v: Tensor  # (B, G, slots, K)
    decay: Tensor | None  # (B, H, slots) in the widest type: C at each key
    total: Tensor | None  # (B, H) the same: C at the latest token
    latest: Tensor | None  # (B, H, K): rotated query of the latest token, the next one's key; 0 before any
    length: Tensor  # (B,) int64
    position: Tensor  # (B,) tokens seen, int64; with dt the time that they took

    @property
    def filled(self) -> Tensor:
        return self.length

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def with_capacity(self, capacity: int) -> AttentionState:
        decay = None if self.decay is None else cut(self.decay, capacity)
        return self._replace(k=cut(self.k, capacity), v=cut(self.v, capacity), decay=decay)


@register_mixer("attention", AttentionConfig)
class Attention(Mixer):
    """See the module's docstring for the equation."""

    input = "impulse"

    def __init__(self, hidden_size: int, config: AttentionConfig | None = None, **options: Any) -> None:
        """`config`, or its fields as keywords. Raises ConfigError for sizes that do not fit."""
        super().__init__()
        self.config = c = config or AttentionConfig(**options)
        timed = (c.rope or c.forget_gate) and not c.rope_on_value
        self.accepts = frozenset({"mask", "dt"} if timed else {"mask"})
        self.heads, self.kv_heads = c.heads, c.kv_heads or c.heads
        self.head_size = head_size_of(hidden_size, c.heads, c.head_size, "attention.head_size")
        if c.rope and self.head_size % 2:
            raise ConfigError(f"RoPE needs an even head size, got {self.head_size}")
        self.shifts = c.keys == "previous"
        self._split = [self.heads, 0 if self.shifts else self.kv_heads, self.kv_heads]
        inner = self.heads * self.head_size
        self.qkv = nn.Linear(hidden_size, sum(self._split) * self.head_size, bias=c.bias)
        self.out = nn.Linear(inner, hidden_size, bias=c.bias)
        self.forget = nn.Linear(hidden_size, self.heads) if c.forget_gate else None
        initialized(self)

    def reset_parameters(self) -> None:
        if self.forget is not None:
            start_forget_gate(self.forget, _HORIZONS)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> AttentionState:
        place = placement(self, device, dtype)
        empty = torch.zeros(batch_size, self.kv_heads, 0, self.head_size, **place)
        position = zeros_position(batch_size, place["device"])
        decay = total = None
        if self.forget is not None:
            total = empty.new_zeros(batch_size, self.heads, dtype=widest_float(empty.device))
            decay = total.new_zeros(batch_size, self.heads, 0)
        latest = empty.new_zeros(batch_size, self.heads, self.head_size) if self.shifts else None
        return AttentionState(empty, empty, decay, total, latest, position, position)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, AttentionState | None]:
        ctx, c = self.context(ctx), self.config
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size))
        if c.rope:
            size, dtype, position = self.head_size, self.qkv.weight.dtype, None if state is None else state.position
            width = c.rope_width or size
            table = rotation_after(position, x.shape[1], size, ROPE_BASE, width, dtype, x.device, ctx.dt)
            table = table.unsqueeze(-2)
        if not c.rope:
            parts = heads.split(self._split, 2)
        elif c.rope_on_value:
            parts = rotate(heads, table).split(self._split, 2)
        else:
            q_and_k, values = heads.split([sum(self._split[:2]), self.kv_heads], 2)
            parts = (*rotate(q_and_k, table).split(self._split[:2], 2), values)
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H, T, K), and twice (B, G, T, K)
        if self.shifts:
            k = shifted(q, None if state is None else state.latest)
        # C over the tokens of x alone: (B, H, T) in the widest type, so that differences stay exact at any length.
        decay = past = None if self.forget is None else log_kept(self.forget, x, ctx.dt)
        visible: Tensor | str = "causal"
        if state is not None:
            # Without a mask a plain number will do: a token's cost in decoding is mostly in calls like these.
            counts = x.shape[1] if ctx.mask is None else ctx.counts(x)
            k, v, past, decay, visible, state = self._cached(q, k, v, decay, state, counts, ctx)
        # Any constant per row may be added. With C at the middle query the keys that matter, those near the queries,
        # have small exponents however long the past is.
        bias = None if decay is None or past is None else _middle(decay.detach()) - past
        window = c.window if isinstance(visible, str) and visible == "causal" and self._windowed(k.shape[2]) else None
        dropout = c.dropout if self.training else 0.0
        y = attention(q, k, v, visible=visible, window=window, key_bias=bias, scale=c.scale, dropout=dropout)  # type: ignore[arg-type]
        return self.out(y.transpose(1, 2).flatten(2)), state

    growth_axes = frozenset({"heads", "head_size"})

    def flops(self, length: int) -> tuple[float, float]:
        """q k' and p v, with as many keys as the window has."""
        return 4.0 * self.heads * self.head_size * min(length, self.config.window or length), 0.0

    @staticmethod
    def grow(options: AttentionConfig, hidden_size: int, by: Growth) -> AttentionConfig:
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
        return tables(
            {
                "qkv": linear(self.qkv, qkv, width),
                "out": linear(self.out, width, heads * size),
                "forget": linear(self.forget, heads, width),
            }
        )

    def lower(self, builder: Any, x: int) -> tuple[int, Any]:
        c, heads, groups, size = self.config, self.heads, self.kv_heads, self.head_size
        if c.window is not None:
            raise NotCompiled("attention.window")
        parts = builder.linear(self.qkv.weight, self.qkv.bias, x)
        if c.rope:
            turned = sum(self._split) if c.rope_on_value else sum(self._split[:2])
            builder.rotate(parts, builder.rope(size, ROPE_BASE, c.rope_width or size), turned, size)
        k = parts + heads * size
        v = k + self._split[1] * size
        biases, decay, total = builder.key_biases(self.forget, None, x, heads)
        keys, values = builder.keep_vectors(groups, size, transposed=True), builder.keep_vectors(groups, size)
        before = builder.keep_fixed(heads, size) if self.shifts else None
        y, scale = builder.register(heads * size), builder.number(c.scale or size**-0.5)
        sizes = (heads, groups, size, self.forget is not None, self.shifts, builder.is_half)
        places = (keys.at, values.at, *builder.places(decay, total, before))
        builder.emit("ATTENTION", parts, k, v, y, biases, *places, scale, *sizes)
        y = builder.linear(self.out.weight, self.out.bias, y)
        return y, AttentionState(keys, values, decay, total, before, builder.filled, builder.filled)

    def export_form(self, capacity: int) -> nn.Module:
        from glissando.mixers.attention.export import FixedAttention

        return FixedAttention(self, capacity)

    def _windowed(self, keys: int) -> bool:
        """Whether the window hides any of so many keys from the last query."""
        return self.config.window is not None and self.config.window < keys

    def _cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: AttentionState,
        counts: Tensor | int,
        ctx: Context,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | str, AttentionState]:
        """Visible keys, values and their C, C at the queries, which of the keys each query sees, and the state."""
        has_decay = self.forget is not None
        require_parts(state, decay=has_decay, total=has_decay, latest=self.shifts)
        lengths = state.length.tolist()
        new, end = k.shape[2], max(lengths, default=0) + k.shape[2]
        uniform = len(set(lengths)) <= 1

        def append(slots: Tensor, latest: Tensor) -> Tensor:
            return append_slots(slots, latest, state.length, end, uniform, ctx.donate)

        keys, values = append(state.k, k), append(state.v, v)
        decays, total = None, None
        if decay is not None and state.total is not None and state.decay is not None:
            decay = decay + state.total.unsqueeze(2)
            total, decays = at_last(decay, counts, state.total), append(state.decay, decay)
        # Slots that have left every row's window may still be there, see _keep_window.
        first = 0 if self.config.window is None else max(0, min(lengths, default=0) + 1 - self.config.window)
        visible = self._visible_with_past(state.length, new, first, end, uniform)
        latest = latest_of(q, counts, state.latest)
        position = state.position + ctx.elapsed(counts)
        after = AttentionState(keys, values, decays, total, latest, state.length + counts, position)
        seen_keys, seen_values = (slots[:, :, first:end].to(q.dtype) for slots in (keys, values))
        past = None if decays is None else decays[:, :, first:end]
        return seen_keys, seen_values, past, decay, visible, self._keep_window(after, end, ctx.donate)

    def _visible_with_past(self, start: Tensor, new: int, first: int, end: int, uniform: bool) -> Tensor | str:
        """Which of the slots from `first` to `end` each query sees: query i of a row that held `start` tokens stands in
        slot start + i and sees up to there."""
        window = self.config.window
        if uniform and new == 1:
            return "all"
        if uniform and (new == end - first or self._windowed(end - first)):
            return "causal"
        slots = torch.arange(first, end, device=start.device)
        query_at = start.unsqueeze(1) + torch.arange(new, device=start.device)
        age = query_at.unsqueeze(-1) - slots
        visible = age >= 0 if window is None else (age >= 0) & (age < window)
        return visible.unsqueeze(1)

    def _keep_window(self, state: AttentionState, end: int, donate: bool) -> AttentionState:
        """The state with the latest `window` slots; a donated one keeps older ones until its slots are full, and then
        moves to its own beginning, so that a token costs neither a copy of the window nor memory."""
        window, capacity = self.config.window, state.k.shape[2]
        if window is None or end <= window:
            return state
        in_place = donate and capacity <= max(64, 2 * window)
        if in_place and end < capacity:
            return state
        first = (state.length - window).clamp_min(0)
        index = first.unsqueeze(1) + torch.arange(window, device=first.device)

        def keep(slots: Tensor) -> Tensor:
            slot = index.clamp_max(slots.shape[2] - 1)
            view = slot.reshape(slot.shape[0], 1, window, *[1] * (slots.ndim - 3))
            latest = slots.gather(2, view.expand(-1, slots.shape[1], -1, *slots.shape[3:]))
            if not in_place:
                return latest
            slots[:, :, :window] = latest
            return slots

        decay = None if state.decay is None else keep(state.decay)
        length = state.length.clamp_max(window)
        return state._replace(k=keep(state.k), v=keep(state.v), decay=decay, length=length)


def _middle(decay: Tensor) -> Tensor:
    """C (B, H, 1) about the middle query of decay (B, H, T)."""
    if exporting():  # an index of half the length holds for one length alone
        return decay.mean(-1, keepdim=True)
    return decay.narrow(2, decay.shape[2] // 2, 1)
