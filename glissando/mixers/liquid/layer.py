"""The liquid mixer: a state whose time constants tau adapt to the input and to the state itself.

    dx/dt = (A - 1 / tau(x, u)) x + B u,     tau = tau0 (1 + a phi(x, u)),  phi in (-1, 1)

tau and the input are held over a token, which takes the time dt (1 by default), and the step is exact (zero-order
hold). With `input: impulse` the state ages over dt and then takes the input with the strength of dt = 1, for events.

`diagonal` (scan.py): A = diag(l) are the modes of the normal part of HiPPO-LegS, complex pairs of which
one is kept, each with a learned step that sets its time scale; phi = tanh(z(u) + p Re x + q Im x) mode by mode, z
linear in the input or, in the published layer, a network of it. Modes do not couple, so that training is one pass over
time. `dense`: the publication's equation, A a full matrix that starts from HiPPO-LegS, phi a network of all of [x, u],
a matrix exponential a token: the reference, and for small problems.

Around it stands one of two layers:

    gated      y = W_out (x * silu(g)),  the input, z and g linear in the mixer's input
    published  u = gelu(norm(W v));  y = s (C norm(x) + D u) + c;  y <- y sigmoid(w tanh(W x));
               out = W gelu(norm(W y)) + r v,  v the mixer's input

State: x, 4 N bytes a layer and row in float32 (never less), whatever the context. dt = 0 leaves it alone where the
input is held.

The publication's ten substeps a token, its clamps and its detached matrices are left out: a step is exact, tau0 in
(0.01, 10) and a in (0.001, 0.999) by smooth maps, and everything gets gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.errors import ConfigError, NotCompiled
from glissando.mixers.base import Context, Mixer, Picture, initialized, last_real, placement, register_mixer
from glissando.mixers.liquid.dynamics import Dense, Diagonal, LiquidConfig
from glissando.mixers.liquid.scan import pack
from glissando.widening import Grows, Growth, Lift, Table, grow_norm, join, linear, tables, tile, under

#: tokens of the first row that are observed
_OBSERVED = 64


class LiquidState(NamedTuple):
    x: Tensor  # (B, N), at least float32; diagonal: pairs


@register_mixer("liquid", LiquidConfig)
class Liquid(Mixer):
    """See the module's docstring for the equation."""

    accepts = frozenset({"mask", "dt"})

    def __init__(self, hidden_size: int, config: LiquidConfig | None = None, **options: Any) -> None:
        """`config`, or its fields as keywords. Raises ConfigError for sizes that do not fit."""
        super().__init__()
        self.config = c = config or LiquidConfig(**options)
        self.input = c.input
        self.size = c.state_size or hidden_size
        if c.dynamics == "diagonal" and self.size % 2:
            raise ConfigError(f"liquid.state_size must be even for diagonal dynamics, got {self.size}")
        self.dynamics: Diagonal | Dense = (Diagonal if c.dynamics == "diagonal" else Dense)(c, self.size)
        self.layer = (Gated if c.layer == "gated" else Published)(c, hidden_size, self.size)
        initialized(self)

    def reset_parameters(self) -> None:
        self.dynamics.initialize()
        self.layer.initialize()

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> LiquidState:
        place = placement(self, device, dtype)
        place["dtype"] = torch.promote_types(place["dtype"], torch.float32)
        return LiquidState(torch.zeros(batch_size, self.size, **place))

    def forward(
        self, x: Tensor, state: LiquidState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, LiquidState | None]:
        ctx = self.context(ctx)
        inputs = self.layer.inputs(x)
        before = self.init_state(len(x), x.device).x if state is None else state.x
        states = self.dynamics(inputs, before, ctx.dt, ctx.memo)
        y = self.layer.output(x, inputs, states)
        if state is None:
            return y, None
        return y, LiquidState(last_real(states, x.shape[1] if ctx.mask is None else ctx.counts(x), state.x))

    def time_constants(self, x: Tensor, ctx: Context) -> Tensor:
        """tau (B, T, N, or N / 2 modes) in tokens of dt = 1; x (B, T, D) as the mixer is given it."""
        inputs, before = self.layer.inputs(x), self.init_state(len(x), x.device).x
        return self.dynamics.time_constants(inputs, before, ctx.dt)

    growth_axes = frozenset({"state"})
    observed = ("tau_p05", "tau_p50", "tau_p95", "adaptation")

    def flops(self, length: int) -> tuple[float, float]:
        return self.dynamics.flops()

    @staticmethod
    def grow(options: LiquidConfig, hidden_size: int, by: Growth) -> LiquidConfig:
        """The state times a factor."""
        return replace(options, state_size=(options.state_size or hidden_size) * by.factor("state"))

    def growth(self, grown: Liquid, width: Lift) -> Table:
        """A tiled state follows the tiled equation: modes do not couple, and a dense A reads copies in equal shares."""
        pair = 2 if isinstance(self.dynamics, Diagonal) else 1
        state = tile(self.size // pair, grown.size // pair) * tile(pair, pair)
        dynamics, layer = self.dynamics.growth(grown.size), self.layer.growth(width, state, grown.size)
        return under("dynamics", dynamics) | under("layer", layer)

    def silenced(self) -> list[nn.Parameter]:
        return self.layer.silenced()

    def observe(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        """Quantiles of tau over modes and tokens, and a; at most 64 tokens of the first row."""
        x = x[:1, :_OBSERVED]
        dt = None if ctx.dt is None else ctx.dt[:1, :_OBSERVED]
        tau = self.time_constants(x, replace(ctx, dt=dt))
        quantiles = tau.flatten().quantile(tau.new_tensor([0.05, 0.5, 0.95]))
        return dict(zip(self.observed, (*quantiles.unbind(), self.dynamics.adaptations().mean()), strict=True))

    def pictures(self, x: Tensor, ctx: Context) -> list[Picture]:
        about = "How long a layer's modes remember: the median of tau over its modes."
        times = self.time_constants(x, ctx)[0].quantile(0.5, -1)
        return [Picture("time_constants", "Time constants", about, "tokens", True, times)]

    def lower(self, builder: Any, x: int) -> tuple[int, Any]:
        dynamics, layer = self.dynamics, self.layer
        if not isinstance(dynamics, Diagonal):
            raise NotCompiled("liquid.dynamics `dense`")
        if not isinstance(layer, Gated):
            raise NotCompiled("liquid.layer `published`")
        n, packed = self.size // 2, pack(dynamics.modes())
        slot = builder.keep_fixed(self.size)
        vectors = builder.weights(torch.from_numpy(packed.vectors), torch.from_numpy(packed.tables), dynamics.bias)
        parts, y = builder.linear(layer.project.weight, None, x), builder.register(self.size)
        builder.emit("LIQUID", parts, parts + n, y, n, vectors, slot.at, bool(self.config.coupled))
        y = builder.silu_product(parts + 2 * n, y, self.size)
        return builder.linear(layer.out.weight, None, y), LiquidState(slot)


class Gated(nn.Module):
    """Linear maps in and out, and a silu gate on the state."""

    def __init__(self, config: LiquidConfig, hidden_size: int, size: int) -> None:
        super().__init__()
        # A mode has one input, not two: its phase is free.
        entry = [size // 2, size // 2] if config.dynamics == "diagonal" else [size]
        self.sizes = [*entry, size]
        self.project = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.out = nn.Linear(size, hidden_size, bias=False)

    def initialize(self) -> None:
        """Nothing beside the linear maps, which the model starts."""

    def growth(self, width: Lift, state: Lift, size: int) -> Table:
        parts = [tile(part, part * size // self.sizes[-1]) for part in self.sizes[:-1]]
        return tables(
            {"project": linear(self.project, join(*parts, state), width), "out": linear(self.out, width, state)}
        )

    def silenced(self) -> list[nn.Parameter]:
        return list(self.out.parameters())

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the dynamics read, then the gate."""
        return self.project(x).split(self.sizes, -1)

    def output(self, x: Tensor, inputs: tuple[Tensor, ...], states: Tensor) -> Tensor:
        gate = inputs[-1]
        return self.out((states.to(gate.dtype) * F.silu(gate)).to(x.dtype))


class Published(nn.Module):
    """The publication's layer: its input network, read-out, gate by the state and output network."""

    def __init__(self, config: LiquidConfig, hidden_size: int, size: int) -> None:
        super().__init__()
        d, s = hidden_size, size
        self.entry, self.entry_norm = nn.Linear(d, s), nn.LayerNorm(s)
        self.b: nn.Linear | None = None
        if config.dynamics == "diagonal":
            self.b = nn.Linear(s, s, bias=False)
            self.adapt = nn.Sequential(
                nn.Linear(s, 2 * s), nn.LayerNorm(2 * s), nn.Tanh(), nn.Linear(2 * s, s // 2, bias=False)
            )
        self.state_norm = nn.LayerNorm(s)
        self.c, self.d = nn.Linear(s, d, bias=False), nn.Linear(s, d, bias=False)
        self.scale, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.gate = nn.Sequential(nn.Linear(s, s), nn.Tanh(), nn.Linear(s, 1), nn.Sigmoid())
        self.up, self.up_norm, self.down = nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.Linear(2 * d, d)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.residual = nn.Parameter(torch.full((1,), 0.1))

    @torch.no_grad()
    def initialize(self) -> None:
        """B and C ~ N(0, 0.1), D = 0; others as the model's initialisation starts them."""
        for matrix in (self.b, self.c):
            if matrix is not None:
                nn.init.normal_(matrix.weight, std=0.1)
        nn.init.zeros_(self.d.weight)
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)
        nn.init.constant_(self.residual, 0.1)

    def growth(self, width: Lift, state: Lift, size: int) -> Table:
        before, once = len(self.state_norm.weight), tile(1, 1)
        inner, wide = tile(2 * before, 2 * size), width * tile(2, 2)
        table = {
            "entry": linear(self.entry, state, width),
            "entry_norm": grow_norm(self.entry_norm, state),
            "state_norm": grow_norm(self.state_norm, state),
            "c": linear(self.c, width, state),
            "d": linear(self.d, width, state),
            "gate.0": linear(self.gate[0], state, state),
            "gate.2": linear(self.gate[2], once, state),
            "up": linear(self.up, wide, width),
            "up_norm": grow_norm(self.up_norm, wide),
            "down": linear(self.down, width, wide),
        }
        if self.b is not None:
            table |= {
                "b": linear(self.b, state, state),
                "adapt.0": linear(self.adapt[0], inner, state),
                "adapt.1": grow_norm(self.adapt[1], inner),
                "adapt.3": linear(self.adapt[3], tile(before // 2, size // 2), inner),
            }
        return tables(table) | {"scale": Grows(width), "shift": Grows(width), "residual": Grows(tile(1, 1))}

    def silenced(self) -> list[nn.Parameter]:
        return [*self.down.parameters(), self.residual]

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the dynamics read, then u."""
        u = F.gelu(self.entry_norm(self.entry(x)))
        return (u, u) if self.b is None else (self.b(u), self.adapt(u), u)

    def output(self, x: Tensor, inputs: tuple[Tensor, ...], states: Tensor) -> Tensor:
        states = states.to(x.dtype)
        y = self.scale * (self.c(self.state_norm(states)) + self.d(inputs[-1])) + self.shift
        y = y * self.gate(states)
        y = self.down(self.dropout(F.gelu(self.up_norm(self.up(y)))))
        return y + self.residual[0] * x
