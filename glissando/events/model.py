"""Events: the same backbone between events at their own times and what comes next.

    kinds, gaps, marks, facts, values -> features -> linear -> depth -> norm -> h -> when the next event comes, and what

A step is an event, an observation of values, or the start of prediction. States age over the time between steps and
take each step as an impulse. From the features h after a step follow the probability that another event comes at the
same time, the distribution of the wait until the next one, and that of its kind given the wait; none of it is read.
Times are in the units of the data: the scales are part of the model, and do nothing until `set_scales`.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from glissando.backbone import BackboneConfig, ModelState
from glissando.config import options, starting
from glissando.errors import InputError
from glissando.events.batches import Targets
from glissando.events.heads import WAITS, Params, Waits
from glissando.initialization import Scheme
from glissando.mixers import MIXERS, Context, LiquidConfig
from glissando.mixers.base import require_time
from glissando.series.anchor import logarithm
from glissando.series.history import Past, history
from glissando.series.model import Sizes
from glissando.series.table_model import TableModel, filled, require_shapes

#: harmonics of the day and of the week that are read
_HARMONICS = 2


@options
class EventConfig(BackboneConfig):
    """Configuration of a model of events.

    kinds              K, number of kinds that are predicted: codes 2 to K + 1
    codes              number of codes of a step: 0 no event, 1 an unknown kind, the K kinds, and those that are read
                       alone
    head               of the wait and the kind: `mixture` of log-normals, or `intensity` of decaying hazards, for
                       events that excite others; see glissando.events.heads
    components         number of log-normals, or of decays
    ties               whether several events may have one time
    resolution         unit that times are rounded up to, in the unit of the data; 0: they are exact
    marks              number of numeric marks of an event
    mark_categories    of each categorical mark: number of categories, those for `missing` and `unknown` too
    values             number of channels of values
    static             number of numeric columns of a series
    static_categories  as mark_categories, of a series
    clock              whether the time of the day and of the week is read
    """

    kinds: PositiveInt
    codes: Annotated[int, Field(ge=3)]
    head: Literal["mixture", "intensity"] = "mixture"
    components: PositiveInt = 8
    ties: bool = False
    resolution: NonNegativeFloat = 0.0
    marks: NonNegativeInt = 0
    mark_categories: Sizes = field(default_factory=list)
    values: NonNegativeInt = 0
    static: NonNegativeInt = 0
    static_categories: Sizes = field(default_factory=list)
    clock: bool = False
    mixer: MIXERS.sections() = field(default_factory=lambda: LiquidConfig(input="impulse"))  # type: ignore[valid-type]
    init: Scheme = starting(default="torch", of="")


class Likelihood(NamedTuple):
    """Log-likelihoods (n,) of what came after steps, in the unit of the data: of when, and of which kind."""

    time: Tensor
    kind: Tensor


class EventModel(TableModel):
    """A model of events; the contract is that of LanguageModel, and `h` stands where that has logits.

    `model(codes, dt=gaps)` returns `(h, None)` and starts from an empty past. `model(codes, state, dt=gaps)` returns h
    and the new state, and continues from `state`. `model.waits(h)` are the parameters of `model.head`, and
    `model.log_likelihood` scores what came.

    Args:
        config: The options of the model.
    """

    config: EventConfig
    _inputs, _kind, _options = "the steps", "events", EventConfig
    time_scale: Tensor  # ()
    mark_mean: Tensor  # (M,)
    mark_scale: Tensor  # (M,)
    value_mean: Tensor  # (K,)
    value_scale: Tensor  # (K,)
    static_mean: Tensor  # (P,)
    static_scale: Tensor  # (P,)
    log_mean: Tensor  # ()
    log_scale: Tensor  # ()

    def __init__(self, config: EventConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        numbers = {"mark": config.marks, "value": config.values, "static": config.static}
        features = 3 + 2 * config.marks + 6 * config.values + 2 * config.static + sum(config.static_categories)
        self.entry = nn.Linear(features + (4 * _HARMONICS if config.clock else 0), width)
        self.embedding = nn.Embedding(config.codes, width)
        self.categories = nn.ModuleList(nn.Embedding(size, width) for size in config.mark_categories)
        self._build(config, width)
        self.head: Waits = WAITS[config.head](width, config.kinds, config.components)
        self.tie = nn.Linear(width, 1 + config.kinds) if config.ties else None
        self._scaled(numbers)
        for name, value in {"time_scale": 1.0, "log_mean": 0.0, "log_scale": 1.0}.items():
            self.register_buffer(name, torch.tensor(value))
        self._start()

    def set_scales(self, **scales: Any) -> None:
        """Set the units of the data: see glissando.events.batches.Scales."""
        waits = scales.pop("wait_mean"), scales.pop("wait_scale")
        self._set_buffers(scales)
        self.head.set_scales(*waits)

    @property
    def channels(self) -> int:
        return self.config.values

    def forward(
        self,
        codes: Tensor,
        state: ModelState | None = None,
        *,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        phases: Tensor | None = None,
        marks: Tensor | None = None,
        mark_codes: Tensor | None = None,
        values: Tensor | None = None,
        static: Tensor | None = None,
        static_codes: Tensor | None = None,
        past: Past | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """The features after each step.

        Args:
            codes: Codes (B, T) of the steps, int64; 0 no event, 1 an event of an unknown kind.
            state: State to continue from; None: an empty past.
            dt: Time (B, T) since the step before, finite at masked steps too; None: time_scale, which is 1 by default.
            mask: (B, T) bool, True at real steps. Masked steps may be anywhere; their features have no meaning.
            phases: Fractions (B, T, 2) of the day and of the week.
            marks: Numbers (B, T, M) of the events, NaN where missing.
            mark_codes: Categories (B, T, Q) of the events, int64; 0 a missing one, 1 an unknown one.
            values: Values (B, T, K), NaN where nothing was observed.
            static: Numbers (B, P) of the series, NaN where missing; None: all are.
            static_codes: Categories (B, R) of the series; None: all are missing.
            past: What is known of the values before the first step, (B, K), where no state is given.

        Returns:
            Features (B, T, D), and the state after the last step, or None if no state was given.

        Raises:
            InputError: A shape does not fit, or the state belongs to another model.
            ContextError: The model does not accept a mask.
        """
        self._require_parts(
            codes, dt=dt, phases=phases, marks=marks, mark_codes=mark_codes, values=values, static=static,
            static_codes=static_codes,
        )  # fmt: skip
        self._check(codes, state, Context(mask))
        like = self.entry.weight
        gaps = torch.ones(codes.shape, dtype=like.dtype, device=codes.device)
        gaps = gaps if dt is None else (dt / self.time_scale).to(like.dtype)
        if mask is not None:
            gaps = torch.where(mask, gaps, 0)
        parts = [self._of_gaps(gaps)]
        if phases is not None:
            angles = 2 * math.pi * torch.cat([(harmonic + 1) * phases for harmonic in range(_HARMONICS)], -1)
            parts.append(torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype))
        if marks is not None:
            parts += filled(marks, self.mark_mean, self.mark_scale, like.dtype)
        known = None
        if values is not None:
            scaled, there = filled(values, self.value_mean, self.value_scale, like.dtype)
            seen = there.bool() if mask is None else there.bool() & mask.unsqueeze(-1)
            known = history(scaled, seen, gaps, past if state is None else state.past)
            parts += [scaled, there, known.value, logarithm(known.age), known.mean, known.number.log1p() / 3]
        parts.append(self._facts(codes.shape[0], static, static_codes).unsqueeze(1).expand(-1, codes.shape[1], -1))

        ctx = Context(mask, gaps if "dt" in self.depth.accepts else None)
        embedded: list[tuple[nn.Module, Tensor]] = [(self.embedding, codes)]
        if mark_codes is not None:
            embedded += zip(self.categories, mark_codes.unbind(-1), strict=True)
        return self._read(torch.cat(parts, -1), embedded, state, codes, ctx, known)

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    # ------------------------------------------------------------------ what comes next

    def waits(self, h: Tensor) -> Params:
        """The head's parameters after the features h (..., D), for waits in units of time_scale."""
        return self.head(h)

    def log_likelihood(self, h: Tensor, targets: Targets) -> Likelihood:
        """The likelihood of what came after each of n steps, in the unit of the data.

        Args:
            h: Features (n, D) of the steps.
            targets: What came.
        """
        params, kind = self.waits(h), targets.kind
        scale, dtype = self.time_scale.double(), params[0].dtype
        wait, within = ((part / scale).to(dtype) for part in (targets.wait, targets.within))
        resolution = self.config.resolution
        arrives = (kind >= 0) & (targets.tie != 1)
        some = torch.where(targets.wait > 0, wait, 1)
        when, which = self.head.log_prob(params, some, kind.clamp_min(0), resolution / float(scale))
        if not resolution:
            when = when - scale.log().to(dtype)
        time = torch.where(arrives, when, -self.head.passed(params, wait))
        if bool((within > 0).any()):
            time = time + self.head.passed(params, within)
        of_kind = torch.where(arrives, which, 0)
        if self.tie is None:
            return Likelihood(time, of_kind)
        none, ties = self.log_ties(h, targets.last)
        tied = targets.tie == 1
        log_none = torch.where(targets.tie == 0, none, 0)
        log_tied = (-torch.expm1(torch.where(none < 0, none, -1.0))).log()
        time = torch.where(tied, torch.where(none < 0, log_tied, -math.inf), time + log_none)
        return Likelihood(time, torch.where(tied, ties.gather(-1, kind.clamp_min(0).unsqueeze(-1))[:, 0], of_kind))

    def log_ties(self, h: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """log P(no further event at the time of the step), and of one the log-probabilities (n, K) of its kind, which
        comes after `last` (n,) in the order of kinds. A step that is no predicted event, with last -1, has none."""
        assert self.tie is not None
        raw = self.tie(h)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        later = torch.arange(self.config.kinds, device=h.device) > last.unsqueeze(-1)
        may = later.any(-1) & (last >= 0)
        none = torch.where(may, F.logsigmoid(-raw[:, 0]), 0)
        ties = F.log_softmax(raw[:, 1:].masked_fill(~later & may.unsqueeze(-1), -math.inf), -1)
        return none, ties

    # ------------------------------------------------------------------ parts

    def _of_gaps(self, gaps: Tensor) -> Tensor:
        """(B, T, 3): slow, fine, and whether a step is at the time of the one before."""
        later = gaps > 0
        fine = (torch.where(later, gaps, 1).log() - self.log_mean) / self.log_scale
        return torch.stack([gaps.log1p() / 3, torch.where(later, fine, 0).to(gaps.dtype), (~later).to(gaps.dtype)], -1)

    def _require_parts(self, codes: Tensor, **parts: Tensor | None) -> None:
        """Raise InputError for a part that is missing, is not the model's, or has another shape or type."""
        if not isinstance(codes, Tensor) or codes.ndim != 2 or codes.shape[1] == 0 or codes.dtype != torch.int64:
            what = f"{tuple(codes.shape)} {codes.dtype}" if isinstance(codes, Tensor) else f"a {type(codes).__name__}"
            raise InputError(f"codes must be (batch, time >= 1) of int64, got {what}")
        if not torch.compiler.is_compiling() and (codes.min() < 0 or codes.max() >= self.config.codes):
            raise InputError(
                f"codes go from 0 to {self.config.codes - 1}, got {int(codes.min())} to {int(codes.max())}"
            )
        config, (batch, length) = self.config, codes.shape
        shapes: dict[str, tuple[int, ...]] = {
            "dt": (batch, length), "phases": (batch, length, 2 * config.clock),
            "marks": (batch, length, config.marks), "mark_codes": (batch, length, len(config.mark_categories)),
            "values": (batch, length, config.values), "static": (batch, config.static),
            "static_codes": (batch, len(config.static_categories)),
        }  # fmt: skip
        taken = {name: shape if name == "dt" or shape[-1] > 0 else None for name, shape in shapes.items()}
        require_shapes(parts, taken, ("phases", "marks", "mark_codes", "values"), f"codes {tuple(codes.shape)}")
        if (dt := parts["dt"]) is not None:
            require_time(dt)
