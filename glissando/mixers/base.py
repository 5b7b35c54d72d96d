"""The contract of a mixer: how position t attends to positions <= t.

    init_state(batch_size, device=None, dtype=None) -> state
    forward(x, state=None, ctx=None) -> (y, state)        x, y: (B, T, D), any T >= 1
    reset_parameters()                                    its own initialisation; optional
    accepts                                               the per-token signals that it uses

The split law: forward(ab) equals forward(a) followed by forward(b, state), in values and in gradients.
With `state=None` a sequence starts from nothing and no state is returned: that is how training runs.
`glissando.testing.check_mixer` tries the laws on any class.

What else is known about a mixer it returns by further methods, as plain data. Each is optional: without them a mixer
trains, streams, serves and is compared all the same, and what is missing is named where it is asked for.

    flops(length)                   (products, other): operations per token beside those of its linear maps, see
                                    glissando.flops
    growth_axes                     which of `heads`, `head_size` and `state` can be grown
    grow(options, hidden_size, by)  static: its options once it has grown by a glissando.widening.Growth, with all that
                                    would follow from the width pinned; raises ConfigError for what cannot be exact
    growth(grown, width)            a glissando.widening.Table: how its parameters and buffers go into those of `grown`,
                                    which was built from these options; `width` lifts x
    silenced()                      the parameters that its output is linear in: zeros there silence it
    begin_like(other)               copy from the same mixer of another layer what a new one cannot know by itself
    calibrate(now)                  set from data, before a step, what gradients do not train, by a Moment; whether it
                                    did
    observed, observe(x, ctx)       names, and a number () for each: columns of the training log, means over layers; of
                                    NAME/first the first layer's
    warnings(row)                   what is wrong with a row of the log, by kind: (category, message)
    pictures(x, ctx)                for the playground: a list of Picture, a number for each token
    lower(builder, x)               its compiled decoding step, see docs/decoding.md
    export_form(capacity)           the module that is traced in its place, see docs/export.md; or raises Refused
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from glissando.config import Registry
from glissando.errors import ConfigError, InputError
from glissando.kernels.loop import exporting
from glissando.kernels.plain import underlying
from glissando.kernels.precise import widest_float
from glissando.state import State

Signal = Literal["mask", "dt", "control"]
#: what follows from weights alone, by the module that computed it
Memo = dict[Any, Any]


@dataclass(frozen=True)
class Context:
    """What varies by token. B rows, T tokens, C control dimensions.

    mask     (B, T) bool, True at real tokens. Rows are *packed*: real tokens first, padding last.
             A model packs any mask before its first layer, so that no mixer needs to handle holes.
    dt       (B, T) time since the previous token; 1 by default.
    control  (B, C) or (B, T, C).
    donate   the caller gives up the state it passes in, which may be changed in place (decoding only).
    memo     what was computed from weights alone and holds as long as they stand still: for this one call, where a
             tied block need not do it again, or for all that a caller shares it among. None where gradients are needed.
    hidden   a list of the representations so far, to which a depth adds each by `keep`; None: nobody reads them
    """

    mask: Tensor | None = None
    dt: Tensor | None = None
    control: Tensor | None = None
    donate: bool = False
    memo: Memo | None = None
    hidden: list[Tensor] | None = None

    def counts(self, x: Tensor) -> Tensor:
        """(B,) int64: real tokens in each row of x (B, T, ...)."""
        if self.mask is None:
            return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        return self.mask.sum(1)

    def elapsed(self, counts: Tensor | int) -> Tensor | int:
        """(B,) the time that the real tokens of each row take: the sum of dt, or their number `counts`."""
        if self.dt is None:
            return counts
        time = self.dt.to(widest_float(self.dt.device))
        return (time if self.mask is None else time * self.mask).sum(1)

    def keep(self, x: Tensor) -> None:
        """Add x (B, T, D), the representation after a block, to `hidden`, where there is one."""
        if self.hidden is not None:
            self.hidden.append(x)

    def without(self, *names: Signal) -> Context:
        """The same context without the named signals: their user has used them."""
        absent: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **absent)


EMPTY = Context()


class ContextError(ValueError):
    """A per-token signal was given to a part of the model that does not accept it."""


def require_accepted(ctx: Context, accepts: frozenset[Signal], who: str) -> None:
    """Raise ContextError if `ctx` carries a signal that `who` would ignore."""
    for name in get_args(Signal):
        if getattr(ctx, name) is not None and name not in accepts:
            known = ", ".join(sorted(accepts)) or "none"
            raise ContextError(
                f"{who} was given {name!r} but does not accept it (it accepts: {known}). Leave {name} out, or choose a "
                "mixer or depth that uses it."
            )


def require_time(dt: Tensor, name: str = "dt") -> None:
    """Raise InputError unless the durations `name` are real numbers, finite and at least 0."""
    if dt.is_complex() or dt.dtype == torch.bool:
        raise InputError(f"{name} is a duration, a real number for each step; got {dt.dtype}")
    if exporting():  # a graph depends on no value
        return
    dt = underlying(dt)
    if bool((dt < 0).any()):
        raise InputError(f"{name} is a duration and cannot be negative, got {float(dt.min())}")
    if not bool(dt.isfinite().all()):
        where = (~dt.isfinite()).nonzero()[0].tolist()
        raise InputError(f"{name} is a duration and must be finite, got {float(dt[tuple(where)])} at {where}")


class Mixer(nn.Module, ABC):
    """Information along time. Subclasses state their equation, their state and its size."""

    #: which per-token signals the mixer uses; any other raises
    accepts: frozenset[Signal] = frozenset({"mask"})
    #: with dt, `held`: a token's input is held over its dt, so that dt = 0 leaves the state alone; `impulse`: the state
    #: ages over dt and then takes the input, whose strength does not depend on dt
    input: Literal["held", "impulse"] = "held"

    @abstractmethod
    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token; on the mixer's own device and dtype by default."""

    @abstractmethod
    def forward(self, x: Tensor, state: State = None, ctx: Context | None = None) -> tuple[Tensor, State]:
        """x (B, T, D) -> y (B, T, D) and the state after the last real token of each row; None in, None out.

        Raises ContextError if ctx carries a signal that this mixer does not accept.
        """

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    def reset_parameters(self) -> None:
        """Start the parameters that a model's own initialisation of linear maps does not."""

    def silenced(self) -> list[nn.Parameter]:
        """The parameters that the output is linear in: those of `out`, where it is a linear map."""
        out = getattr(self, "out", None)
        return list(out.parameters()) if isinstance(out, nn.Linear) else []

    def begin_like(self, other: Any) -> None:
        """Copy from the same mixer of another layer what a new one cannot know by itself."""

    def context(self, ctx: Context | None) -> Context:
        """`ctx`, an empty one if None. Raises ContextError for a signal that this mixer does not accept."""
        if ctx is None:
            return EMPTY
        require_accepted(ctx, self.accepts, f"mixer {type(self).__name__}")
        return ctx


