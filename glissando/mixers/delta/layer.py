"""The delta mixer: each head's state S (K, K) is an associative memory that follows an ODE during a token's time dt:

    dS/dt = -S / tau + beta k (v - S^T k)^T,      o = S^T q,      |q| = |k| = 1

It decays within tau and, at the rate beta, replaces what it has stored under the key k by v. q, k, v, beta and tau are
held over the token. Along k, S^T k relaxes at the rate beta + 1 / tau towards beta v / (beta + 1 / tau); across k, S
decays. So with one tau a head the step is exact, and two half steps are one:

    S <- a (I - e k k^T) S + b k v^T
    a = exp(-dt / tau),   e = 1 - exp(-beta dt),   b = beta (1 - exp(-(beta + 1 / tau) dt)) / (beta + 1 / tau)

    1 / tau = 8 sigmoid(r + c) / horizon,      beta = softplus(z + c'),      r, z, q, k and v linear in x, v by silu
    y = W_out (norm(o) * silu(g))

A rotation of the key's pairs of channels does not commute with the write. It is split from it symmetrically, half a
step before it and half after (Strang 1968, second order in dt):

    transition: rotate     dS/dt has the term Omega S: pair n of the key's channels turns at 2 sigmoid(w x) omega_n,
                           with a w a head. omega_n starts at 1, ..., 1 / horizons[1], the rates of a rotary embedding.
                           With dt, turns are computed in float64 from x on, for up to 1e9 radians a token; a token
                           that turns further must have decayed the state, and is written and read without a turn
    transition: reflect    e = 2 sigmoid(z), b = e: eigenvalues from 1 to -1. No real flow passes there: dt is refused
    writes                 so many keys and values a token, written one after the other (b = e)
    keys: previous         k is the query of the token before, whatever the time between them: a token finds what came
                           right after tokens like it. With dt, `input: impulse` is needed
    input: impulse         the state ages over dt, and is then written with the e and b of dt = 1, so that a token with
                           dt = 0 is stored too: for events. For `held`, as above, it is not

State: S, 4 H K^2 bytes a layer and row in float32 (never less), and H K more with keys: previous; whatever the context.

Delta rule over time by chunks: Yang et al. 2024, arXiv 2406.06484; with decay: arXiv 2412.06464; its exact solution in
continuous time: arXiv 2512.12602; negative eigenvalues: Grazzi et al. 2024, arXiv 2411.12537; several writes: Siems et
al. 2025, arXiv 2502.10297; rotation: arXiv 2603.15569.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from glissando.config import options, starting
from glissando.errors import ConfigError, InputError
from glissando.kernels.loop import delayed, exporting
from glissando.kernels.plain import underlying
from glissando.kernels.precise import angle_sum, double, widest_float
from glissando.kernels.rms_norm import rms_norm
from glissando.mixers.base import (
    Context,
    Mixer,
    head_size_of,
    initialized,
    last_real,
    placement,
    register_mixer,
    require_parts,
)
from glissando.mixers.delta.scan import delta_rule
from glissando.mixers.memory import Times
from glissando.precision import upcast, without_autocast
from glissando.widening import Grows, Growth, Lift, Table, join, linear, tables, tile

#: radians that a token may turn: float64 holds their fraction of a turn to 3e-7
_RESOLVED = 1e9
#: decay times after which nothing of a state is left, and after which its rates' sums lose digits
_FORGOTTEN, _AT_REST = 30.0, 100.0


@options
class DeltaConfig:
    """Options of the `delta` mixer.

    heads        H
    key_size     K; None: hidden_size / heads
    keys         `own`: keys have their own projection; `previous`: a key is the query of the token before it
    transition   of the state along the key: `decay`, `rotate` or `reflect`
    writes       number of keys and values written at each token
    input        with dt: `held` over it, or an `impulse` whose strength does not depend on it
    horizons     initial decay times tau from the first head to the last, in tokens: in the unit of dt
    """

    heads: PositiveInt = 4
    key_size: PositiveInt | None = None
    keys: Literal["own", "previous"] = "own"
    transition: Literal["decay", "rotate", "reflect"] = "decay"
    writes: PositiveInt = 1
    input: Literal["held", "impulse"] = "held"
    horizons: Times = starting(default=(16.0, 1024.0), of="log_rate")

    def __post_init__(self) -> None:
        if self.input == "impulse" and self.transition == "rotate":
            raise ConfigError(
                "delta.input `impulse` ages the state before the write, and delta.transition `rotate` does so half "
                "before it and half after: leave one of them out"
            )
        if self.keys == "previous" and self.writes > 1:
            raise ConfigError(
                f"delta.keys `previous` gives one key a token, and delta.writes is {self.writes}: leave one of them out"
            )


class DeltaState(NamedTuple):
    s: Tensor  # (B, H, K, K), at least float32
    latest: Tensor | None  # (B, H, K): the query of the latest token, the next one's key; 0 before any


@register_mixer("delta", DeltaConfig)
class Delta(Mixer):
    """See the module's docstring for the equation."""

    #: rates and a gain, not matrices: the optimizer does not decay them
    undecayed = ("log_rate", "decay_bias", "write_bias", "omega")

    def __init__(self, hidden_size: int, config: DeltaConfig | None = None, **options: Any) -> None:
        """`config`, or its fields as keywords. Raises ConfigError for sizes that do not fit."""
        super().__init__()
        self.config = c = config or DeltaConfig(**options)
        self.heads, self.key_size = c.heads, head_size_of(hidden_size, c.heads, c.key_size, "delta.key_size")
        self.rotates = c.transition == "rotate"
        if self.rotates and self.key_size % 2:
            raise ConfigError(
                f"delta.transition `rotate` turns pairs of channels: key_size {self.key_size} must be even"
            )
        self.input = c.input
        counts = c.transition == "reflect" or (c.keys == "previous" and c.input == "held")
        self.accepts = frozenset({"mask"} if counts else {"mask", "dt"})
        h, keys = c.heads, c.heads * self.key_size
        key_width = 0 if c.keys == "previous" else keys
        turns = h if self.rotates else 0
        self.sizes = [keys, c.writes * key_width, c.writes * keys, c.writes * h, h, turns, keys]
        self.project = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.out = nn.Linear(keys, hidden_size, bias=False)
        self.log_rate = nn.Parameter(torch.empty(h, 1))
        self.decay_bias = nn.Parameter(torch.empty(h, 1))
        self.write_bias = nn.Parameter(torch.empty(h))
        self.norm = nn.Parameter(torch.empty(self.key_size))
        self.omega = nn.Parameter(torch.empty(h, self.key_size // 2)) if self.rotates else None
        initialized(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        low, high = (math.log(tokens) for tokens in self.config.horizons)
        self.log_rate.copy_(-torch.linspace(low, high, self.heads).unsqueeze(-1).expand_as(self.log_rate))
        self.decay_bias.fill_(-math.log(7))  # 8 sigmoid(b) = 1: with r = 0 a head decays at 1 / horizon
        self.write_bias.zero_()
        self.norm.fill_(1.0)
        if self.omega is not None:
            periods = torch.linspace(0, math.log(self.config.horizons[1]), self.key_size // 2)
            self.omega.copy_(torch.exp(-periods).expand_as(self.omega))

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> DeltaState:
        place = placement(self, device, dtype)
        place["dtype"] = torch.promote_types(place["dtype"], torch.float32)
        s = torch.zeros(batch_size, self.heads, self.key_size, self.key_size, **place)
        return DeltaState(s, s.new_zeros(s.shape[:3]) if self.config.keys == "previous" else None)

    def forward(
        self, x: Tensor, state: DeltaState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, DeltaState | None]:
        ctx, c = self.context(ctx), self.config
        rows, steps, _ = x.shape
        before = self.init_state(rows, x.device) if state is None else state
        require_parts(before, latest=c.keys == "previous")
        q, k, v, write, decay, turn, gate = self.project(x).split(self.sizes, -1)
        with without_autocast(x.device.type):
            dt = _time(upcast(x).dtype, ctx)
            q = _unit(upcast(q).view(rows, steps, self.heads, self.key_size))
            latest = None
            if before.latest is None:
                k = _unit(F.silu(upcast(k)).view(rows, steps, c.writes, self.heads, self.key_size))
            else:
                k = delayed(before.latest.to(q.dtype).unsqueeze(1), q, 1).unsqueeze(2)
                if state is not None:
                    latest = last_real(q, steps if ctx.mask is None else ctx.counts(x), before.latest)
            v = F.silu(upcast(v)).view(rows, steps, c.writes, self.heads, self.key_size)
            write = upcast(write).view(rows, steps, c.writes, self.heads) + upcast(self.write_bias)
            rate = upcast(decay).view(rows, steps, self.heads, 1) + upcast(self.decay_bias)
            rate = upcast(self.log_rate).exp() * 8 * torch.sigmoid(rate)  # 1 / tau
            aged = ctx if c.input == "held" else ctx.without("dt")
            erase, store = self._strengths(write, rate, _time(upcast(x).dtype, aged), aged.dt is not None)
            rate = rate * dt
            if ctx.dt is not None:
                rate = rate.clamp_max(_AT_REST)

            g, angle = -rate, None
            if self.omega is not None:
                # In the frame that turns with the state only keys and queries do; differences of angles count alone.
                if ctx.dt is None:
                    turn = summed = 2 * torch.sigmoid(upcast(turn)).unsqueeze(-1) * upcast(self.omega) * dt
                else:
                    turn, summed = self._far_turns(x, ctx.dt, ctx.mask, rate.detach())
                angle = angle_sum(summed, 1)
                k = _turned(k, -(angle - 0.5 * turn).unsqueeze(2))
                q = _turned(q, -angle)
            if c.writes > 1:
                q, k, v, g, erase, store = self._one_after_the_other(q, k, v, g, erase, store)
            else:
                k, v, erase, store = (part.squeeze(2) for part in (k, v, erase, store))
            o, s = delta_rule(q, k, v, g, erase, store, before.s.to(q.dtype), gaps=ctx.dt is not None)
            o = rms_norm(o[:, c.writes - 1 :: c.writes], upcast(self.norm), 1e-6)
            if state is not None and angle is not None:
                s = _turned(s.transpose(-1, -2), angle[:, -1].unsqueeze(-2)).transpose(-1, -2)
        y = o.flatten(2).to(x.dtype)
        y = self.out(y * F.silu(gate))
        return y, None if state is None else DeltaState(s.to(before.s.dtype), latest)

    growth_axes = frozenset({"heads"})

    def flops(self, length: int) -> tuple[float, float]:
        """S^T k and k u' of each write, and S^T q: the definition's cost, whatever a chunked form spends."""
        return 0.0, (4.0 * self.config.writes + 2.0) * self.heads * self.key_size**2

    @staticmethod
    def grow(options: DeltaConfig, hidden_size: int, by: Growth) -> DeltaConfig:
        """Heads times a factor, of the same size."""
        size, heads = options.key_size or hidden_size // options.heads, options.heads * by.factor("heads")
        return replace(options, heads=heads, key_size=size)

    def growth(self, grown: Delta, width: Lift) -> Table:
        heads, writes = tile(self.heads, grown.heads), self.config.writes
        parts = []
        for part, size in enumerate(self.sizes):
            times = writes if part in (1, 2, 3) else 1  # k, v and z of each write
            inner = size // (times * self.heads)
            if size:
                parts.append(tile(times, times) * heads * tile(inner, inner))
        one, values = tile(1, 1), tile(self.key_size, self.key_size)
        table: Table = {
            **tables(
                {"project": linear(self.project, join(*parts), width), "out": linear(self.out, width, heads * values)}
            ),
            "log_rate": Grows(heads, one),
            "decay_bias": Grows(heads, one),
            "write_bias": Grows(heads),
            "norm": Grows(values),
        }
        pairs = self.key_size // 2
        return table if self.omega is None else table | {"omega": Grows(heads, tile(pairs, pairs))}

    def lower(self, builder: Any, x: int) -> tuple[int, Any]:
        c, h, keys = self.config, self.heads, self.key_size
        shifts = c.keys == "previous"
        s = builder.keep_fixed(h, keys, keys)
        latest = builder.keep_fixed(h, keys) if shifts else None
        parts, y = builder.linear(self.project.weight, None, x), builder.register(h * keys)
        work = builder.register(h * (c.writes * (3 + 2 * keys) + keys // 2))
        rates = 8 * self.log_rate.float().exp()
        omega = [] if self.omega is None else [self.omega]
        vectors = builder.weights(rates, self.decay_bias, self.write_bias, self.norm, *omega)
        sizes = (h, keys, keys, c.writes, self.rotates, c.transition == "reflect", shifts)
        builder.emit("DELTA", parts, y, vectors, s.at, -1 if latest is None else latest.at, work, 0, *sizes)
        y = builder.silu_product(parts + sum(self.sizes[:-1]), y, h * keys)
        return builder.linear(self.out.weight, None, y), DeltaState(s, latest)

    def _strengths(self, write: Tensor, rate: Tensor, dt: Tensor | float, gaps: bool) -> tuple[Tensor, Tensor]:
        """e and b (B, T, writes, H) for the rates 1 / tau; `gaps` where dt may be long."""
        if self.config.transition == "reflect":
            time = dt if isinstance(dt, float) else (dt > 0).to(write.dtype)
            e = 2 * torch.sigmoid(write) * time
            return e, e
        beta = F.softplus(write)
        strength = beta * dt
        e = -torch.expm1(-strength)
        if self.config.writes > 1:
            return e, e
        rate = rate.transpose(-1, -2)
        if gaps:
            # What is stored is at rest by then, and depends on the ratio of the rates alone: no product overflows.
            dt = torch.minimum(torch.as_tensor(dt), _AT_REST / (beta + rate).detach())
            strength = beta * dt
        return e, strength * _mean_decay(strength + rate * dt)

    def _far_turns(self, x: Tensor, dt: Tensor, mask: Tensor | None, rate: Tensor) -> tuple[Tensor, Tensor]:
        """By how much each pair turns in a token's time dt, (B, T, H, K / 2), modulo 4 pi: its half is exact as well.
        Twice: the second is for the sum over tokens, and has no gradient where the past is forgotten, as the gradients
        of the tokens behind would cancel but for rounding.

        x (B, T, D); rate (B, T, H, 1), dt / tau. Raises InputError where a turn is not resolved and the state is
        not forgotten in its time; in a compiled graph, which depends on no value, the turn is NaN.
        """
        assert self.omega is not None
        time = double(dt if mask is None else dt * mask)[..., None, None]
        turn = 2 * torch.sigmoid(self._turn_logits(x)).unsqueeze(-1) * double(self.omega) * time
        unresolved = turn.detach().abs() > _RESOLVED
        lost = unresolved & (rate.to(turn.device) < _FORGOTTEN)
        turn = turn.masked_fill(unresolved, 0.0)
        if torch.compiler.is_compiling():
            turn = turn.masked_fill(lost, math.nan)
        elif bool(underlying(lost).any()):
            where = underlying(lost).nonzero()[0].tolist()
            raise InputError(
                f"delta: transition `rotate` resolves turns of up to {_RESOLVED:g} radians a token, and a dt of up to "
                f"{float(underlying(dt).max()):g} turns further while the state has not decayed, first at {where} "
                "(row, token, head, pair); give dt in a larger unit of time"
            )
        half = torch.remainder(0.5 * turn, 2 * math.pi)
        turn = 2 * half.to(x.device, widest_float(x.device))
        return turn, torch.where(rate < _FORGOTTEN, turn, turn.detach())

    def _turn_logits(self, x: Tensor) -> Tensor:
        """w x (B, T, H) in float64: an error of 1e-7 in a rate is one of 100 radians after 1e9."""
        first = sum(self.sizes[:5])
        if type(self.project) is nn.Linear:
            return F.linear(double(x), double(self.project.weight[first : first + self.heads]))
        weights = {name: double(weight) for name, weight in self.project.named_parameters()}  # an adapter has its own
        return torch.func.functional_call(self.project, weights, double(x))[..., first : first + self.heads]

    def _one_after_the_other(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, erase: Tensor, store: Tensor
    ) -> tuple[Tensor, ...]:
        """Several writes of a token as tokens of their own: the first decays, and the last reads."""
        n = self.config.writes
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
        g = F.pad(g.unsqueeze(2), (0, 0, 0, 0, 0, n - 1)).flatten(1, 2)
        return q, *(part.flatten(1, 2) for part in (k, v)), g, erase.flatten(1, 2), store.flatten(1, 2)


def _time(dtype: torch.dtype, ctx: Context) -> Tensor | float:
    """dt (B, T, 1, 1), 0 at padding, finite; or 1."""
    dt: Tensor | float = 1.0
    if ctx.dt is not None:
        dt = ctx.dt[..., None, None].to(dtype).clamp_max(torch.finfo(dtype).max)
    return dt if ctx.mask is None else dt * ctx.mask[..., None, None].to(dtype)


def _unit(x: Tensor) -> Tensor:
    """x / |x| along its last dimension, in the one pass of `rms_norm`; 0 where x is 0."""
    size = x.shape[-1]
    return rms_norm(x, x.new_full((size,), size**-0.5), 1e-24 / size)


def _mean_decay(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x for x >= 0, the mean of exp(-s) from 0 to x; by its series near 0, where its slope cancels."""
    near = x < 0.01
    series = 1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5)))
    away = x.masked_fill(near, 1.0)
    return torch.where(near, series, -torch.expm1(-away) / away)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """x (..., 2 n) with its pairs turned by angle (..., n)."""
    if exporting():  # not every runtime has complex numbers
        (a, b), cos, sin = x.unflatten(-1, (-1, 2)).unbind(-1), angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2)
