"""The spectral mixer: complex channels that decay and turn, K(t) = exp((-gamma + i w) t), as a recurrence.

With projections, for N complex channels (v, r and g are linear in x):

    lambda_t = exp(-gamma_t + i w),   gamma_t = gamma * 8 sigmoid(r_t + b)
    h_t = lambda_t h_{t-1} + sqrt(1 - |lambda_t|^2) u_t
    y_t = W_out ([Re h_t, Im h_t] * silu(g_t))

Without them, the Continuous Transformer's operator: the pairs of x are the channels, h_t = lambda h_{t-1} + u_t, y = h.
With dt the state ages by lambda^dt, and u_t is weighed as with dt = 1: K is an exponential in time, so that this is
exact for an impulse at each token's time. phase_gate depends on absolute position, so that dt is refused with it.
Between the input (v, or x) and the recurrence stand two optional parts:

    filter      s = IFFT(Z F / (|Z G| + 0.1)), Z = FFT(v) over channels;  s = v without it
    phase_gate  u_t = s_t tanh(|s_t| alpha + phi_t beta), phi_t = t omega mod 2 pi in [-pi, pi);  u = s without it

w = omega + 0.1 sin(m). omega starts at 2 pi / (6 t^0.7), a period of 6 t^0.7 tokens for the decay time t = 1 / gamma,
spread by 30 %; without projections as published, omega_n = exp(-sqrt(2 n + 1) / sqrt(2 N - 1) ln 10^4).

State: h, 8 N bytes a layer and row in float32 (never less), and the position, 8 bytes; whatever the context.

The recurrence is the published causal-in-intent convolution, made causal. Input-dependent decay and its normalisation:
De et al. 2024 (RG-LRU), arXiv 2402.19427, eq. 3; complex diagonal recurrences: Orvieto et al. 2023, arXiv 2303.06349.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from glissando.config import options
from glissando.errors import ConfigError, NotCompiled, Refused
from glissando.kernels.loop import exporting
from glissando.kernels.precise import widest_float
from glissando.kernels.scan import scan_pairs
from glissando.mixers.base import Context, Mixer, Picture, initialized, last_real, placement, register_mixer
from glissando.mixers.memory import starting_turns
from glissando.mixers.spectral.operators import gated_scan, has_kernel, phase_gate, rational_filter
from glissando.precision import upcast, without_autocast
from glissando.state import zeros_position
from glissando.widening import Grows, Growth, Lift, Table, join, linear, spread, tables, tile


@options
class SpectralConfig:
    """Options of the `spectral` mixer.

    projections   learned maps into and out of the channels; without them, pairs of entries of x are the channels
    channels      N, with projections; None: hidden_size
    filter        the rational filter over channels
    phase_gate    the gate by modulus and phase
    """

    projections: bool = True
    channels: PositiveInt | None = None
    filter: bool = False
    phase_gate: bool = False

    def __post_init__(self) -> None:
        if self.channels is not None and not self.projections:
            raise ConfigError(
                "spectral.channels needs spectral.projections, which is off; leave it out or turn projections on"
            )


#: decay times after which nothing of a state is left
_AT_REST = 100.0
#: initial decay times 1 / gamma are spread from 1 to so many tokens: the best of 8, 32 and 1000
_HORIZON = 32.0


class SpectralState(NamedTuple):
    h: Tensor  # (B, N, 2), at least float32
    position: Tensor  # (B,) int64, tokens seen


class _Constants(NamedTuple):
    """What follows from the weights alone, each (N,) but `factor`; at least float32."""

    gamma: Tensor
    turn: Tensor  # w
    factor: Tensor  # (N, 2), pairs of reals: exp(i w) with projections, lambda without
    f: Tensor | None
    g: Tensor | None  # |G|
    gate: tuple[Tensor, Tensor, Tensor] | None  # alpha, beta, omega


@register_mixer("spectral", SpectralConfig)
class Spectral(Mixer):
    """See the module's docstring for the equation."""

    input = "impulse"
    #: complex vectors, not matrices: the optimizer does not decay them
    undecayed = ("numerator", "denominator")

    def __init__(self, hidden_size: int, config: SpectralConfig | None = None, **options: Any) -> None:
        """`config`, or its fields as keywords. Raises ConfigError for sizes that do not fit."""
        super().__init__()
        self.config = c = config or SpectralConfig(**options)
        if not c.projections and hidden_size % 2:
            raise ConfigError(
                "spectral.projections is off, so that pairs of the width are the channels: the width must be even, "
                f"got {hidden_size}"
            )
        self.accepts = frozenset({"mask"} if c.phase_gate else {"mask", "dt"})
        self.channels = n = (c.channels or hidden_size) if c.projections else hidden_size // 2
        self.log_gamma = nn.Parameter(torch.empty(n))
        self.omega = nn.Parameter(torch.empty(n))
        self.modulation = nn.Parameter(torch.empty(n))
        if c.filter:
            self.numerator = nn.Parameter(torch.empty(n, 2))
            self.denominator = nn.Parameter(torch.empty(n, 2))
        if c.phase_gate:
            self.gate_alpha = nn.Parameter(torch.empty(n))
            self.gate_beta = nn.Parameter(torch.empty(n))
        if c.projections:
            # What is filtered or gated by phase is complex; otherwise one number a channel goes in.
            self.sizes = [2 * n if c.filter or c.phase_gate else n, n, 2 * n]
            self.project = nn.Linear(hidden_size, sum(self.sizes), bias=False)
            self.out = nn.Linear(2 * n, hidden_size, bias=False)
            self.decay_bias = nn.Parameter(torch.empty(n))
        initialized(self)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Published: log gamma ~ N(-2, 0.5), filters and modulation ~ N(0, 0.02), alpha 0.5, beta 0."""
        c, n = self.config, self.channels
        nn.init.normal_(self.modulation, std=0.02)
        if c.filter:
            nn.init.normal_(self.numerator, std=0.02)
            nn.init.normal_(self.denominator, std=0.02)
        if c.phase_gate:
            nn.init.constant_(self.gate_alpha, 0.5)
            nn.init.zeros_(self.gate_beta)
        if not c.projections:
            nn.init.normal_(self.log_gamma, -2.0, 0.5)
            roots = torch.sqrt(2 * torch.arange(n, dtype=torch.float64, device="cpu") + 1)
            self.omega.copy_(torch.exp(-roots / roots.max() * math.log(1e4)))
            return
        horizons = torch.logspace(0, math.log10(_HORIZON), n)
        self.log_gamma.copy_(-horizons.log())
        self.omega.copy_(starting_turns(horizons))
        self.decay_bias.fill_(-math.log(7))  # 8 sigmoid(b) = 1: with r = 0 a channel decays at gamma

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> SpectralState:
        place = placement(self, device, dtype)
        place["dtype"] = torch.promote_types(place["dtype"], torch.float32)
        return SpectralState(
            torch.zeros(batch_size, self.channels, 2, **place), zeros_position(batch_size, place["device"])
        )

    def decay_times(self, x: Tensor) -> Tensor:
        """1 / gamma (B, T, N) in tokens, how long a channel remembers; x (B, T, D) as the mixer is given it."""
        _, rate, _ = self._split(self.project(x) if self.config.projections else x)
        return (1 / self._rates(rate, self._derive())).expand(*x.shape[:2], self.channels)

    def forward(
        self, x: Tensor, state: SpectralState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, SpectralState | None]:
        ctx = self.context(ctx)
        parts = self.project(x) if self.config.projections else x
        with without_autocast(x.device.type):
            constants, start = self._constants(ctx), None if state is None else state.h
            if self._has_one_pass(parts, constants, ctx):
                y, h = gated_scan(parts, 8 * constants.gamma, upcast(self.decay_bias), constants.factor, start)
                last = h[:, -1].clone()
            else:
                y, h, last = self._in_steps(parts, constants, state, ctx)
        y = self.out(y.to(x.dtype)) if self.config.projections else y.to(x.dtype)
        if state is None:
            return y, None
        if ctx.mask is None:
            return y, SpectralState(last.to(state.h.dtype), state.position + h.shape[1])
        counts = ctx.counts(h)
        return y, SpectralState(last_real(h, counts, state.h), state.position + counts)

    def _has_one_pass(self, parts: Tensor, constants: _Constants, ctx: Context) -> bool:
        c = self.config
        plain = c.projections and not (c.filter or c.phase_gate or exporting()) and ctx.dt is None
        return plain and has_kernel(parts, constants.gamma, upcast(self.decay_bias))

    def _in_steps(
        self, parts: Tensor, constants: _Constants, state: SpectralState | None, ctx: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y before the output's map, every h and the last one, by one operation after the other."""
        entry, rate, gate = self._split(parts)
        u = upcast(entry)
        if entry.shape[-1] != self.channels and not exporting():  # complex: filtered, gated by phase, or pairs of x
            u = torch.view_as_complex(u.contiguous().view(*parts.shape[:2], self.channels, 2))
        if constants.f is not None and constants.g is not None:
            u = rational_filter(u, constants.f, constants.g)
        if constants.gate is not None:
            position = zeros_position(len(u), u.device) if state is None else state.position
            u = phase_gate(u, *constants.gate, position)
        a, gamma = constants.factor, constants.gamma
        if self.config.projections:
            gamma = self._rates(rate, constants)
            # At gamma = 0, where a gate is shut beyond what the type holds, the root has no slope: it ends before.
            kept = (-torch.expm1(-2 * gamma)).clamp_min(torch.finfo(gamma.dtype).tiny)
            u = u * torch.sqrt(kept)
            if ctx.dt is None:
                a = _scaled(torch.exp(-gamma), a)
        if ctx.dt is not None:
            a = aged(gamma, constants.turn, ctx.dt)
        h, last = scan_pairs(a, u, None if state is None else state.h)
        y = h.flatten(-2)
        return y if gate is None else y.to(gate.dtype) * F.silu(gate), h, last

    growth_axes = frozenset({"state"})

    def flops(self, length: int) -> tuple[float, float]:
        """The recurrence, and the filter's two transforms."""
        n = self.channels
        return 0.0, 8.0 * n + (10.0 * n * math.log2(n) if self.config.filter else 0.0)

    @staticmethod
    def grow(options: SpectralConfig, hidden_size: int, by: Growth) -> SpectralConfig:
        """Channels times a factor; without projections they are the width's."""
        if options.projections:
            return replace(options, channels=(options.channels or hidden_size) * by.factor("state"))
        if by.factor("state") != by.width:
            raise ConfigError(
                f"state {by.state} was given, but without projections the channels of `spectral` are the width: "
                "grow that, and leave state out"
            )
        return options

    def growth(self, grown: Spectral, width: Lift) -> Table:
        """A tile of k has content in every k-th Fourier bin alone, k times as much: F' = F and G' = G / k there."""
        n = tile(self.channels, grown.channels)
        bins, pair = spread(self.channels, grown.channels), tile(2, 2)
        table: Table = {"log_gamma": Grows(n), "omega": Grows(n), "modulation": Grows(n)}
        if self.config.filter:
            table |= {"numerator": Grows(bins, pair), "denominator": Grows(bins, pair, scale=1 / n.copies)}
        if self.config.phase_gate:
            table |= {"gate_alpha": Grows(n), "gate_beta": Grows(n)}
        if self.config.projections:
            parts = [n * tile(size // self.channels, size // self.channels) for size in self.sizes]
            table |= tables({"project": linear(self.project, join(*parts), width)})
            table |= tables({"out": linear(self.out, width, n * pair)})
            table |= {"decay_bias": Grows(n)}
        return table

    def pictures(self, x: Tensor, ctx: Context) -> list[Picture]:
        about = "How long a layer's kernels remember: the median of 1 / gamma over its channels."
        times = self.decay_times(x)[0].quantile(0.5, -1)
        return [Picture("decay_times", "Kernel decay times", about, "tokens", True, times)]

    def lower(self, builder: Any, x: int) -> tuple[int, Any]:
        c, n = self.config, self.channels
        for option in ("filter", "phase_gate"):
            if getattr(c, option):
                raise NotCompiled(f"spectral.{option}")
        constants, h = self._derive(), builder.keep_fixed(n, 2)
        state: Any = SpectralState(h, builder.filled)
        y = builder.register(2 * n)
        if not c.projections:
            builder.emit("SCAN_PAIRS", builder.weights(constants.factor), x, y, 2 * n, h.at)
            return y, state
        parts = builder.linear(self.project.weight, None, x)
        vectors = builder.weights(8 * constants.gamma, self.decay_bias, *constants.factor.unbind(-1))
        builder.emit("SPECTRAL", parts, parts + n, y, n, vectors, h.at)
        y = builder.silu_product(parts + 2 * n, y, 2 * n)
        return builder.linear(self.out.weight, None, y), state

    def export_form(self, capacity: int) -> nn.Module:
        if self.config.filter or self.config.phase_gate:
            raise Refused(
                "mixer `spectral` with mixer.filter or mixer.phase_gate cannot be exported: they compute with complex "
                "numbers, which not every runtime has. Train one without them, such as continuous-transformer-nano"
            )
        return self

    def _constants(self, ctx: Context) -> _Constants:
        if ctx.memo is None:
            return self._derive()
        if self not in ctx.memo:
            ctx.memo[self] = self._derive()
        return ctx.memo[self]

    def _derive(self) -> _Constants:
        c = self.config
        gamma, turn = upcast(self.log_gamma).exp(), upcast(self.omega) + 0.1 * torch.sin(upcast(self.modulation))
        factor = torch.stack((turn.cos(), turn.sin()), -1)
        if not c.projections:
            factor = torch.exp(-gamma).unsqueeze(-1) * factor
        f = g = gate = None
        if c.filter:
            f, g = (torch.view_as_complex(upcast(p).contiguous()) for p in (self.numerator, self.denominator))
            g = g.abs()
        if c.phase_gate:
            gate = (upcast(self.gate_alpha), upcast(self.gate_beta), upcast(self.omega))
        return _Constants(gamma, turn, factor, f, g, gate)

    def _split(self, parts: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The channels' input, and the pre-activations of the decay and of the output gate."""
        return parts.split(self.sizes, -1) if self.config.projections else (parts, None, None)

    def _rates(self, rate: Tensor | None, constants: _Constants) -> Tensor:
        """gamma, (N,) or, with projections, (B, T, N)."""
        if rate is None:
            return constants.gamma
        return 8 * constants.gamma * torch.sigmoid(upcast(rate) + upcast(self.decay_bias))


def aged(gamma: Tensor, turn: Tensor, dt: Tensor) -> Tensor:
    """exp((-gamma + i turn) dt) in pairs (B, T, N, 2) for dt (B, T), gamma (N,) or (B, T, N) and turn (N,).

    The angle is reduced in the widest type; a state that has decayed by exp(-100) has no gradient left in it.
    """
    time = dt.unsqueeze(-1)
    wide = widest_float(dt.device)
    angle = torch.remainder(turn.to(wide) * time.to(wide), 2 * math.pi).to(gamma.dtype)
    r = torch.exp(-(gamma * time.to(gamma.dtype)).clamp_max(_AT_REST))
    return torch.stack((r * angle.cos(), r * angle.sin()), -1)


def _scaled(r: Tensor, z: Tensor) -> Tensor:
    """r z for real r (..., N) and pairs of reals z (N, 2). Without a compiler, the product of complex numbers is the
    faster of two ways to write it."""
    if torch.compiler.is_compiling():
        return r.unsqueeze(-1) * z
    return torch.view_as_real(r * torch.view_as_complex(z))