class Moment(NamedTuple):
    """What a mixer may ask before a training step.

    step       steps that are done
    restarted  whether this process has taken none of them
    mixers     those of the mixer's class, in the order of the layers; the first is asked to calibrate all of them
    measure    of a `method(x, ctx)`: what it returns of the first mixer's input, as one array (N,) over the next step's
               batch: the rows of all processes and micro-batches, so that how a step is parted changes nothing
    """

    step: int
    restarted: bool
    mixers: list[Any]
    measure: Callable[[Callable[[Tensor, Context], Tensor]], Any]


class Picture(NamedTuple):
    """Numbers over the tokens of a text, which the playground draws.

    name    of the picture
    title   a heading
    about   what a number is, in a sentence
    unit    of the numbers; empty for none
    log     whether colours should be logarithmic
    values  (T,), or (rows, T) with their names in `rows`, the first at the bottom
    """

    name: str
    title: str
    about: str
    unit: str
    log: bool
    values: Tensor
    rows: tuple[str, ...] = ()


def method_of(part: nn.Module | type[nn.Module], name: str, purpose: str) -> Any:
    """The optional method of a mixer or a depth. Raises ConfigError, which names it, where it has none."""
    method = getattr(part, name, None)
    if method is None:
        cls = part if isinstance(part, type) else type(part)
        raise ConfigError(
            f"{purpose}: {cls.__name__} has no method `{name}`; mixers/base.py and depth/base.py of "
            "glissando say what each method returns"
        )
    return method


#: mixers by name
MIXERS: Registry[Mixer] = Registry("mixer", "attention", group="glissando.mixers")
#: @register_mixer("average", AverageConfig) makes a class, built as cls(hidden_size, config), a mixer
register_mixer = MIXERS.register


def build_mixer(options: Any, hidden_size: int) -> Mixer:
    """A mixer of the registered class that these options are of."""
    return MIXERS.class_of(options)(hidden_size, options)


def initialized(mixer: Mixer) -> None:
    """Start the parameters of a mixer that is built. A model starts all its parts again once it is whole; the random
    state is left as it was, so that what the model then draws does not depend on this. Nothing is started on the device
    `meta`, which has no numbers."""
    if any(parameter.is_meta for parameter in mixer.parameters()):
        return
    with torch.random.fork_rng(devices=[]):
        mixer.reset_parameters()


def placement(module: nn.Module, device: Any, dtype: Any) -> dict[str, Any]:
    """device= and dtype= keywords, by default those of the module's first parameter."""
    like = next(module.parameters())
    return {"device": device or like.device, "dtype": dtype or like.dtype}


def head_size_of(hidden_size: int, heads: int, size: int | None, option: str) -> int:
    """The size of a head: the one given by `option`, or the heads' share of the width. Raises ConfigError for none."""
    if size is None and hidden_size % heads:
        raise ConfigError(
            f"hidden_size {hidden_size} is not a multiple of {heads} heads; change one of them or give {option}"
        )
    return size or hidden_size // heads


def last_real(x: Tensor, counts: Tensor | int, before: Tensor) -> Tensor:
    """x (B, T, ...) at each row's last real token, in the type of `before` (B, ...), which a row without any keeps.

    Rows are packed, so that it stands at the row's count (B,); a plain number is the count of all of them.
    """
    if not isinstance(counts, Tensor):
        return x[:, counts - 1].clone().to(before.dtype)  # a view would keep all of x alive
    latest = x[torch.arange(len(x), device=x.device), (counts - 1).clamp_min(0)].to(before.dtype)
    return torch.where((counts > 0).view(-1, *[1] * (before.ndim - 1)), latest, before)


def require_parts(state: Any, **has: bool) -> None:
    """Raise ValueError unless the state has exactly the optional parts that `has` names: a state of another model,
    whose missing part would be ignored without an error."""
    for name, expected in has.items():
        if (getattr(state, name) is not None) != expected:
            raise ValueError(f"a state {'without' if expected else 'with'} {name!r}")
