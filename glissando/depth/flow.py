"""Flow depth: some blocks, then a differential equation over depth, then the other blocks.

    dH/dtau = alpha F(H, tau, u),   tau in [0, 1]
    h = H + e(tau) + W u + b;       F = mixer(norm(h)) + mlp(norm'(h))

With `shortcuts` h = H + e(tau) + W u + b + c x_0 / rms(x_0), x_0 the depth's input, and each block before and after the
flow is preceded by x <- x + c_s x_0 / rms(x_0) (glissando/depth/base.py).

e is a small network of tau; u the control, (B, C) or (B, T, C), whose term is absent where no control is given, and is
not where u = 0. alpha is learned. The grid is fixed: no step size depends on other tokens or other rows.

State: one mixer state for every evaluation of F, beside those of the blocks.

Neural ODEs: Chen et al. 2018, arXiv 1806.07366.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from glissando.config import options, recorded, starting
from glissando.depth.base import (
    BlockFactory,
    Depth,
    DepthOptions,
    accepted_by_blocks,
    apply_blocks,
    blocks_growth,
    new_shortcuts,
    register_depth,
    shortcut_source,
    shortcuts_growth,
)
from glissando.depth.solvers import TABLEAUS, evaluations, integrate, tableau_of
from glissando.errors import ConfigError
from glissando.kernels.plain import plain
from glissando.mixers import EMPTY, Context, Picture, Signal
from glissando.widening import Grows, Growth, Lift, Table, append, linear, tables, tile, under

#: called with (tau, alpha F) at every evaluation of the field
Watcher = Callable[[float, Tensor], None]


@options
class FlowConfig(DepthOptions):
    """Options of the `flow` depth.

    layers     blocks around the flow, half of them (rounded down) before it
    n_steps    number of steps of the solver
    control    names of the control's dimensions; empty: no control
    control_trained  set by training: whether labels have trained the control; if not, dials cannot be turned
    method     euler, midpoint, heun or rk4
    alpha      initial speed of the flow
    shortcuts  the embedding is added before each block and in the field, with D learned weights each that start at 0
    """

    n_steps: PositiveInt | None = None
    control: list[str] = field(default_factory=list)
    control_trained: bool | None = recorded(default=None)
    method: str = "euler"
    alpha: float = starting(default=0.1, of="depth.alpha")
    shortcuts: bool = False

    def __post_init__(self) -> None:
        tableau_of(self.method)
        if len(set(self.control)) < len(self.control):
            raise ConfigError(f"depth.control names a dimension twice: {self.control}; give each a name of its own")


class FlowState(NamedTuple):
    before: tuple
    flow: tuple  # one for each evaluation, in their order
    after: tuple


@register_depth("flow", FlowConfig)
class FlowDepth(Depth):
    """`layers` blocks, half of them (rounded down) before a flow of `n_steps` steps and the others after it."""

    undecayed = ("shortcuts",)

    def __init__(self, config: FlowConfig, make_block: BlockFactory) -> None:
        super().__init__()
        if config.n_steps is None:
            raise ConfigError("a flow needs depth.n_steps, the number of its steps, at least 1")
        self.config, self.n_steps = config, config.n_steps
        half = config.layers // 2
        self.before = nn.ModuleList(make_block(i) for i in range(half))
        self.field = make_block(half)
        if self.field.order != "pre":
            raise ConfigError(f"the blocks of a flow are block.order `pre`, got {self.field.order!r}")
        self.after = nn.ModuleList(make_block(i + 1) for i in range(half, config.layers))
        size = self.field.hidden_size
        self.time = nn.Sequential(nn.Linear(1, size), nn.SiLU(), nn.Linear(size, size))
        self.control = nn.Linear(len(config.control), size) if config.control else None
        self.alpha = nn.Parameter(torch.full((1,), float(config.alpha)))
        #: a row for each block before the flow, one for the field, and one for each block after it
        self.shortcuts = new_shortcuts(config.shortcuts, config.layers + 1, size)
        #: what the flow ends with, H(1), passes through it: a place for hooks
        self.end = nn.Identity()
        self.gradient_checkpointing = False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """W ~ U(-1/sqrt(C), 1/sqrt(C)), as published: near 0 neither W nor what reads it learns, as each waits for the
        other. u = 0 does not see W."""
        nn.init.constant_(self.alpha, self.config.alpha)
        if self.control is not None:
            bound = self.control.in_features**-0.5
            nn.init.uniform_(self.control.weight, -bound, bound)
        if self.shortcuts is not None:
            nn.init.zeros_(self.shortcuts)

    @property
    def accepts(self) -> frozenset[Signal]:
        signals: set[Signal] = set() if self.control is None else {"control"}
        return accepted_by_blocks(self) | signals

    @property
    def n_evaluations(self) -> int:
        """How often the field is evaluated in one pass."""
        return evaluations(self.config.method, self.n_steps)

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> FlowState:
        def states(blocks: Any) -> tuple:
            return tuple(block.init_state(batch_size, device, dtype) for block in blocks)

        return FlowState(states(self.before), states([self.field] * self.n_evaluations), states(self.after))

    def applications(self) -> list[tuple[Any, int]]:
        return [(self.field, self.n_evaluations), *((block, 1) for block in (*self.before, *self.after))]

    def grow(self, options: FlowConfig, by: Growth) -> FlowConfig:
        if by.steps:
            raise ConfigError(
                f"{by.steps} more steps of a solver are another approximation of the flow and cannot be exact; "
                "generate and evaluate with another --depth.n_steps, or add layers"
            )
        if by.layers and not self.field.can_be_identity():
            raise ConfigError(
                "a new layer starts as the identity with a last projection of 0, and the mixer of this flow has "
                "no such projection; grow the width instead"
            )
        return replace(options, layers=options.layers + by.layers)

    def growth(self, grown: FlowDepth, width: Lift) -> Table:
        first, _, second = self.time
        table = under("field", self.field.growth(grown.field, width))
        table |= tables({"time.0": linear(first, width, tile(1, 1)), "time.2": linear(second, width, width)})
        table |= blocks_growth(self.before, grown.before, width, "before")
        table |= blocks_growth(self.after, grown.after, width, "after")
        before, after = append(len(self.before), len(grown.before)), append(len(self.after), len(grown.after))
        table |= shortcuts_growth(self.shortcuts, before, tile(1, 1), after, width=width)
        if self.control is not None:
            controls = self.control.in_features
            table |= under("control", linear(self.control, width, tile(controls, controls)))
        return table | {"alpha": Grows(tile(1, 1))}

    def picture(self, compute: Callable[[], object]) -> Picture:
        """How fast a token moves through depth at each evaluation of the field."""
        rows: list[str] = []
        values: list[Tensor] = []

        def watch(depth: float, slope: Tensor) -> None:
            rows.append(f"depth {depth:.2f}")
            values.append(slope[0].norm(dim=-1))

        hook = self.register_forward_pre_hook(lambda _, x, options: (x, options | {"watch": watch}), with_kwargs=True)
        try:
            compute()
        finally:
            hook.remove()
        about = (
            "How fast each token's state changes at each evaluation of the ODE, |dH/dδ|. Columns that stand out are "
            "the tokens that depth changes most; rows that do are the depths that do most of the work."
        )
        return Picture("trajectory", "Speed over depth", about, "", True, torch.stack(values), tuple(rows))

    def lower(self, builder: Any, x: int, control: int | None) -> tuple[int, Any]:
        size, tableau, step_size = self.field.hidden_size, TABLEAUS[self.config.method], 1 / self.n_steps
        term = None
        if control is not None and self.control is not None:
            term = builder.linear(self.control.weight, self.control.bias, control)
        flow, source, half = [], x, len(self.before)
        x, before = builder.blocks(self.before, x, self.shortcuts, source)
        alpha = float(self.alpha)
        shortcut = None if self.shortcuts is None else builder.shortcut(self.shortcuts[half], source)

        def combined(start: int, weights: Any, slopes: list[int]) -> int:
            for weight, slope in zip(weights, slopes, strict=True):
                start = start if weight == 0 else builder.add(start, slope, size, step_size * weight * alpha)
            return start

        for step in range(self.n_steps):
            slopes: list[int] = []
            for row, share in zip(tableau.a, tableau.c, strict=True):
                time = self.time(self.alpha.new_full((1,), (step + share) * step_size))
                at = builder.shifted(combined(x, row, slopes), time)
                at = at if term is None else builder.add(at, term, size)
                at = at if shortcut is None else builder.add(at, shortcut, size)
                slope, state = builder.block(self.field, at, residual=False)
                slopes.append(slope)
                flow.append(state)
            x = combined(x, tableau.b, slopes)
        x, after = builder.blocks(self.after, x, self.shortcuts, source, half + 1)
        return x, FlowState(before, tuple(flow), after)

    def forward(
        self, x: Tensor, state: FlowState | None = None, ctx: Context | None = None, watch: Watcher | None = None
    ) -> tuple[Tensor, FlowState | None]:
        """As every depth; `watch` is shown every evaluation."""
        ctx = ctx or EMPTY
        inner = ctx.without("control")
        past = FlowState((None,) * len(self.before), (), (None,) * len(self.after)) if state is None else state
        source, half = shortcut_source(self.shortcuts, x), len(self.before)
        x, before = apply_blocks(map(self.run, self.before), x, past.before, inner, self.shortcuts, source)
        # Arguments of the field: the control as (B, 1 or T, C), dt, and the shortcut (B, T, D).
        signals: dict[str, Tensor] = {}
        if ctx.control is not None and self.control is not None:
            if ctx.control.shape[-1] != self.control.in_features:
                raise ConfigError(
                    f"this model has {self.control.in_features} control dimensions, and was given "
                    f"{ctx.control.shape[-1]}"
                )
            signals["control"] = (ctx.control if ctx.control.ndim == 3 else ctx.control.unsqueeze(1)).to(x.dtype)
        elif self.control is not None and torch.is_grad_enabled() and not plain():
            x = _beside(x, self.control.weight, self.control.bias)
        if ctx.dt is not None:
            signals["dt"] = ctx.dt
        if self.shortcuts is not None and source is not None:
            signals["shortcut"] = self.shortcuts[half] * source
        field = FlowField(self, inner.without("dt"), tuple(signals), None if state is None else iter(state.flow), watch)
        x = self.solve(field, x, tuple(signals.values()))
        if state is not None and len(field.after) != len(state.flow):
            raise ValueError(f"a state of {len(state.flow)} evaluations was given to a flow of {len(field.after)}")
        x = self.end(x)
        ctx.keep(x)
        rest = None if self.shortcuts is None else self.shortcuts[half + 1 :]
        x, after = apply_blocks(map(self.run, self.after), x, past.after, inner, rest, source)
        return x, None if state is None else FlowState(before, tuple(field.after), after)

    def solve(self, field: FlowField, h: Tensor, args: tuple[Tensor, ...]) -> Tensor:
        """H at tau = 1, from H at tau = 0. A field that keeps states is evaluated once at each time."""
        again = self.gradient_checkpointing and field.states is None
        return integrate(field, h, args=args, n_steps=self.n_steps, method=self.config.method, checkpointed=again)


@torch.library.custom_op("glissando::beside", mutates_args=())
def _beside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x, in whose graph a weight and a bias take part without a gradient: their `grad` stays None, and
    DistributedDataParallel, which waits for that of every parameter, reduces those of all others."""
    return x.clone()


@_beside.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


_beside.register_autograd(lambda ctx, gradient: (gradient, None, None))


@dataclass
class FlowField:
    """alpha F(H, tau, u) for one call of the model; with `states`, each evaluation takes one and leaves one in `after`.

    ctx    without the signals `names`, which come as arguments in this order
    """

    depth: FlowDepth
    ctx: Context
    names: tuple[str, ...]
    states: Iterator[Any] | None
    watch: Watcher | None
    after: list[Any] = field(default_factory=list)

    def __call__(self, tau: float, h: Tensor, *args: Tensor) -> Tensor:
        signals = dict(zip(self.names, args, strict=True))
        depth, ctx = self.depth, replace(self.ctx, dt=signals.get("dt"))
        at = h + depth.time(h.new_full((1,), tau))
        if depth.control is not None and "control" in signals:
            at = at + depth.control(signals["control"])
        if "shortcut" in signals:
            at = at + signals["shortcut"]
        slope, state = depth.field(at, None if self.states is None else next(self.states), ctx, residual=False)
        if self.states is not None:  # a compiled step that is computed again may change nothing outside
            self.after.append(state)
        slope = depth.alpha[0] * slope
        if self.watch is not None:
            self.watch(tau, slope)
        return slope
