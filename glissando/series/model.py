"""Time series: the same backbone between observations at their own times and what is asked about them.

    history -> features -> linear -> depth -> norm -> head -> y

A step is an observation: of each channel a value, or none, and the time since the step before. Nothing is filled in:
the features are the value where there is one, whether there is one, and what `history` knows of the past. A forecast
is asked for with its `horizon`, which the head alone reads: asking is not observing. It is what the network adds to a
linear `anchor`: nothing before training, and in evaluation the `share` that validations have shown. Without a horizon
the answer is of the step itself: numbers, or the logits of a class. Values, times and answers are in the units of the
data: the scales are part of the model, and do nothing until `set_scales`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from glissando.backbone import BackboneConfig, ModelState
from glissando.config import options, starting
from glissando.errors import ConfigError, InputError
from glissando.initialization import Scheme
from glissando.mixers import MIXERS, Context, LiquidConfig, Memo
from glissando.mixers.base import require_time
from glissando.series.anchor import Anchor, logarithm
from glissando.series.heads import LEVELS, Head, make_head
from glissando.series.history import Own, Past, by_own_past, history
from glissando.series.horizon import HorizonHead
from glissando.series.table_model import TableModel, require_shapes

#: sizes of categories, each with 0 for a missing one and 1 for an unknown one
Sizes = list[Annotated[int, Field(ge=2)]]


@options
class SeriesConfig(BackboneConfig):
    """Configuration of a model of time series.

    inputs             K, number of channels of a step
    outputs            O, number of outputs, or of classes
    head               what is predicted of an output: its value (`point`), or the parameters of a distribution, see
                       glissando.series.heads: quantiles, gaussian or student; of the numbers of a table, quantiles
    levels             of the head `quantiles`
    targets            of a forecast: the channel of each output; by default the first O
    forecast           whether the model is asked for a later time, a horizon; else its answers are of the step itself
    categories         of each categorical column of a step: number of categories, those for `missing` and `unknown` too
    static             number of numeric columns of a series
    static_categories  as categories, of a series
    future             number of columns that are known of later times
    dt                 how the time since the step before enters, beside as a feature: `log` and `linear`: states decay
                       over 0.5 + log(1 + dt) or dt, in units of the time scale, where the mixers accept it; `input`:
                       no further
    pooling            of a class of a whole series: the logits of its last step, or the mean over its steps
    scale              all: channels are read and forecast in the data's units; series: in those of the series' own past
    pairs              of a forecast's head: number of pairs that decay and turn over the horizon
    """

    inputs: int
    outputs: int
    head: Literal["point", "quantiles", "gaussian", "student"] = "point"
    levels: list[Annotated[float, Field(gt=0, lt=1)]] = field(default_factory=lambda: list(LEVELS))
    targets: list[NonNegativeInt] = field(default_factory=list)
    forecast: bool = False
    categories: Sizes = field(default_factory=list)
    static: NonNegativeInt = 0
    static_categories: Sizes = field(default_factory=list)
    future: NonNegativeInt = 0
    mixer: MIXERS.sections() = field(default_factory=LiquidConfig)  # type: ignore[valid-type]
    dt: Literal["log", "linear", "input"] = "log"
    pooling: Literal["last", "mean"] = "last"
    scale: Literal["all", "series"] = "all"
    pairs: PositiveInt = 32
    head_bias: bool = True
    init: Scheme = starting(default="torch", of="")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forecast and not self.targets:
            self.targets = list(range(self.outputs))
        if self.targets and (len(self.targets) != self.outputs or max(self.targets) >= self.inputs):
            raise ConfigError(
                f"model.targets are {self.targets}, and a forecast of {self.outputs} outputs needs as many of the "
                f"channels 0 to {self.inputs - 1}"
            )


class SeriesModel(TableModel):
    """A model of time series; the contract is that of LanguageModel.

    `model(x)` returns `(y, None)` and starts from an empty past. `model(x, state)` returns y and the new state, and
    continues from `state`.

    Args:
        config: The options of the model.
    """

    config: SeriesConfig
    _inputs, _kind, _options = "the steps of x", "series", SeriesConfig
    input_mean: Tensor  # (K,)
    input_scale: Tensor  # (K,)
    output_mean: Tensor  # (O,)
    output_scale: Tensor  # (O,)
    static_mean: Tensor  # (P,)
    static_scale: Tensor  # (P,)
    future_mean: Tensor  # (U,)
    future_scale: Tensor  # (U,)
    time_scale: Tensor  # ()
    law: Tensor | None  # (4, K), of channels in units of the series' own past, see history.by_own_past
    share: Tensor  # (O,), of a forecast: how much of what the network adds to the anchor is kept, see answers.shares

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.distribution: Head = make_head(config.head, config.levels)
        size = self.distribution.width * config.outputs
        facts = 2 * config.static + sum(config.static_categories)
        self.entry = nn.Linear(6 * config.inputs + 2 + facts + config.future, width)
        self.categories = nn.ModuleList(nn.Embedding(size, width) for size in config.categories)
        self._build(config, width)
        if config.forecast:
            self.anchor = Anchor(config.targets, config.inputs, facts, config.future)
            self.head: nn.Module = HorizonHead(width, size, config.pairs, config.future)
            self.register_buffer("share", torch.ones(config.outputs))
        else:
            self.head = nn.Linear(width, size, bias=config.head_bias)
        sizes = {"input": config.inputs, "output": config.outputs, "static": config.static, "future": config.future}
        self._scaled(sizes)
        self.register_buffer("time_scale", torch.ones(()))
        by_series = config.scale == "series"
        self.register_buffer("law", torch.eye(4)[2:3].T.repeat(1, config.inputs) if by_series else None)
        self._start()

    def set_scales(self, **scales: Any) -> None:
        """Set the scales by which the model reads and writes the units of the data.

        The model reads (x - input_mean) / input_scale, static and known-future columns alike, and times over
        time_scale, and returns output_mean + output_scale times the output of the head.

        Args:
            **scales: input_mean and input_scale (K,), output_mean and output_scale (O,), those of static (P,) and of
                future (U,), time_scale (), and the law (4, K) where channels are in units of the series' own past.
        """
        self._set_buffers({name: value for name, value in scales.items() if value is not None})
        if self.config.forecast:  # a forecast channel has one scale, read and written
            self.output_mean.copy_(self.input_mean[self.config.targets])
            self.output_scale.copy_(self.input_scale[self.config.targets])

    @property
    def channels(self) -> int:
        return self.config.inputs

    def forward(
        self,
        x: Tensor,
        state: ModelState | None = None,
        *,
        observed: Tensor | None = None,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        horizon: Tensor | None = None,
        codes: Tensor | None = None,
        static: Tensor | None = None,
        static_codes: Tensor | None = None,
        future: Tensor | None = None,
        ahead: Tensor | None = None,
        past: Past | None = None,
        control: Tensor | None = None,
        donate: bool = False,
        memo: Memo | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """The answers of all steps.

        Args:
            x: Values (B, T, K). One that was not observed may be anything, NaN too, and changes nothing.
            state: State to continue from; None: an empty past.
            observed: (B, T, K) bool, which values were observed; None: all.
            dt: Time (B, T) since the step before, finite at masked steps too; None: time_scale, which is 1 by default.
            mask: (B, T) bool, True at real steps. Masked steps may be anywhere; their answers have no meaning.
            horizon: Times (B, T, J) from each step to what is asked of it; of a model that forecasts, and only of one.
            codes: Categories (B, T, Q) of each step, int64; 0 a missing one, 1 an unknown one.
            static: Numbers (B, P) of the series, NaN where missing; None: all are.
            static_codes: Categories (B, R) of the series; None: all are missing.
            future: Known-future columns (B, T, U) at each step.
            ahead: Known-future columns (B, T, J, U) at the times asked for.
            past: What is known of the channels before the first step, (B, K), where no state is given: a window out of
                a longer series starts with it.
            control: Control (B, C), or (B, T, C) if it varies by step.
            donate: Whether the given state may be changed in place; only without gradients.
            memo: As in LanguageModel.forward; only without gradients.

        Returns:
            Answers (B, T, O), or forecasts (B, T, J, O), with the P parameters of each as a last dimension where the
            head is none of points, and the state after the last step, or None if no state was given.

        Raises:
            InputError: A shape does not fit, or the state belongs to another model.
            ContextError: The model does not accept one of the signals mask and control.
        """
        self._require_parts(
            x, observed=observed, dt=dt, horizon=horizon, codes=codes, static=static, static_codes=static_codes,
            future=future, ahead=ahead,
        )  # fmt: skip
        self._check(x, state, Context(mask, None, control, donate, memo))
        observed = torch.ones_like(x, dtype=torch.bool) if observed is None else observed
        gaps = torch.ones_like(x[..., 0]) if dt is None else (dt / self.time_scale).to(x.dtype)
        if mask is not None:
            observed, gaps = observed & mask.unsqueeze(-1), torch.where(mask, gaps, 0)
        values = torch.where(observed, (x - self.input_mean) / self.input_scale, 0)
        known = history(values, observed, gaps, past if state is None else state.past)
        units = by_own_past(known, self.law)
        values = torch.where(observed, (values - units.centre) / units.scale, 0)
        facts = self._facts(x.shape[0], None if static is None else static.to(x), static_codes).unsqueeze(1)
        scaled = units.known
        features = [
            values, observed.to(values.dtype), scaled.value, logarithm(scaled.age), scaled.mean,
            scaled.number.log1p() / 3, logarithm(gaps).unsqueeze(-1), gaps.log1p().unsqueeze(-1),
            facts.expand(-1, values.shape[1], -1),
        ]  # fmt: skip
        if future is not None:
            features.append((future - self.future_mean) / self.future_scale)

        ctx = Context(mask, self._duration(gaps), control, donate, memo)
        embedded = [] if codes is None else list(zip(self.categories, codes.unbind(-1), strict=True))
        h, state = self._read(torch.cat(features, -1), embedded, state, x, ctx, known)
        if not self.config.forecast:
            return self._in_units(self.head(h)), state
        if horizon is None or horizon.shape[2] == 0:
            raw = h.new_zeros(*h.shape[:2], 0, self.distribution.width * self.config.outputs)
            return self._in_units(raw), state
        return self._answers(h, units, horizon, facts, ahead), state

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    def fit_anchor(
        self, known: Past, horizon: Tensor, target: Tensor, static: Tensor, static_codes: Tensor, ahead: Tensor | None
    ) -> None:
        """Solve for the anchor's weights by N questions. What is known is in the model's units, and so are horizons, in
        time scales; targets are in those in which they are forecast, see `own`.

        Args:
            known: (1, N, K), where each question is asked.
            horizon: (1, N).
            target: (1, N, O), NaN where nothing was observed.
            static: (N, P), of each question's series, in the units of the data.
            static_codes: (N, R).
            ahead: (1, N, U), in the units of the data.
        """
        facts = self._facts(len(static), static.to(known.value), static_codes, known.value.dtype).unsqueeze(0)
        known = by_own_past(known, self.law).known
        self.anchor.fit(known, horizon, facts, self._ahead(ahead), target, target.isfinite())

    @torch.no_grad()
    def anchored(
        self, known: Past, horizon: Tensor, static: Tensor | None, static_codes: Tensor | None, ahead: Tensor | None
    ) -> Tensor:
        """The forecasts (B, T, O) of the anchor alone, in the units of the data.

        Args:
            known: (B, T, K), in the model's units.
            horizon: (B, T), and the others as in `forward`, in the units of the data.
            static: (B, P).
            static_codes: (B, R).
            ahead: (B, T, U).
        """
        facts = self._facts(len(known.value), static, static_codes, known.value.dtype).unsqueeze(1)
        units = by_own_past(known, self.law)
        y = self.anchor(units.known, horizon / self.time_scale, facts, self._ahead(ahead))
        centre, scale = (part[..., self.config.targets] for part in (units.centre, units.scale))
        return self.output_mean + self.output_scale * (centre + scale * y)

    def params(self, y: Tensor) -> Tensor:
        """Answers (..., O) or (..., O, P) about numbers, as parameters (..., O, P)."""
        return y.unsqueeze(-1) if self.config.head == "point" else y

    def pooled(self, y: Tensor, mask: Tensor) -> Tensor:
        """The answer (B, O) of whole series to y (B, T, O), over the real steps of a mask (B, T) that has some in each
        row: the last one, or their mean."""
        if self.config.pooling == "mean":
            return torch.where(mask.unsqueeze(-1), y, 0).sum(1) / mask.sum(1, keepdim=True)
        index = mask.shape[1] - 1 - mask.flip(1).to(torch.uint8).argmax(1)
        return y[torch.arange(len(y), device=y.device), index]

    # ------------------------------------------------------------------ parts

    def _warn_of_no_time(self, dt: Tensor, mask: Tensor | None) -> None:
        """None: every series begins with dt = 0, and what a step observes is known to those that follow."""

    def _ahead(self, ahead: Tensor | None) -> Tensor | None:
        return None if ahead is None else (ahead - self.future_mean) / self.future_scale

    def _answers(self, h: Tensor, units: Own, horizon: Tensor, facts: Tensor, ahead: Tensor | None) -> Tensor:
        """Forecasts (B, T, J, O) or (B, T, J, O, P), each by itself: the same bits beside any other."""
        return torch.stack(
            [
                self._answer(h, units, e, facts, None if ahead is None else ahead[:, :, j])
                for j, e in enumerate(horizon.unbind(2))
            ],
            2,
        )

    def _answer(self, h: Tensor, units: Own, horizon: Tensor, facts: Tensor, ahead: Tensor | None) -> Tensor:
        """A forecast (B, T, O) or (B, T, O, P) of every step: what the head adds to the anchor."""
        horizon, ahead = (horizon / self.time_scale).to(h.dtype), self._ahead(ahead)
        anchor = self.anchor(units.known, horizon, facts, ahead)
        centre, scale = (part[..., self.config.targets] for part in (units.centre, units.scale))
        return self._in_units(self.head(h, horizon, ahead), anchor, centre, scale)

    def _in_units(
        self, raw: Tensor, anchor: Tensor | float = 0.0, centre: Tensor | float = 0.0, scale: Tensor | float = 1.0
    ) -> Tensor:
        """What the head says of an output about its anchor, both in `scale` about `centre`, in units of the data."""
        params = self.distribution.parameters(raw)
        if self.config.forecast and not self.training:
            anchor = anchor - (1 - self.share) * self.distribution.mean(params)
        shift = self.output_mean + self.output_scale * (centre + scale * anchor)
        y = self.distribution.affine(params, shift, self.output_scale * scale)
        return y.squeeze(-1) if self.config.head == "point" else y

    def _duration(self, gaps: Tensor) -> Tensor | None:
        """How long a step is to the mixers, None where they do not accept it."""
        if self.config.dt == "input" or "dt" not in self.depth.accepts:
            return None
        return 0.5 + gaps.log1p() if self.config.dt == "log" else gaps

    def _require_parts(self, x: Tensor, **parts: Tensor | None) -> None:
        """Raise InputError for what is no x, and for a part that is missing, is not the model's, or has another shape
        or type."""
        config, size, horizon = self.config, self.config.inputs, parts["horizon"]
        if not isinstance(x, Tensor):
            raise InputError(f"x must be a tensor (batch, time, {size}), got a {type(x).__name__}; use torch.tensor(x)")
        if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] != size or not x.is_floating_point():
            raise InputError(
                f"x must be (batch, time >= 1, {size}) of floating-point numbers, got {tuple(x.shape)} {x.dtype}; "
                "a single series needs x.unsqueeze(0)"
            )
        if x.dtype != self.entry.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"x is {x.dtype} and the model {self.entry.weight.dtype}: use x.to(...), or model.double()"
            )
        batch, length, _ = x.shape
        questions = -1 if not isinstance(horizon, Tensor) or horizon.ndim != 3 else horizon.shape[2]
        shapes = {
            "observed": (batch, length, size),
            "dt": (batch, length),
            "horizon": (batch, length, questions) if config.forecast else None,
            "codes": (batch, length, len(config.categories)) if config.categories else None,
            "static": (batch, config.static) if config.static else None,
            "static_codes": (batch, len(config.static_categories)) if config.static_categories else None,
            "future": (batch, length, config.future) if config.future else None,
            "ahead": (batch, length, questions, config.future) if config.future and config.forecast else None,
        }
        needed = {"codes", "future", *({"ahead"} if horizon is not None else ())}
        why = {"horizon": "its answers are of the step itself (model.forecast)"}
        require_shapes(parts, shapes, needed, f"x {tuple(x.shape)}", why)
        if (observed := parts["observed"]) is not None and observed.dtype != torch.bool:
            raise InputError(f"observed must be bool, True where a value was observed, got {observed.dtype}")
        for name in ("dt", "horizon"):
            if (times := parts[name]) is not None:
                require_time(times, name)
