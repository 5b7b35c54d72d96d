"""The residual block: a mixer along time, then a multi-layer perceptron at each position.

    pre:          x <- x + s mixer(norm(x));                     x <- x + mlp(norm'(x))
    post:         x <- norm(x + s mixer(x));                     x <- norm'(x + mlp(x))
    post-shared:  x <- norm(x + s mixer(norm(x)));               x <- norm'(x + mlp(x))

s is 1, or a learned number (`mixer_scale`). `post-shared` is the Minimal Transformer's block, whose first norm serves
twice; `post` without an MLP is the Continuous Transformer's. With `conv_width` W > 1 a causal depthwise convolution
stands before the mixer, whatever the mixer is; its taps count tokens, whatever the time between them.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from glissando.config import options
from glissando.errors import ConfigError
from glissando.kernels.complex_norm import complex_norm
from glissando.kernels.rms_norm import rms_norm
from glissando.kernels.short_conv import next_past, short_conv
from glissando.kernels.swiglu import swiglu
from glissando.mixers import EMPTY, Context, Mixer, Signal, method_of
from glissando.state import State
from glissando.widening import Grows, Lift, Table, grow_norm, join, linear, tables, tile, under

Share = Annotated[float, Field(ge=0, lt=1)]


#: gain only; gain and bias; pairs as complex numbers, no parameters
Norm = Literal["rms", "layer", "complex"]


@options
class MLPConfig:
    """Options of the MLP.

    kind    activation; `none`: no MLP
    hidden  hidden width; None: 4 D, or 8 D / 3 rounded up to a multiple of 8 for swiglu
    bias    whether the linear maps have biases
    """

    kind: Literal["swiglu", "gelu", "relu", "relu2", "none"] = "swiglu"
    hidden: PositiveInt | None = None
    bias: bool = False


@options
class BlockConfig:
    """Options of every residual block.

    order          position of the norms, see glissando.block
    mixer_scale    initial value of a learned factor of the mixer's output; None: no factor
    conv_width     width of the causal convolution before the mixer; 0: none
    mixer_dropout  dropout of the mixer's output
    mlp_dropout    dropout of the MLP's output
    """

    order: Literal["pre", "post", "post-shared"] = "pre"
    mixer_scale: float | None = None
    conv_width: Annotated[int, Field(ge=0)] = 0
    mixer_dropout: Share = 0.0
    mlp_dropout: Share = 0.0
    mlp: MLPConfig = field(default_factory=MLPConfig)

    def __post_init__(self) -> None:
        if self.conv_width == 1:
            raise ConfigError("block.conv_width is 0 (none) or at least 2, got 1")
        mlp = self.mlp
        if mlp.kind == "none" and (mlp.hidden is not None or mlp.bias or self.mlp_dropout):
            raise ConfigError(
                "block.mlp.kind is `none`, so that block.mlp.hidden, block.mlp.bias and block.mlp_dropout do nothing; "
                f"leave them out (got {mlp.hidden}, {mlp.bias}, {self.mlp_dropout})"
            )


class RMSNorm(nn.Module):
    """glissando.kernels.rms_norm with a learned gain."""

    eps = 1e-6

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ComplexNorm(nn.Module):
    """glissando.kernels.complex_norm: the mean of the complex numbers taken off, their mean square made one."""

    eps = 1e-6

    def __init__(self, size: int) -> None:
        super().__init__()
        if size % 2:
            raise ConfigError(f"model.norm `complex` reads pairs of numbers and needs an even width, got {size}")

    def forward(self, x: Tensor) -> Tensor:
        return complex_norm(x, self.eps)


def build_norm(norm: Norm, size: int) -> nn.Module:
    """The norm of `size` features."""
    return {"rms": RMSNorm, "layer": nn.LayerNorm, "complex": ComplexNorm}[norm](size)


def mlp_hidden(config: MLPConfig, size: int) -> int:
    """F: the hidden width of an MLP for `size` features."""
    return config.hidden or (-(-8 * size // 24) * 8 if config.kind == "swiglu" else 4 * size)


class MLP(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: MLPConfig, size: int) -> None:
        super().__init__()
        self.kind = config.kind
        gated = config.kind == "swiglu"
        hidden = mlp_hidden(config, size)
        self.up = nn.Linear(size, hidden * (2 if gated else 1), bias=config.bias)
        self.down = nn.Linear(hidden, size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            h = swiglu(h)
        elif self.kind == "gelu":
            h = F.gelu(h)
        else:
            h = F.relu(h) if self.kind == "relu" else F.relu(h).square()
        return self.down(h)

    def growth(self, grown: MLP, width: Lift) -> Table:
        hidden = tile(self.down.in_features, grown.down.in_features)
        up = join(hidden, hidden) if self.kind == "swiglu" else hidden
        return tables({"up": linear(self.up, up, width), "down": linear(self.down, width, hidden)})


class ShortConv(nn.Module):
    """glissando.kernels.short_conv, started as the identity so that depth trains from the first step."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.weight[:, -1] += 1.0

    def init_state(self, batch_size: int, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
        size, width = self.weight.shape
        like = self.weight  # not new_zeros of it: a sharded weight's would be sharded
        return torch.zeros(batch_size, width - 1, size, device=device or like.device, dtype=dtype or like.dtype)

    def forward(self, x: Tensor, past: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        y = short_conv(x, self.weight, None if past is None else past.to(x.dtype))
        if past is None:
            return y, None
        return y, next_past(x, past, None if ctx.mask is None else ctx.counts(x)).to(past.dtype)


def _dropout(share: float) -> nn.Module:
    """Nothing where nothing is dropped: a call in vain costs 4 microseconds a decoded token."""
    return nn.Dropout(share) if share else nn.Identity()


class BlockState(NamedTuple):
    conv: Tensor | None  # (B, W - 1, D): the convolution's last inputs
    mixer: State


def require_mixed(mixer: Mixer, x: Tensor, mixed: Any) -> None:
    """Raise ConfigError unless `mixed`, what a mixer of one's own made of x, is (y, state) with y of the shape of x."""
    name, shape = type(mixer).__name__, tuple(x.shape)
    if not isinstance(mixed, tuple) or len(mixed) != 2 or not isinstance(mixed[0], Tensor):
        got = f"a {type(mixed).__name__}" + (f" of {len(mixed)}" if isinstance(mixed, tuple) else "")
    elif mixed[0].shape != x.shape:
        got = f"y of the shape {tuple(mixed[0].shape)}"
    else:
        return
    raise ConfigError(
        f"forward of the mixer {name} must return (y, state) with y of the shape of its input, {shape}, got {got}; "
        f"glissando.testing.check_mixer({name}) tests what else is expected of it"
    )


class Block(nn.Module):
    """One mixer and one MLP with their norms and residuals; obeys the mixers' contract."""

    def __init__(self, config: BlockConfig, norm: Norm, mixer: Mixer, hidden_size: int) -> None:
        super().__init__()
        self.order = config.order
        self.hidden_size = hidden_size
        self.mixer_norm = build_norm(norm, hidden_size)
        self.conv = ShortConv(hidden_size, config.conv_width) if config.conv_width else None
        self.mixer = mixer
        self.checks_mixer = not type(mixer).__module__.startswith("glissando.")
        self.starting_scale = scale = config.mixer_scale
        self.mixer_scale = None if scale is None else nn.Parameter(torch.full((1,), float(scale)))
        has_mlp = config.mlp.kind != "none"
        self.mlp_norm = build_norm(norm, hidden_size) if has_mlp else None
        self.mlp = MLP(config.mlp, hidden_size) if has_mlp else None
        self.mixer_dropout, self.mlp_dropout = _dropout(config.mixer_dropout), _dropout(config.mlp_dropout)

    def reset_parameters(self) -> None:
        if self.mixer_scale is not None and self.starting_scale is not None:
            nn.init.constant_(self.mixer_scale, self.starting_scale)

    @property
    def accepts(self) -> frozenset[Signal]:
        return self.mixer.accepts

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> BlockState:
        conv = None if self.conv is None else self.conv.init_state(batch_size, device, dtype)
        return BlockState(conv, self.mixer.init_state(batch_size, device, dtype))

    def growth(self, grown: Block, width: Lift) -> Table:
        """How its parameters go into those of `grown`. Raises ConfigError if that has another mixer."""
        if type(self.mixer) is not type(grown.mixer):
            raise ConfigError(
                f"grow: where a {type(self.mixer).__name__} stood there would be a {type(grown.mixer).__name__}, as "
                "model.mixer alternates and the layer gets another number: add as many layers as keep the order"
            )
        table = tables(
            {
                "mixer_norm": grow_norm(self.mixer_norm, width),
                "mixer": method_of(self.mixer, "growth", "grow")(grown.mixer, width),
                "mlp_norm": {} if self.mlp_norm is None else grow_norm(self.mlp_norm, width),
                "mlp": {} if self.mlp is None or grown.mlp is None else self.mlp.growth(grown.mlp, width),
            }
        )
        if self.conv is not None:
            taps = self.conv.weight.shape[1]
            table |= under("conv", {"weight": Grows(width, tile(taps, taps))})
        return table if self.mixer_scale is None else table | {"mixer_scale": Grows(tile(1, 1))}

    def can_be_identity(self) -> bool:
        """Whether the block is the identity once its last projections are 0: x + 0 is x, and norm(x + 0) is not."""
        return self.order == "pre" and bool(self.mixer.silenced())

    @torch.no_grad()
    def begin_after(self, old: list[Block]) -> None:
        """Make a new block the identity where it can be (others have a gate), with what only one of the trained `old`
        ones knows. The parameters set to 0 get gradients all the same, and all others do once these have moved."""
        like = next((other.mixer for other in old if type(other.mixer) is type(self.mixer)), None)
        if like is not None:
            self.mixer.begin_like(like)
        if self.can_be_identity():
            for parameter in (*self.mixer.silenced(), *([] if self.mlp is None else self.mlp.down.parameters())):
                parameter.zero_()

    def forward(
        self, x: Tensor, state: BlockState | None = None, ctx: Context | None = None, *, residual: bool = True
    ) -> tuple[Tensor, BlockState | None]:
        """x (B, T, D) -> (B, T, D) and the state after it; None in, None out.

        residual  False: mixer(norm(x)) + mlp(norm'(x)), both of the same x, the field of a flow; for the order `pre`
        """
        ctx = ctx or EMPTY
        past, inner = (None, None) if state is None else state
        if state is not None and (past is None) != (self.conv is None):
            raise ValueError("a state with a convolution's past, or without, as this block has none, or one")
        y = x if self.order == "post" else self.mixer_norm(x)
        if self.conv is not None:
            y, past = self.conv(y, past, ctx)
        mixed = self.mixer(y, inner, ctx)
        if self.checks_mixer:
            require_mixed(self.mixer, y, mixed)
        y, inner = mixed
        if self.mixer_scale is not None:
            y = y * self.mixer_scale[0]
        y = self.mixer_dropout(y)
        after = None if state is None else BlockState(past, inner)
        if residual:
            x = y = x + y if self.order == "pre" else self.mixer_norm(x + y)
        if self.mlp is None or self.mlp_norm is None:
            return y, after
        if self.order != "pre":
            return self.mlp_norm(y + self.mlp_dropout(self.mlp(y))), after
        return y + self.mlp_dropout(self.mlp(self.mlp_norm(x))), after
