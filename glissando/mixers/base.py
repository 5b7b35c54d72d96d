"""The contract of a mixer: how position t hears positions <= t.

    init_state(batch_size) -> state
    forward(x, state=None, ctx=None) -> (y, state)        x, y: (B, T, D), any T >= 1

The split law: forward(ab) equals forward(a) followed by forward(b, state), in values and in gradients.
With `state=None` a sequence starts from nothing and no state is returned: that is how training runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from glissando.errors import ConfigError
from glissando.flops import Flops
from glissando.lifts import Lift, Table
from glissando.state import State

if TYPE_CHECKING:
    from glissando.growth import Growth

Signal = Literal["mask", "dt", "control"]
#: what follows from weights alone, by whose it is
Memo = dict[Any, Any]


@dataclass(frozen=True)
class Context:
    """What varies by token. B rows, T tokens, C control dimensions.

    mask     (B, T) bool, True at real tokens. Rows are *packed*: real tokens first, padding last.
             LanguageModel packs any mask at its door, so that no mixer needs to think about holes.
    dt       (B, T) time since the previous token; 1 by default.
    control  (B, C) or (B, T, C).
    donate   the caller gives up the state it passes in, which may be changed in place (decoding only).
    memo     what was computed from weights alone and holds as long as they stand still: for this one call, where a
             tied block need not do it again, or for all that a caller shares it among. None where gradients are wanted.
    """

    mask: Tensor | None = None
    dt: Tensor | None = None
    control: Tensor | None = None
    donate: bool = False
    memo: Memo | None = None

    def counts(self, x: Tensor) -> Tensor:
        """(B,) int64: real tokens in each row of x (B, T, ...)."""
        if self.mask is None:
            return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        return self.mask.sum(1)

    def without(self, *names: Signal) -> Context:
        """The same context with the named signals absent: consumed by whoever handles them."""
        absent: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **absent)


EMPTY = Context()


def last_real(x: Tensor, counts: Tensor | int, before: Tensor) -> Tensor:
    """x (B, T, ...) at each row's last real token, in the type of `before` (B, ...), which a row without any keeps.

    Rows are packed, so that it stands at the row's count (B,); a plain number is the count of all of them.
    """
    if isinstance(counts, int):
        return x[:, counts - 1].clone().to(before.dtype)  # a view would keep all of x alive
    latest = x[torch.arange(len(x), device=x.device), (counts - 1).clamp_min(0)].to(before.dtype)
    return torch.where((counts > 0).view(-1, *[1] * (before.ndim - 1)), latest, before)


class ContextError(ValueError):
    """A per-token signal was given to a part of the model that cannot honour it."""


def refuse_unhonoured(ctx: Context, honours: frozenset[Signal], who: str) -> None:
    """Raise ContextError if `ctx` carries a signal that `who` would ignore."""
    for name in get_args(Signal):
        if getattr(ctx, name) is not None and name not in honours:
            takes = ", ".join(sorted(honours)) or "none of them"
            raise ContextError(
                f"{who} was given {name!r} but cannot honour it (it takes: {takes}). "
                f"Leave {name} out, or choose a mixer or depth that uses it."
            )


class Mixer(nn.Module, ABC):
    """Information along time. Subclasses state their equation, their state and its size."""

    #: which per-token signals the mixer honours; any other raises
    honours: frozenset[Signal] = frozenset({"mask"})
    #: what `observe` tells, by name: columns of the training log, each the mean over the layers
    observed: tuple[str, ...] = ()
    #: those of `observed` of which the first layer's is a column too
    observed_first: tuple[str, ...] = ()
    #: whether the `scaled` initialisation makes its endings smaller, the more residual branches there are
    damped: bool = True
    #: which of `heads`, `head_size` and `state` it can grow, see glissando.growth
    axes: frozenset[str] = frozenset()

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token; on the mixer's own device and dtype by default."""

    @abstractmethod
    def mix(self, x: Tensor, state: State, ctx: Context) -> tuple[Tensor, State]:
        """The mixer's mathematics; `forward` has checked ctx. state None in, None out."""

    @abstractmethod
    def flops(self, length: int) -> Flops:
        """Operations per token at `length` tokens beside those of its linear maps, see glissando.flops."""

    @classmethod
    def grown_config(cls, options: Any, hidden_size: int, by: Growth) -> Any:
        """Its options once it has grown, with all that would follow from the width (now `hidden_size`) pinned.

        Raises ConfigError for what cannot be grown exactly.
        """
        raise ConfigError(f"mixer {cls.__name__} cannot grow: it states neither `grown_config` nor `growth`")

    def growth(self, grown: Any, width: Lift) -> Table:
        """How its parameters and buffers go into those of `grown`, built from `grown_config`; `width` lifts x."""
        raise ConfigError(f"mixer {type(self).__name__} cannot grow: it states neither `grown_config` nor `growth`")

    def require_start(self) -> None:
        """Raise ConfigError where its numbers have no start: something of it came with weights alone."""

    def endings(self) -> list[nn.Parameter]:
        """The parameters that its output is linear in, so that zeros there silence it; none where there are none."""
        out = getattr(self, "out", None)
        return list(out.parameters()) if isinstance(out, nn.Linear) else []

    def begin_like(self, other: Any) -> None:
        """Take from the same mixer of another layer what a new layer cannot know by itself; most need nothing."""

    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> y (B, T, D) and the state after the last real token of each row.

        Raises ContextError if ctx carries a signal that this mixer cannot honour.
        """
        ctx = ctx or EMPTY
        refuse_unhonoured(ctx, self.honours, f"mixer {type(self).__name__}")
        return self.mix(x, state, ctx)

    def observe(self, x: Tensor, ctx: Context) -> dict[str, Tensor]:
        """How the mixer works on x (B, T, D), the input of a call without state: a number () for each of `observed`."""
        return {}

    def _placement(self, device: Any, dtype: Any) -> dict[str, Any]:
        """device= and dtype= keywords, by default those of the mixer's first parameter."""
        like = next(self.parameters())
        return {"device": device or like.device, "dtype": dtype or like.dtype}


def require_parts(state: Any, **has: bool) -> None:
    """Raise ValueError unless the state has the parts that are told to be there, and none of the others: a state of
    another model, where a part that is missing would be left out without a word."""
    for name, expected in has.items():
        if (getattr(state, name) is not None) != expected:
            raise ValueError(f"a state {'without' if expected else 'with'} {name!r}")
