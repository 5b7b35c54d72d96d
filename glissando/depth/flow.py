"""Flow depth: some blocks, then a differential equation over depth, then the other blocks.

    dH/dtau = alpha F(H, tau, u),   tau in [0, 1]
    h = H + e(tau) + W u + b;       F = mixer(norm(h)) + mlp(norm'(h))

e is a small network of tau; u the control, (B, C) or (B, T, C), whose term is absent where no control is given, and is
not where u = 0. alpha is learned. The grid is fixed: no step size depends on other tokens or other rows. With a
`tolerance` a token may halt on it, see glissando.depth.halting.

State: one mixer state for every evaluation of F, beside those of the blocks.

Neural ODEs: Chen et al. 2018, arXiv 1806.07366.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.block import Block
from glissando.config import check_choices, starting
from glissando.depth.base import BlockFactory, Depth, begin_blocks
from glissando.depth.halting import EvaluationCount, unroll_halting
from glissando.depth.solvers import TABLEAUS, Backward, evaluations, integrate, unroll
from glissando.errors import ConfigError, unknown_name
from glissando.lifts import Grows, Lift, Table, linear, tables, tile, under
from glissando.mixers import EMPTY, Context, Signal

if TYPE_CHECKING:
    from glissando.depth import DepthConfig
    from glissando.growth import Growth


@dataclass
class FlowConfig:
    """Options of the `flow` depth, beside depth.layers (the blocks around the flow) and depth.n_steps.

    method     euler, midpoint, heun or rk4
    backward   how gradients are computed: direct, checkpoint or reversible, see glissando.depth.solvers
    alpha      the scale of the flow at the start
    tolerance  relative error below which a token's slope is foretold and not evaluated; none: it always is
    """

    method: str = "euler"
    backward: Backward = "direct"
    alpha: float = starting(0.1, of="depth.alpha")
    tolerance: float | None = None


class FlowState(NamedTuple):
    before: tuple
    flow: tuple  # one for each evaluation, in their order
    after: tuple


class FlowDepth(Depth):
    """`layers` blocks, half of them (rounded down) before a flow of `n_steps` steps and the others after it."""

    options = frozenset({"layers", "n_steps", "control", "flow"})

    def __init__(self, config: Any, make_block: BlockFactory) -> None:
        super().__init__()
        flow = config.flow
        if flow.method not in TABLEAUS:
            raise unknown_name("depth.flow.method", flow.method, TABLEAUS)
        if config.layers < 0:
            raise ConfigError(f"depth.layers, the blocks around the flow, must be at least 0, got {config.layers}")
        if config.n_steps is None or config.n_steps < 1:
            raise ConfigError(f"a flow needs depth.n_steps, the number of its steps, at least 1; got {config.n_steps}")
        _require_options(config, flow)
        if flow.tolerance is not None and not 0 < flow.tolerance < math.inf:
            raise ConfigError(
                f"depth.flow.tolerance must be positive and finite, or absent to halt nowhere; got {flow.tolerance}"
            )
        if flow.tolerance is not None and flow.backward != "direct":
            raise ConfigError(
                f"depth.flow.tolerance needs depth.flow.backward `direct`, got {flow.backward!r}: what another mode "
                "computes again must be what was computed"
            )
        self.config, self.n_steps = flow, config.n_steps
        half = config.layers // 2
        self.before = nn.ModuleList(make_block(i) for i in range(half))
        self.field = make_block(half)
        if self.field.order != "pre":
            raise ConfigError(f"the blocks of a flow are block.order `pre`, got {self.field.order!r}")
        self.after = nn.ModuleList(make_block(i + 1) for i in range(half, config.layers))
        size = self.field.hidden_size
        self.time = nn.Sequential(nn.Linear(1, size), nn.SiLU(), nn.Linear(size, size))
        #: shown (tau, alpha F) of every evaluation of the field
        self.watcher: Callable[[float, Tensor], None] | None = None
        n_controls = len(config.control)
        self.control = nn.Linear(n_controls, size) if n_controls else None
        self.alpha = nn.Parameter(torch.tensor(float(flow.alpha)))
        #: keep every intermediate result, as a reference for the backward modes
        self.unrolled = False
        #: where it is not None, the evaluations of a flow with a tolerance are added to it
        self.count: EvaluationCount | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """W ~ U(-1/sqrt(C), 1/sqrt(C)), as published: near 0 neither W nor what reads it learns, as each waits for the
        other. u = 0 does not see W."""
        nn.init.constant_(self.alpha, self.config.alpha)
        if self.control is not None:
            bound = self.control.in_features**-0.5
            nn.init.uniform_(self.control.weight, -bound, bound)

    @property
    def honours(self) -> frozenset[Signal]:
        signals = self.field.honours
        for block in (*self.before, *self.after):
            signals = signals & block.honours
        return signals | {"control"} if self.control is not None else signals

    def grown_config(self, config: DepthConfig, by: Growth) -> DepthConfig:
        if by.steps:
            raise ConfigError(
                f"{by.steps} more steps of a solver are another approximation of the flow and cannot be exact; "
                "load the model with another depth.n_steps, or add layers"
            )
        if by.layers and not self.field.can_rest:
            raise ConfigError(
                "a new layer starts as the identity with a last projection of 0, and the mixer of this flow has "
                "no such projection; grow the width instead"
            )
        return replace(config, layers=config.layers + by.layers)

    def growth(self, grown: FlowDepth, width: Lift) -> Table:
        first, _, second = self.time
        table = tables(
            {
                "field": self.field.growth(grown.field, width),
                "time.0": linear(first, width, tile(1, 1)),
                "time.2": linear(second, width, width),
            }
        )
        for name in ("before", "after"):
            pairs = zip(getattr(self, name), getattr(grown, name), strict=False)
            for number, (old, new) in enumerate(pairs):
                table |= under(f"{name}.{number}", old.growth(new, width))
        if self.control is not None:
            dials = self.control.in_features
            table |= under("control", linear(self.control, width, tile(dials, dials)))
        return table | {"alpha": Grows()}

    def begin(self, grown: FlowDepth) -> None:
        new = (*grown.before[len(self.before) :], *grown.after[len(self.after) :])
        old = (grown.field, *grown.before[: len(self.before)], *grown.after[: len(self.after)])
        begin_blocks(new, [*old])

    def calls(self) -> list[tuple[Block, int]]:
        count = evaluations(self.config.method, self.n_steps, self.config.backward)
        around: Any = (*self.before, *self.after)
        return [(self.field, count), *((block, 1) for block in around)]

    @property
    def n_residuals(self) -> int:
        blocks = [self.field, *self.before, *self.after]
        return sum(block.n_residuals for block in blocks)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> FlowState:
        count = evaluations(self.config.method, self.n_steps, self.config.backward)

        def states(blocks: Any) -> tuple:
            return tuple(block.init_state(batch_size, device, dtype) for block in blocks)

        return FlowState(states(self.before), states([self.field] * count), states(self.after))

    def forward(
        self, x: Tensor, state: FlowState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, FlowState | None]:
        ctx = ctx or EMPTY
        inner = ctx.without("control")
        none = FlowState((None,) * len(self.before), (), (None,) * len(self.after))
        given = none if state is None else state
        x, before = _through(self.before, x, given.before, inner)
        x, flow = (self._flow(x, ctx), ()) if state is None else self._stream(x, state.flow, ctx)
        x, after = _through(self.after, x, given.after, inner)
        return x, None if state is None else FlowState(before, flow, after)

    def _flow(self, x: Tensor, ctx: Context) -> Tensor:
        signals = self._signals(ctx, x)
        field = _Field(self, ctx, signals, None)
        if self.unrolled or self.config.tolerance is not None:
            return self._unroll(field, x, signals, ctx)
        return integrate(
            field,
            x,
            args=tuple(signals.values()),
            params=[*self.field.parameters(), *self.time.parameters(), *self._control_parameters(), self.alpha],
            n_steps=self.n_steps,
            method=self.config.method,
            backward=self.config.backward,
        )

    def _stream(self, x: Tensor, states: tuple, ctx: Context) -> tuple[Tensor, tuple]:
        signals = self._signals(ctx, x)
        field = _Field(self, ctx, signals, iter(states))
        x = self._unroll(field, x, signals, ctx)
        if len(field.after) != len(states):
            raise ValueError(f"a state of {len(states)} evaluations was given to a flow of {len(field.after)}")
        return x, tuple(field.after)

    def _unroll(self, field: _Field, x: Tensor, signals: dict[Signal, Tensor], ctx: Context) -> Tensor:
        c, args = self.config, tuple(signals.values())
        if c.tolerance is None:
            reversible = c.backward == "reversible"
            return unroll(field, x, args=args, n_steps=self.n_steps, method=c.method, reversible=reversible)
        return unroll_halting(
            field,
            x,
            args=args,
            n_steps=self.n_steps,
            method=c.method,
            tolerance=c.tolerance,
            mask=ctx.mask,
            count=self.count,
        )

    def _control_parameters(self) -> list[Tensor]:
        return [] if self.control is None else list(self.control.parameters())

    def _signals(self, ctx: Context, x: Tensor) -> dict[Signal, Tensor]:
        """The control as (B, 1 or T, C) and dt, where given: arguments of the field, for gradients in every mode."""
        signals: dict[Signal, Tensor] = {}
        if ctx.control is not None and self.control is not None:
            if ctx.control.shape[-1] != self.control.in_features:
                raise ConfigError(
                    f"this model has {self.control.in_features} control dimensions, and was given "
                    f"{ctx.control.shape[-1]}"
                )
            control = ctx.control if ctx.control.ndim == 3 else ctx.control.unsqueeze(1)
            signals["control"] = control.to(x.dtype)
        if ctx.dt is not None:
            signals["dt"] = ctx.dt
        return signals


def _require_options(config: Any, flow: FlowConfig) -> None:
    check_choices(flow, "depth.flow")
    if not math.isfinite(flow.alpha):
        raise ConfigError(f"depth.flow.alpha must be a finite number, got {flow.alpha}")
    if len(set(config.control)) < len(config.control):
        raise ConfigError(f"depth.control names a dimension twice: {config.control}; give each a name of its own")
    if flow.tolerance is not None and config.n_steps < 3:
        raise ConfigError(
            f"depth.flow.tolerance needs depth.n_steps of at least 3, got {config.n_steps}: the first two steps are "
            "always evaluated"
        )


class _Field:
    """alpha F(H, tau, u) for one call of the model; with `states`, one is taken and one left by each evaluation.

    Arguments come in the order of `signals`.
    """

    def __init__(self, depth: FlowDepth, ctx: Context, signals: Iterable[Signal], states: Iterator[Any] | None) -> None:
        self.depth, self.ctx, self.states = depth, ctx.without("control", "dt"), states
        self.names = tuple(signals)
        self.after: list[Any] = []
        self.seed = _seed(depth)

    def idle(self, active: Tensor) -> bool:
        """Without a state to keep nobody listens to tokens that have all halted."""
        return self.states is None and not bool(active.any())

    def __call__(self, tau: float, h: Tensor, *args: Tensor, active: Tensor | None = None) -> Tensor:
        given = dict(zip(self.names, args, strict=True))
        depth, ctx = self.depth, replace(self.ctx, dt=given.get("dt"))
        at = h + depth.time(h.new_full((1,), tau))
        if depth.control is not None and "control" in given:
            at = at + depth.control(given["control"])
        if self.states is not None:
            slope, state = depth.field.branches(at, next(self.states), ctx, active)
            self.after.append(state)
        elif self.seed is None:
            slope, _ = depth.field.branches(at, None, ctx, active)
        else:
            slope = _seeded(self.seed, tau, h.device, lambda: depth.field.branches(at, None, ctx, active)[0])
        slope = depth.alpha * slope
        if depth.watcher is not None:
            depth.watcher(tau, slope)
        return slope


def _seed(depth: FlowDepth) -> int | None:
    """Of this call's dropout, drawn from PyTorch's generator; None where nothing is dropped.

    None too where torch.compile looks on, which cannot follow a seed, and nothing is computed again.
    """
    if torch.compiler.is_compiling() and depth.config.backward == "direct":
        return None
    drops = depth.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in depth.field.modules())
    drops = drops or (depth.training and getattr(getattr(depth.field.mixer, "config", None), "dropout", 0.0) > 0)
    return int(torch.randint(1 << 62, ())) if drops else None


def _seeded(seed: int, tau: float, device: torch.device, run: Callable[[], Tensor]) -> Tensor:
    """run() with random numbers that depend on the seed and tau alone, so that computing again draws the same."""
    # A hash, because the CPU's generator reads the low 32 bits of a seed alone, which are 0 in most tau.
    mixed = hashlib.blake2b(struct.pack("<qd", seed, tau), digest_size=7).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(mixed, "little"))
        return run()


def _through(blocks: nn.ModuleList, x: Tensor, states: tuple, ctx: Context) -> tuple[Tensor, tuple]:
    after = []
    for block, before in zip(blocks, states, strict=True):
        x, new = block(x, before, ctx)
        after.append(new)
    return x, tuple(after)
