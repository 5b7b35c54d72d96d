"""The residual block: a mixer along time, then a multi-layer perceptron at each position.

    pre:          x <- x + s mixer(norm(x));                     x <- x + mlp(norm'(x))
    post:         x <- norm(x + s mixer(x));                     x <- norm'(x + mlp(x))
    post-shared:  x <- norm(x + s mixer(norm(x)));               x <- norm'(x + mlp(x))

s is 1, or a learned number (`mixer_scale`). `post-shared` is the Minimal Transformer's block, whose first norm serves
twice; `post` without an MLP is the Continuous Transformer's. With `conv_width` W > 1 a causal depthwise convolution
stands before the mixer, whatever the mixer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.config import check_choices
from glissando.errors import ConfigError
from glissando.flops import Flops, linear_flops
from glissando.lifts import Grows, Lift, Table, grow_norm, join, linear, tables, tile, under
from glissando.mixers import EMPTY, Context, Mixer
from glissando.ops.complex_norm import complex_norm
from glissando.ops.rms_norm import rms_norm
from glissando.ops.short_conv import next_past, short_conv
from glissando.ops.swiglu import swiglu
from glissando.state import State


@dataclass
class NormConfig:
    """kind `rms` (gain only), `layer` (gain and bias) or `complex` (no parameters); eps is added to the variance."""

    kind: Literal["rms", "layer", "complex"] = "rms"
    eps: float = 1e-6


@dataclass
class MLPConfig:
    """kind of activation (`none`: no MLP); hidden width (None: 4 D, or 8 D / 3 rounded up to 8 for swiglu); biases."""

    kind: Literal["swiglu", "gelu", "relu", "relu2", "none"] = "swiglu"
    hidden: int | None = None
    bias: bool = False


@dataclass
class BlockConfig:
    """Options of every residual block.

    order          where the norms stand, see the module
    mixer_scale    a learned number that multiplies the mixer's output, started here; none if None
    conv_width     taps of the causal convolution before the mixer; 0 for none
    mixer_dropout  on the mixer's output
    mlp_dropout    on the MLP's output
    """

    order: Literal["pre", "post", "post-shared"] = "pre"
    mixer_scale: float | None = None
    conv_width: int = 0
    mixer_dropout: float = 0.0
    mlp_dropout: float = 0.0
    mlp: MLPConfig = field(default_factory=MLPConfig)


class RMSNorm(nn.Module):
    """glissando.ops.rms_norm with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ComplexNorm(nn.Module):
    """glissando.ops.complex_norm: the mean of the complex numbers taken off, their mean square made one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        if size % 2:
            raise ConfigError(f"norm.kind `complex` reads pairs of numbers and needs an even width, got {size}")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return complex_norm(x, self.eps)


def build_norm(config: NormConfig, size: int) -> nn.Module:
    check_choices(config, "norm")
    if not 0 <= config.eps < math.inf:
        raise ConfigError(f"norm.eps is added to a variance: it must be at least 0 and finite, got {config.eps}")
    if config.kind == "complex":
        return ComplexNorm(size, config.eps)
    return RMSNorm(size, config.eps) if config.kind == "rms" else nn.LayerNorm(size, eps=config.eps)


def mlp_hidden(config: MLPConfig, size: int) -> int:
    """F: the hidden width of an MLP for `size` features."""
    return config.hidden or (-(-8 * size // 24) * 8 if config.kind == "swiglu" else 4 * size)


class MLP(nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) * up(x)) for swiglu (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: MLPConfig, size: int) -> None:
        super().__init__()
        check_choices(config, "mlp")
        self.kind = config.kind
        if config.hidden is not None and config.hidden < 1:
            raise ConfigError(f"mlp.hidden must be at least 1, got {config.hidden}")
        gated = config.kind == "swiglu"
        hidden = mlp_hidden(config, size)
        self.up = nn.Linear(size, hidden * (2 if gated else 1), bias=config.bias)
        self.down = nn.Linear(hidden, size, bias=config.bias)

    def growth(self, grown: MLP, width: Lift) -> Table:
        hidden = tile(self.down.in_features, grown.down.in_features)
        up = join(hidden, hidden) if self.kind == "swiglu" else hidden
        return tables({"up": linear(self.up, up, width), "down": linear(self.down, width, hidden)})

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x)))

    def _activate(self, h: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return swiglu(h)
        if self.kind == "gelu":
            return F.gelu(h)
        return F.relu(h) if self.kind == "relu" else F.relu(h).square()


class ShortConv(nn.Module):
    """glissando.ops.short_conv, started as the identity so that depth trains from the first step."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.weight[:, -1] += 1.0

    def init_state(self, batch_size: int, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
        size, width = self.weight.shape
        return self.weight.new_zeros(batch_size, width - 1, size, device=device, dtype=dtype)

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


class Block(nn.Module):
    """One mixer and one MLP with their norms and residuals; obeys the mixers' contract."""

    def __init__(self, config: BlockConfig, norm: NormConfig, mixer: Mixer, hidden_size: int) -> None:
        super().__init__()
        check_choices(config, "block")
        if config.conv_width < 0 or config.conv_width == 1:
            raise ConfigError(f"block.conv_width is 0 (none) or at least 2, got {config.conv_width}")
        for name in ("mixer_dropout", "mlp_dropout"):
            if not 0 <= getattr(config, name) < 1:
                raise ConfigError(f"block.{name} must be at least 0 and below 1, got {getattr(config, name)}")
        self.order = config.order
        self.hidden_size = hidden_size
        self.mixer_norm = build_norm(norm, hidden_size)
        self.conv = ShortConv(hidden_size, config.conv_width) if config.conv_width else None
        self.mixer = mixer
        self.start_scale = scale = config.mixer_scale
        if scale is not None and not math.isfinite(scale):
            raise ConfigError(f"block.mixer_scale must be finite, or null for none, got {scale}")
        self.mixer_scale = None if scale is None else nn.Parameter(torch.tensor(float(scale)))
        has_mlp = config.mlp.kind != "none"
        if not has_mlp and (config.mlp.hidden is not None or config.mlp.bias or config.mlp_dropout):
            raise ConfigError(
                "block.mlp.kind is `none`, so that block.mlp.hidden, block.mlp.bias and block.mlp_dropout do nothing; "
                f"leave them out (got {config.mlp.hidden}, {config.mlp.bias}, {config.mlp_dropout})"
            )
        self.mlp_norm = build_norm(norm, hidden_size) if has_mlp else None
        self.mlp = MLP(config.mlp, hidden_size) if has_mlp else None
        self.mixer_dropout, self.mlp_dropout = _dropout(config.mixer_dropout), _dropout(config.mlp_dropout)

    def reset_parameters(self) -> None:
        if self.mixer_scale is not None and self.start_scale is not None:
            nn.init.constant_(self.mixer_scale, self.start_scale)

    @property
    def n_residuals(self) -> int:
        """Branches added to the representation: the mixer and, where there is one, the MLP."""
        return 1 if self.mlp is None else 2

    @property
    def honours(self) -> frozenset:
        # Its taps are tokens, whatever the time between them.
        return self.mixer.honours - {"dt"} if self.conv is not None else self.mixer.honours

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
                "mixer": self.mixer.growth(grown.mixer, width),
                "mlp_norm": {} if self.mlp_norm is None else grow_norm(self.mlp_norm, width),
                "mlp": {} if self.mlp is None or grown.mlp is None else self.mlp.growth(grown.mlp, width),
            }
        )
        if self.conv is not None:
            taps = self.conv.weight.shape[1]
            table |= under("conv", {"weight": Grows(width, tile(taps, taps))})
        return table if self.mixer_scale is None else table | {"mixer_scale": Grows()}

    def endings(self) -> list[nn.Parameter]:
        """The parameters that its branches are linear in: the mixer's, and the MLP's last projection."""
        return [*self.mixer.endings(), *([] if self.mlp is None else self.mlp.down.parameters())]

    def damped(self) -> list[nn.Parameter]:
        """The matrices among them that the `scaled` initialisation divides by the root of the number of residuals."""
        left = set() if self.mixer.damped else {*self.mixer.endings()}
        return [ending for ending in self.endings() if ending.ndim == 2 and ending not in left]

    @property
    def can_rest(self) -> bool:
        """Whether it is the identity once its endings are 0: x + 0 is x, and norm(x + 0) is not."""
        return self.order == "pre" and bool(self.mixer.endings())

    @torch.no_grad()
    def rest(self) -> None:
        """Make it the identity. The endings get gradients all the same, and all else does once they have moved."""
        for parameter in self.endings():
            parameter.zero_()

    def flops(self, length: int) -> Flops:
        """Operations per token at `length` tokens, see glissando.flops."""
        taps = 0 if self.conv is None else self.conv.weight.numel()
        return linear_flops(self).plus(self.mixer.flops(length)).plus(Flops(other=2.0 * taps))

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> BlockState:
        conv = None if self.conv is None else self.conv.init_state(batch_size, device, dtype)
        return BlockState(conv, self.mixer.init_state(batch_size, device, dtype))

    def forward(
        self, x: Tensor, state: BlockState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, BlockState | None]:
        ctx = ctx or EMPTY
        if self.order == "pre":
            mixed, state = self._mix(self.mixer_norm(x), state, ctx)
            x = x + mixed
        else:
            mixed, state = self._mix(self.mixer_norm(x) if self.order == "post-shared" else x, state, ctx)
            x = self.mixer_norm(x + mixed)
        if self.mlp is None or self.mlp_norm is None:
            return x, state
        if self.order == "pre":
            return x + self.mlp_dropout(self.mlp(self.mlp_norm(x))), state
        return self.mlp_norm(x + self.mlp_dropout(self.mlp(x))), state

    def branches(
        self,
        x: Tensor,
        state: BlockState | None = None,
        ctx: Context | None = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, BlockState | None]:
        """mixer(norm(x)) + mlp(norm'(x)), both of the same x: the field of a flow.

        Where `active` (B, T) is False, the MLP is left out: nobody reads what comes out there.
        """
        y, state = self._mix(self.mixer_norm(x), state, ctx or EMPTY)
        if self.mlp is None or self.mlp_norm is None:
            return y, state
        if active is None:
            return y + self.mlp_dropout(self.mlp(self.mlp_norm(x))), state
        where = active.flatten().nonzero().squeeze(-1)
        fed = self.mlp_dropout(self.mlp(self.mlp_norm(x.flatten(0, 1)[where])))
        return y.flatten(0, 1).index_add(0, where, fed.to(y.dtype)).view_as(y), state

    def _mix(self, x: Tensor, state: BlockState | None, ctx: Context) -> tuple[Tensor, BlockState | None]:
        past, inner = (None, None) if state is None else state
        if state is not None and (past is None) != (self.conv is None):
            raise ValueError("a state with a convolution's past, or without, as this block has none, or one")
        if self.conv is not None:
            x, past = self.conv(x, past, ctx)
        y, inner = self.mixer(x, inner, ctx)
        if self.mixer_scale is not None:
            y = y * self.mixer_scale
        return self.mixer_dropout(y), None if state is None else BlockState(past, inner)
