"""The liquid mixer: a state whose time constants tau adapt to the input and to the state itself.

    dx/dt = (A - 1 / tau(x, u)) x + B u,     tau = tau0 (1 + a phi(x, u)),  phi in (-1, 1)

tau and the input are held over a token, which takes the time dt (1 by default), and the rest is exact (zero-order
hold).

`diagonal` (glissando/ops/liquid.py): A = diag(l) are the modes of the normal part of HiPPO-LegS, complex pairs of which
one is kept, each with a learned step that sets its time scale; phi = tanh(z(u) + p Re x + q Im x) mode by mode, z
linear in the input or, in the published layer, a network of it. Modes do not couple, so that training is one pass over
time. `dense`: the publication's equation, A a full matrix that starts from HiPPO-LegS, phi a network of all of [x, u],
a matrix exponential a token: the reference, and for small problems.

Around it stands one of two layers:

    gated      y = W_out (x * silu(g)),  the input, z and g linear in what the mixer is given
    published  u = gelu(norm(W v));  y = s (C norm(x) + D u) + c;  y <- y sigmoid(w tanh(W x));
               out = W gelu(norm(W y)) + r v,  v what the mixer is given

State: x, 4 N bytes a layer and row in float32 (never less), whatever the context. dt = 0 leaves it alone.

The publication's ten substeps a token, its clamps and its detached matrices are left out: a step is exact, tau0 in
(0.01, 10) and a in (0.001, 0.999) by smooth maps, and everything gets gradients.
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
from glissando.lifts import Grows, Lift, Table, grow_norm, join, linear, tables, tile, under
from glissando.mixers.base import Context, Mixer, last_real
from glissando.mixers.liquid_dynamics import Dense, Diagonal

if TYPE_CHECKING:
    from glissando.growth import Growth


@dataclass
class LiquidConfig:
    """Options of the `liquid` mixer.

    dynamics          `diagonal` or `dense`, see glissando/mixers/liquid.py
    state_size        N real numbers, two for a mode of `diagonal`; hidden_size if None
    layer             what stands around the dynamics: `gated` or `published`
    state_dependence  tau depends on the state, not on the input alone
    adaptation        a starts here: how far tau moves
    tau               tau0 starts here, between 0.01 and 10
    init              dense: A starts from 0.1 times HiPPO-LegS (`hippo`, if None), or as 0.1 times normal numbers
                      (`random`)
    dt                dense: the time that a token takes where none is given, and the unit of a given one; 1 if None
    steps             diagonal: steps of the modes start spread from the first to the second, in their logarithm;
                      [0.001, 0.1] if None
    coupled           diagonal: the input enters divided by tau, as in a liquid time-constant cell
    turns             diagonal: the modes' turning starts from HiPPO-LegS (`legs`, if None), or `matched` to the steps,
                      fast where they decay fast
    dropout           published layer: before its last matrix
    """

    dynamics: Literal["diagonal", "dense"] = "diagonal"
    state_size: int | None = None
    layer: Literal["gated", "published"] = "gated"
    state_dependence: bool = True
    adaptation: float = starting(0.1, of="raw_adaptation")
    tau: float = starting(1.0, of="raw_tau")
    init: Literal["hippo", "random"] | None = starting(None, of="dynamics.a")
    dt: float | None = None
    steps: tuple[float, float] | None = starting(None, of="log_step")
    coupled: bool | None = None
    turns: Literal["legs", "matched"] | None = starting(None, of="dynamics.turn")
    dropout: float = 0.0


class LiquidState(NamedTuple):
    x: Tensor  # (B, N), at least float32; diagonal: pairs


class Liquid(Mixer):
    """See the module's docstring for the equation."""

    honours = frozenset({"mask", "dt"})
    axes = frozenset({"state"})
    observed = ("tau_p05", "tau_p50", "tau_p95", "adaptation", "newton_iterations", "newton_residual")
    #: modes start from an empty state and are quiet by themselves: smaller endings were measured, and learn more slowly
    damped = False
    #: of the dynamics: filters of a mode, not matrices
    undecayed = Diagonal.undecayed

    def __init__(self, config: LiquidConfig, hidden_size: int) -> None:
        super().__init__()
        self._check(config, hidden_size)
        self.config = config
        self.size = config.state_size or hidden_size
        self.dynamics: Diagonal | Dense = (Diagonal if config.dynamics == "diagonal" else Dense)(config, self.size)
        wrap = Gated if config.layer == "gated" else Published
        self.layer = wrap(config, hidden_size, self.size)

    @staticmethod
    def _check(c: LiquidConfig, hidden_size: int) -> None:
        check_choices(c, "liquid")
        size = hidden_size if c.state_size is None else c.state_size
        if size < 1 or (c.dynamics == "diagonal" and size % 2):
            raise ConfigError(f"liquid.state_size must be positive, and even for diagonal dynamics, got {size}")
        if not 0.001 < c.adaptation < 0.999:
            raise ConfigError(f"liquid.adaptation must be between 0.001 and 0.999, got {c.adaptation}")
        if c.steps is not None and not (len(c.steps) == 2 and 0 < c.steps[0] <= c.steps[1] < math.inf):
            raise ConfigError(f"liquid.steps must be two numbers above 0 in order, got {list(c.steps)}")
        if not 0.01 < c.tau < 10:
            raise ConfigError(f"liquid.tau must be between 0.01 and 10, got {c.tau}")
        if c.dt is not None and not 0 < c.dt < math.inf:
            raise ConfigError(f"liquid.dt must be above 0 and finite, got {c.dt}")
        for kind, names in (("diagonal", ("steps", "coupled", "turns")), ("dense", ("init", "dt"))):
            if given := [name for name in names if c.dynamics != kind and getattr(c, name) is not None]:
                raise ConfigError(
                    f"liquid.{given[0]} is of {kind} dynamics, and liquid.dynamics is `{c.dynamics}`; leave it out"
                )
        if not 0 <= c.dropout < 1:
            raise ConfigError(f"liquid.dropout must be at least 0 and below 1, got {c.dropout}")
        if c.layer == "gated" and c.dropout:
            raise ConfigError(
                f"liquid.dropout {c.dropout} is of the published layer; leave it out, or see block.*_dropout"
            )

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> LiquidState:
        place = self._placement(device, dtype)
        place["dtype"] = torch.promote_types(place["dtype"], torch.float32)
        return LiquidState(torch.zeros(batch_size, self.size, **place))

    def endings(self) -> list[nn.Parameter]:
        return self.layer.endings()

    @classmethod
    def grown_config(cls, options: LiquidConfig, hidden_size: int, by: Growth) -> LiquidConfig:
        """The state times a factor: its entries are tiled, modes by pairs."""
        return replace(options, state_size=(options.state_size or hidden_size) * by.factor("state"))

    def growth(self, grown: Liquid, width: Lift) -> Table:
        """A tiled state follows the tiled equation: modes do not couple, and a dense A reads copies in equal shares."""
        if self.config.dynamics == "diagonal":
            state = tile(self.size // 2, grown.size // 2) * tile(2, 2)
        else:
            state = tile(self.size, grown.size)
        dynamics = self.dynamics.growth(grown.size)
        return under("dynamics", dynamics) | under("layer", self.layer.growth(width, state, grown.size))

    def flops(self, length: int) -> Flops:
        return self.dynamics.flops()

    def mix(self, x: Tensor, state: LiquidState | None, ctx: Context) -> tuple[Tensor, LiquidState | None]:
        inputs = self.layer.enter(x)
        before = self.init_state(len(x), x.device).x if state is None else state.x
        states = self.dynamics(inputs, before, ctx.dt, ctx.memo)
        y = self.layer.leave(x, inputs, states)
        if state is None:
            return y, None
        return y, LiquidState(last_real(states, x.shape[1] if ctx.mask is None else ctx.counts(x), state.x))

    def time_constants(self, x: Tensor, ctx: Context) -> Tensor:
        """tau (B, T, N, or N / 2 modes) in tokens of dt = 1; x (B, T, D) as the mixer is given it."""
        inputs, before = self.layer.enter(x), self.init_state(len(x), x.device).x
        return self.dynamics.time_constants(inputs, before, ctx.dt)

    def observe(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        """Quantiles of tau over modes and tokens, a, and what Newton's method takes for the first tokens.

        At most 64 tokens of the first row; a CPU computes them one after the other, so that Newton's method is run for
        this alone. Both its columns are 0 for dynamics that it does not serve.
        """
        x = x[:1, :_OBSERVED]
        dt = None if ctx.dt is None else ctx.dt[:1, :_OBSERVED]
        inputs, before = self.layer.enter(x), self.init_state(1, x.device).x
        tau = self.dynamics.time_constants(inputs, before, dt)
        quantiles = tau.flatten().quantile(tau.new_tensor([0.05, 0.5, 0.95]))
        values = (*quantiles.unbind(), self.dynamics.adaptations().mean(), *self.dynamics.effort(inputs, before, dt))
        return dict(zip(self.observed, values, strict=True))


#: tokens that `observe` looks at
_OBSERVED = 64


class Gated(nn.Module):
    """Linear maps in and out, and a silu gate on what leaves the state."""

    def __init__(self, config: LiquidConfig, hidden_size: int, size: int) -> None:
        super().__init__()
        # To a mode enters one number, not two: the phase is its own to choose.
        entry = [size // 2, size // 2] if config.dynamics == "diagonal" else [size]
        self.sizes = [*entry, size]
        self.project = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.out = nn.Linear(size, hidden_size, bias=False)

    def growth(self, width: Lift, state: Lift, size: int) -> Table:
        parts = [tile(part, part * size // self.sizes[-1]) for part in self.sizes[:-1]]
        return tables(
            {"project": linear(self.project, join(*parts, state), width), "out": linear(self.out, width, state)}
        )

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the dynamics read, then the gate."""
        return self.project(x).split(self.sizes, -1)

    def endings(self) -> list[nn.Parameter]:
        return list(self.out.parameters())

    def leave(self, x: Tensor, inputs: tuple[Tensor, ...], states: Tensor) -> Tensor:
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
        self.residual = nn.Parameter(torch.tensor(0.1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """B and C ~ N(0, 0.1), D = 0; the rest as the model's initialisation has it."""
        for matrix in (self.b, self.c):
            if matrix is not None:
                nn.init.normal_(matrix.weight, std=0.1)
        nn.init.zeros_(self.d.weight)
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)
        nn.init.constant_(self.residual, 0.1)

    def growth(self, width: Lift, state: Lift, size: int) -> Table:
        old, once = len(self.state_norm.weight), tile(1, 1)
        inner, wide = tile(2 * old, 2 * size), width * tile(2, 2)
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
                "adapt.3": linear(self.adapt[3], tile(old // 2, size // 2), inner),
            }
        return tables(table) | {"scale": Grows(width), "shift": Grows(width), "residual": Grows()}

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the dynamics read, then u."""
        u = F.gelu(self.entry_norm(self.entry(x)))
        return (u, u) if self.b is None else (self.b(u), self.adapt(u), u)

    def endings(self) -> list[nn.Parameter]:
        return [*self.down.parameters(), self.residual]

    def leave(self, x: Tensor, inputs: tuple[Tensor, ...], states: Tensor) -> Tensor:
        states = states.to(x.dtype)
        y = self.scale * (self.c(self.state_norm(states)) + self.d(inputs[-1])) + self.shift
        y = y * self.gate(states)
        y = self.down(self.dropout(F.gelu(self.up_norm(self.up(y)))))
        return y + self.residual * x
