"""The two dynamics of the liquid mixer; see glissando/mixers/liquid/layer.py for their equations.

Each reads `inputs`, what a layer made of the tokens, and a state (B, N), and returns the state after every token (B, T,
N).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from glissando.config import options, starting
from glissando.errors import ConfigError, Refused
from glissando.kernels.compiled import use_numba
from glissando.mixers.base import Memo, require_time
from glissando.mixers.liquid.scan import Modes, Packed, liquid, pack, time_constants
from glissando.mixers.liquid.zero_order_hold import discretize, hippo_legs, legs_modes
from glissando.mixers.memory import starting_turns
from glissando.precision import upcast, without_autocast
from glissando.widening import Grows, Reads, Table, grow_norm, join, linear, tables, tile

Positive = Annotated[float, Field(gt=0)]


@options
class LiquidConfig:
    """Options of the `liquid` mixer.

    dynamics          `diagonal` or `dense`, see glissando/mixers/liquid/layer.py
    state_size        N real numbers, two for each mode of `diagonal`; None: hidden_size
    layer             the layer around the dynamics: `gated` or `published`
    state_dependence  tau depends on the state, and not only on the input
    input             with dt: `held` over it, or an `impulse`: the state ages over dt and then takes the input with the
                      strength of dt = 1
    adaptation        initial range in which tau may change, between 0.001 and 0.999
    steps             diagonal: initial steps of the modes are spread logarithmically from the first to the second;
                      None: [0.001, 0.1]
    coupled           diagonal: divide the input by tau, as in a liquid time-constant cell
    turns             diagonal: initial frequencies of the modes, from HiPPO-LegS (`legs`, or None) or `matched` to the
                      steps: high where they decay fast
    dropout           published layer: dropout before its last matrix
    """

    dynamics: Literal["diagonal", "dense"] = "diagonal"
    state_size: PositiveInt | None = None
    layer: Literal["gated", "published"] = "gated"
    state_dependence: bool = True
    input: Literal["held", "impulse"] = "held"
    adaptation: Annotated[float, Field(gt=0.001, lt=0.999)] = starting(default=0.1, of="raw_adaptation")
    steps: tuple[Positive, Positive] | None = starting(default=None, of="log_step")
    coupled: bool | None = None
    turns: Literal["legs", "matched"] | None = starting(default=None, of="dynamics.turn")
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ConfigError(f"liquid.steps must be two numbers in order, got {list(self.steps)}")
        for name in ("steps", "coupled", "turns"):
            if self.dynamics != "diagonal" and getattr(self, name) is not None:
                raise ConfigError(
                    f"liquid.{name} is of diagonal dynamics, and liquid.dynamics is `{self.dynamics}`; leave it out"
                )
        if self.layer == "gated" and self.dropout:
            raise ConfigError(
                f"liquid.dropout {self.dropout} is of the published layer; leave it out, or see block.*_dropout"
            )


#: tau0 and a stay within these
_TAU, _ADAPT = (0.01, 10.0), (0.001, 0.999)

#: time after which no mode keeps anything, and whose products with rates are finite in float32
_AT_REST = 1e30


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


class _Adaptive(nn.Module):
    """tau0 and a, kept within their bounds by smooth maps, so that no gradient is cut."""

    def __init__(self, config: LiquidConfig, taus: int, adaptations: int) -> None:
        super().__init__()
        self.config = config
        self.raw_tau = nn.Parameter(torch.empty(taus))
        self.raw_adaptation = nn.Parameter(torch.empty(adaptations))

    @torch.no_grad()
    def _reset(self) -> None:
        low, high = _TAU
        self.raw_tau.fill_(_logit(math.log(1 / low) / math.log(high / low)))  # tau0 = 1
        low, high = _ADAPT
        self.raw_adaptation.fill_(_logit((self.config.adaptation - low) / (high - low)))

    def taus(self) -> Tensor:
        """tau0, at least float32."""
        low, high = _TAU
        return low * (high / low) ** torch.sigmoid(upcast(self.raw_tau))

    def adaptations(self) -> Tensor:
        """a, at least float32."""
        low, high = _ADAPT
        return low + (high - low) * torch.sigmoid(upcast(self.raw_adaptation))


class Diagonal(_Adaptive):
    """N / 2 complex modes; inputs: the drive, (B, T, N) as pairs or (B, T, N / 2) as reals, and z (B, T, N / 2)."""

    #: a mode's own numbers, not matrices
    undecayed = ("state_weights",)

    def __init__(self, config: LiquidConfig, size: int) -> None:
        super().__init__(config, size // 2, size // 2)
        self.log_decay, self.turn, self.log_step = (nn.Parameter(torch.empty(size // 2)) for _ in range(3))
        self.bias = nn.Parameter(torch.empty(size // 2))
        self.state_weights = nn.Parameter(torch.empty(size // 2, 2)) if config.state_dependence else None

    @torch.no_grad()
    def initialize(self) -> None:
        n, (low, high) = len(self.turn), self.config.steps or (1e-3, 1e-1)
        self._reset()
        nn.init.zeros_(self.bias)
        steps = torch.logspace(math.log10(low), math.log10(high), n)
        nn.init.constant_(self.log_decay, math.log(0.5))
        if self.config.turns == "matched":
            turn = starting_turns(1 / (1.5 * steps)) / steps
        else:
            turn, steps = legs_modes(2 * n).imag, steps[torch.randperm(n)]
        self.turn.copy_(turn)
        self.log_step.copy_(steps.log())
        if self.state_weights is not None:
            nn.init.normal_(self.state_weights, std=0.1)

    def flops(self) -> tuple[float, float]:
        """A mode's state and its input, each times a complex number."""
        return 0.0, 16.0 * len(self.turn)

    def growth(self, size: int) -> Table:
        n = tile(len(self.turn), size // 2)
        names = ("raw_tau", "raw_adaptation", "log_decay", "turn", "log_step", "bias")
        table: Table = {name: Grows(n) for name in names}
        return table if self.state_weights is None else table | {"state_weights": Grows(n, tile(2, 2))}

    def modes(self) -> Modes:
        weights = None if self.state_weights is None else upcast(self.state_weights)
        decay, step = upcast(self.log_decay).exp(), upcast(self.log_step).exp()
        return Modes(decay, upcast(self.turn), step, self.taus(), self.adaptations(), weights)

    def forward(
        self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None, memo: Memo | None = None
    ) -> Tensor:
        b, z, before, dt = self._arguments(inputs, before, dt)
        with without_autocast(z.device.type):
            modes, packed = self._given(memo)
            impulse = self.config.input == "impulse"
            x = liquid(b, z, modes, before, dt, bool(self.config.coupled), packed=packed, impulse=impulse)
        return x.flatten(2)

    def _arguments(
        self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """b, z, x0 and dt of glissando.mixers.liquid.scan."""
        n, b, z = len(self.turn), upcast(inputs[0]), upcast(inputs[1]) + upcast(self.bias)
        b = b if b.shape[-1] == n else b.unflatten(-1, (n, 2))
        if dt is not None:
            dt = dt.clamp_max(_AT_REST).to(z.dtype)
        return b, z, before.unflatten(-1, (n, 2)).to(z.dtype), dt

    def _given(self, memo: Memo | None) -> tuple[Modes, Packed | None]:
        """What follows from the weights alone."""
        if memo is None:
            return self.modes(), None
        if self not in memo:
            modes = self.modes()
            memo[self] = modes, pack(modes) if use_numba("liquid", "auto", modes.step) else None
        return memo[self]

    @torch.no_grad()
    def time_constants(self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None) -> Tensor:
        """tau / step (B, T, N / 2): in units of dt."""
        x = self(inputs, before, dt).unflatten(-1, (-1, 2))
        _, z, start, _ = self._arguments(inputs, before, dt)
        modes = self.modes()
        return time_constants(z, torch.cat([start.unsqueeze(1), x[:, :-1]], 1), modes) / modes.step


class Dense(_Adaptive):
    """A full matrix; inputs: u (B, T, N). One matrix exponential of size N + 1 a token, one token after the other."""

    def __init__(self, config: LiquidConfig, size: int) -> None:
        super().__init__(config, size, 1)
        self.size = size
        self.a, self.b = (nn.Parameter(torch.empty(size, size)) for _ in range(2))
        seen = 2 * size if config.state_dependence else size
        self.adapt = nn.Sequential(
            nn.Linear(seen, 2 * size), nn.LayerNorm(2 * size), nn.Tanh(), nn.Linear(2 * size, size), nn.Tanh()
        )

    def flops(self) -> tuple[float, float]:
        """B u and the step, and a matrix exponential: five products for its polynomial, and about three squarings."""
        n = self.size
        return 4.0 * n * n, 8 * 2.0 * (n + 1) ** 3

    def growth(self, size: int) -> Table:
        n, inner = tile(self.size, size), tile(2 * self.size, 2 * size)
        network = {
            "adapt.0": linear(self.adapt[0], inner, join(n, n) if self.config.state_dependence else n),
            "adapt.1": grow_norm(self.adapt[1], inner),
            "adapt.3": linear(self.adapt[3], n, inner),
        }
        # The difference of two copies of x then decays by 1 / tau alone, whatever A is. With noise N its rates would be
        # those of N, which at the published size multiply rounding by exp(22) a token.
        matrices: Table = {"a": Grows(n, Reads(n, equal=True)), "b": Grows(n, Reads(n))}
        return matrices | tables(network) | {"raw_tau": Grows(n), "raw_adaptation": Grows(tile(1, 1))}

    def export_form(self, capacity: int) -> nn.Module:
        raise Refused(
            "mixer `liquid` with mixer.dynamics `dense` cannot be exported: it needs a matrix exponential a token, "
            "which no runtime has. Train one with mixer.dynamics diagonal"
        )

    @torch.no_grad()
    def initialize(self) -> None:
        """A = 0.1 HiPPO-LegS, B ~ N(0, 0.1)."""
        self._reset()
        self.a.copy_(0.1 * hippo_legs(self.size)[0])
        nn.init.normal_(self.b, std=0.1)

    def forward(
        self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None, memo: Memo | None = None
    ) -> Tensor:
        """Nothing goes into `memo`: every matrix depends on a token."""
        return self._run(inputs, before, dt)[0]

    @torch.no_grad()
    def time_constants(self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None) -> Tensor:
        """tau (B, T, N): in units of dt."""
        return self._run(inputs, before, dt)[1]

    def _run(self, inputs: tuple[Tensor, ...], before: Tensor, dt: Tensor | None) -> tuple[Tensor, Tensor]:
        u = inputs[0]
        with without_autocast(u.device.type):
            entry = upcast(u) @ upcast(self.b).T
        x = before.to(entry.dtype)
        if dt is not None:
            require_time(dt)
        times = u.new_ones(1, 1).expand(u.shape[:2]) if dt is None else dt.clamp_max(_AT_REST)
        states, taus = [], []
        for now, drive, time in zip(u.unbind(1), entry.unbind(1), times.unbind(1), strict=True):
            seen = torch.cat([x.to(u.dtype), now], -1) if self.config.state_dependence else now
            taus.append(self.taus() * (1 + self.adaptations() * upcast(self.adapt(seen))))
            x = self._advance(x, drive, taus[-1], time.to(x.dtype))
            states.append(x)
        return torch.stack(states, 1), torch.stack(taus, 1)

    def _advance(self, x: Tensor, drive: Tensor, tau: Tensor, time: Tensor) -> Tensor:
        """exp(dt [[A - 1/tau, B u], [0, 0]]) [x, 1]: the input is held, and A may be singular. An impulse adds what
        the held input adds at dt = 1."""
        with without_autocast(x.device.type):
            rates = upcast(self.a) - torch.diag_embed(1 / tau)
            kept, added = discretize(rates, drive.unsqueeze(-1), time)
            if self.config.input == "impulse":
                added = discretize(rates, drive.unsqueeze(-1), 1.0)[1]
            return (kept @ x.unsqueeze(-1) + added).squeeze(-1)
