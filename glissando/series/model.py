"""Time series: the same backbone between numbers and numbers.

    x (B, T, F) -> scale -> linear -> depth -> norm -> linear -> scale -> y (B, T, O)

x and y are in the units of the data: the scales are part of the model, and do nothing until `set_scales`. y is a
regression at every step, or the logits of a class. A step may take any time: `dt` (B, T) says for how long each value
is held, that is when the next one comes, and y of a step is read at the end of it. So a forecast of the next value
knows when that value is due, and the state has aged by just that much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from glissando.backbone import Backbone, BackboneConfig, ModelState, for_saved_weights
from glissando.config import from_dict, options, starting
from glissando.errors import ConfigError, InputError
from glissando.initialization import Scheme
from glissando.mixers import MIXERS, Context, LiquidConfig, Memo
from glissando.mixers.liquid.scan import require_time
from glissando.model import ModelConfig


@options
class SeriesConfig(BackboneConfig):
    """Configuration of a model of time series.

    inputs   F, number of inputs of a step
    outputs  O, number of outputs of a step, or of classes
    dt       how the duration of a step is used: `step`: states decay by it, if the mixer accepts it; `input`: it is one
             more input; `both`
    """

    inputs: int
    outputs: int
    mixer: MIXERS.sections() = field(default_factory=LiquidConfig)  # type: ignore[valid-type]
    dt: Literal["step", "input", "both"] = "step"
    head_bias: bool = True
    init: Scheme = starting(default="torch", of="")


class SeriesModel(Backbone):
    """A model of time series: at every step, numbers or the logits of a class; the contract is that of LanguageModel.

    `model(x)` returns `(y, None)` and starts from an empty past. `model(x, state)` returns y and the new state, and
    continues from `state`.

    Args:
        config: The options of the model.
    """

    config: SeriesConfig
    _inputs, _kind = "the steps of x", "series"
    input_mean: Tensor  # (F,)
    input_scale: Tensor  # (F,)
    output_mean: Tensor  # (O,)
    output_scale: Tensor  # (O,)
    time_scale: Tensor  # ()

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        self.entry = nn.Linear(config.inputs + (config.dt != "step"), config.hidden_size)
        self._build(config, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.outputs, bias=config.head_bias)
        for name, size in (("input", config.inputs), ("output", config.outputs)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        self.register_buffer("time_scale", torch.ones(()))
        self._start()
        if config.dt == "both" and "dt" not in self.depth.accepts:
            raise ConfigError(
                "model.dt is `both`, and a mixer, or a convolution before it, does not take the time of a step: use "
                "`input`, or mixer `liquid` and block.conv_width 0"
            )

    @classmethod
    def from_config(
        cls, config: SeriesConfig | Mapping[str, Any], *, inputs: int | None = None, outputs: int | None = None
    ) -> SeriesModel:
        """A model with new weights.

        Args:
            config: A SeriesConfig, or a mapping of its options.
            inputs: F, number of inputs of a step, unless the mapping has it.
            outputs: O, number of outputs of a step or of classes, unless the mapping has it.

        Raises:
            ConfigError: An option does not exist, or only language models have it.
        """
        sizes = {name: n for name, n in (("inputs", inputs), ("outputs", outputs)) if n is not None}
        if isinstance(config, SeriesConfig):
            if sizes:
                raise ConfigError(f"a SeriesConfig holds its own inputs and outputs; leave out {', '.join(sizes)}")
            return cls(config)
        return cls(from_dict(SeriesConfig, _checked({**config, **sizes}), "model"))

    @classmethod
    def load(cls, path: str | Path, trust_imports: bool = False) -> SeriesModel:
        """The model of a run, in evaluation mode.

        Args:
            path: Directory that `save` or `glissando series train` wrote, or a checkpoint in it.
            trust_imports: Whether the Python files that the run was made with may be executed.

        Raises:
            RunError: The directory is not a run, is incomplete or is damaged.
        """
        from glissando.loading import with_weights_of
        from glissando.runs import Run

        run = Run.open(path)
        config = from_dict(SeriesConfig, run.read_config(trust_imports, cls._kind).get("model", {}), "model")
        model = with_weights_of(run, lambda: cls(for_saved_weights(config)))
        model.config = config
        return model.eval()

    def set_scales(self, **scales: Any) -> None:
        """Set the scales by which the model reads and writes the units of the data.

        The model reads (x - input_mean) / input_scale and dt / time_scale, and returns output_mean + output_scale times
        the output of the head.

        Args:
            **scales: input_mean and input_scale (F,), output_mean and output_scale (O,), time_scale ().
        """
        for name, values in scales.items():
            buffer = self.get_buffer(name)
            buffer.copy_(torch.as_tensor(values).expand_as(buffer))

    def forward(
        self,
        x: Tensor,
        state: ModelState | None = None,
        *,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        control: Tensor | None = None,
        donate: bool = False,
        memo: Memo | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """The outputs of all steps.

        Args:
            x: Inputs (B, T, F).
            state: State to continue from; None: an empty past.
            dt: Duration (B, T) of each step, finite at masked steps too; None: time_scale, which is 1 by default.
            mask: (B, T) bool, True at real steps. Masked steps may be anywhere; their outputs have no meaning.
            control: Control (B, C), or (B, T, C) if it varies by step.
            donate: Whether the given state may be changed in place; only without gradients.
            memo: As in LanguageModel.forward; only without gradients.

        Returns:
            Outputs (B, T, O), and the state after the last step, or None if no state was given.

        Raises:
            InputError: A shape does not fit, or the state belongs to another model.
            ContextError: The model does not accept one of the signals dt, mask and control.
        """
        size = self.config.inputs
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
        x = (x - self.input_mean) / self.input_scale
        if self.config.dt != "step":
            x = torch.cat([x, self._time(x, dt)], -1)
        if self.config.dt == "input":
            dt = None
        elif isinstance(dt, Tensor) and dt.dtype != torch.bool:
            dt = dt / self.time_scale
        ctx = Context(mask, dt, control, donate, memo)
        x, ctx, order = self._prepared(x, state, ctx)
        with self._operations():
            try:
                h, inner = self.depth(self.entry(x), None if state is None else state.depth, ctx)
            except Exception as error:
                self._require_own_state(state, error)
                raise
            h, state = self._finished(h, inner, state, x, ctx, order)
        return self.output_mean + self.output_scale * self.head(h), state

    if TYPE_CHECKING:  # nn.Module's is typed as Callable[..., Any]
        __call__ = forward

    def _time(self, x: Tensor, dt: Tensor | None) -> Tensor:
        """dt as a number that is read, (B, T, 1)."""
        if dt is None:
            return torch.ones_like(x[..., :1])
        if not isinstance(dt, Tensor) or dt.shape != x.shape[:2]:
            given = tuple(dt.shape) if isinstance(dt, Tensor) else f"a {type(dt).__name__}"
            raise InputError(f"dt must be a tensor of the shape of {self._inputs} {tuple(x.shape[:2])}, got {given}")
        require_time(dt)
        return (dt / self.time_scale).unsqueeze(-1)


def last(y: Tensor, mask: Tensor | None = None) -> Tensor:
    """y (B, T, O) at the last real step of each row -> (B, O): what a classifier of whole series reads.

    Raises ValueError for a mask (B, T) that does not fit, is not bool, or has a row without any real step.
    """
    if mask is None:
        return y[:, -1]
    if mask.shape != y.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be {tuple(y.shape[:2])} bool for y {tuple(y.shape)}, got {tuple(mask.shape)} {mask.dtype}"
        )
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"rows {empty} of the mask have no real step, and so no last one; leave these rows out")
    index = mask.shape[1] - 1 - mask.flip(1).to(torch.uint8).argmax(1)
    return y[torch.arange(len(y), device=y.device), index]


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    own = {f.name for f in fields(SeriesConfig)}
    language = {f.name for f in fields(ModelConfig)} - own
    unused = [name for name in values if name in language]
    if unused:
        raise ConfigError(
            f"model.{unused[0]} is an option of language models only; leave it out of a series model. "
            f"Known here: {', '.join(sorted(own))}"
        )
    missing = [name for name in ("inputs", "outputs") if name not in values]
    if missing:
        raise ConfigError(
            f"a series model needs {' and '.join(missing)}, how many numbers a step has; give inputs=F and outputs=O"
        )
    return values
