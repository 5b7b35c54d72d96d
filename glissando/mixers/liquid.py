"""The liquid mixer: a state whose time constants tau adapt to the input and to the state itself.

    dx/dt = (A - 1 / tau(x, u)) x + B u,     tau = tau0 (1 + a phi(x, u)),  phi in (-1, 1)

tau and the input are held over a token, which takes the time dt (1 by default), and the step is exact (zero-order
hold).

`diagonal` (glissando/ops/liquid.py): A = diag(l) are the modes of the normal part of HiPPO-LegS, complex pairs of which
one is kept, each with a learned step that sets its time scale; phi = tanh(z(u) + p Re x + q Im x) mode by mode, z
linear in the input or, in the published layer, a network of it. Modes do not couple, so that training is one pass over
time. `dense`: the publication's equation, A a full matrix that starts from HiPPO-LegS, phi a network of all of [x, u],
a matrix exponential a token: the reference, and for small problems.

Around it stands one of two layers:

    gated      y = W_out (x * silu(g)),  the input, z and g linear in the mixer's input
    published  u = gelu(norm(W v));  y = s (C norm(x) + D u) + c;  y <- y sigmoid(w tanh(W x));
               out = W gelu(norm(W y)) + r v,  v the mixer's input

State: x, 4 N bytes a layer and row in float32 (never less), whatever the context. dt = 0 leaves it alone.

The publication's ten substeps a token, its clamps and its detached matrices are left out: a step is exact, tau0 in
(0.01, 10) and a in (0.001, 0.999) by smooth maps, and everything gets gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.errors import ConfigError
from glissando.mixers.base import Context, Mixer, initialized, last_real, placement, register_mixer
from glissando.mixers.liquid_dynamics import Dense, Diagonal, LiquidConfig


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
