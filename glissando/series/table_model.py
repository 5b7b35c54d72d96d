"""What models of tables share, of series and of events: known facts, scales and shapes; and a run that reads tables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.backbone import Backbone, ModelState, for_saved_weights
from glissando.config import from_dict, to_dict
from glissando.errors import InputError, RunError
from glissando.mixers import Context
from glissando.runs import Run, require_replaceable
from glissando.series.history import Past, nothing
from glissando.series.panel import Clock
from glissando.state import map_state
from glissando.storage import publishing


class TableModel(Backbone, ABC):
    """A subclass has `entry`, its first linear map, buffers NAME_mean and NAME_scale, and options static and
    static_categories."""

    config: Any
    entry: nn.Linear
    static_mean: Tensor
    static_scale: Tensor

    #: the class of its options
    _options: ClassVar[type]

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of which the state holds what is known."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """A model with new weights, of its options or a mapping of them; raises ConfigError for an option that does not
        exist."""
        return cls(config if isinstance(config, cls._options) else from_dict(cls._options, config, "model"))

    @classmethod
    def load(cls, path: str | Path, trust_imports: bool = False) -> Self:
        """The model of a run, in evaluation mode.

        Args:
            path: Directory that `save` or a training wrote, or a checkpoint in it.
            trust_imports: Whether the Python files that the run was made with may be executed.

        Raises:
            RunError: The directory is not a run, is incomplete or is damaged.
        """
        from glissando.loading import with_weights_of

        run = Run.open(path)
        config: Any = from_dict(cls._options, run.read_config(trust_imports, cls._kind).get("model", {}), "model")
        model = with_weights_of(run, lambda: cls(for_saved_weights(config)))
        model.config = config
        return model.eval()

    def init_state(
        self, batch_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before any step, on the model's device and dtype by default; what is known of the past is never
        narrower than float32."""
        state = super().init_state(batch_size, device, dtype)
        like = self.entry.weight
        wide = torch.promote_types(dtype or like.dtype, torch.float32)
        return state._replace(past=nothing(batch_size, self.channels, device or like.device, wide))

    def _scaled(self, sizes: Mapping[str, int]) -> None:
        """Means 0 and deviations 1 of so many columns, by NAME."""
        for name, size in sizes.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    def _read(
        self, features: Tensor, embedded: Sequence[tuple[nn.Module, Tensor]], state: ModelState | None,
        inputs: Tensor, ctx: Context, known: Past | None,
    ) -> tuple[Tensor, ModelState | None]:  # fmt: skip
        """What the head reads after each step, and the state after the last.

        Args:
            features: Numbers (B, T, F) of the steps.
            embedded: Tables, and the codes (B, T) of the steps in them.
            state: Before the first step, or None.
            inputs: The model's first one, (B, T, ...).
            ctx: The signals.
            known: What is known of the channels after each step.
        """
        features, ctx, order = self._prepared(features, state, ctx)
        with self._operations():
            try:
                h = self.entry(features)
                for table, codes in embedded:
                    h = h + table(codes if order is None else codes.gather(1, order))
                h, inner = self.depth(h, None if state is None else state.depth, ctx)
            except Exception as error:
                self._require_own_state(state, error)
                raise
            h, after = self._finished(h, inner, state, inputs, ctx, order)
        if after is not None and known is not None:
            after = ModelState(after.position, after.depth, map_state(lambda part: part[:, -1], known))
        return h, after

    def _set_buffers(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            buffer = self.get_buffer(name)
            buffer.copy_(torch.as_tensor(value, dtype=buffer.dtype).expand_as(buffer))

    def _facts(
        self, batch: int, static: Tensor | None, codes: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """What is known of the series (B, facts): numbers, whether they are there, and categories as 0 and 1."""
        like, sizes = self.entry.weight, self.config.static_categories
        dtype = dtype or like.dtype
        if static is None:
            static = like.new_full((batch, self.config.static), math.nan, dtype=dtype)
        if codes is None:
            codes = torch.zeros(batch, len(sizes), dtype=torch.int64, device=like.device)
        parts = filled(static, self.static_mean, self.static_scale, dtype)
        for code, size in zip(codes.to(like.device).unbind(1), sizes, strict=True):
            parts.append(F.one_hot(code, size).to(dtype))
        return torch.cat(parts, -1)


def require_shapes(
    parts: Mapping[str, Tensor | None], shapes: Mapping[str, tuple[int, ...] | None], needed: Collection[str],
    of: str, why: Mapping[str, str] = {},
) -> None:  # fmt: skip
    """Raise InputError for a part that is missing though `needed`, that the model does not take, or of another shape.

    shapes  None: the model takes none; -1: a size that follows from another part that is not there
    of      the input and its shape, for errors
    why     of a part that the model does not take, else "leave it out"
    """
    for name, shape in shapes.items():
        part = parts[name]
        if part is None:
            if shape is not None and name in needed:
                raise InputError(f"{name} {shape} is missing: this model reads it")
        elif shape is None:
            raise InputError(f"{name} was given, and this model takes none: {why.get(name, 'leave it out')}")
        elif not isinstance(part, Tensor) or part.shape != shape:
            got = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            expected = str(shape).replace("-1", "J")
            raise InputError(f"{name} must be a tensor {expected} for {of}, got {got}")


def filled(numbers: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers in their units, 0 where they are missing, and whether they are there."""
    there = numbers.isfinite()
    return [torch.where(there, (numbers - mean) / scale, 0).to(dtype), there.to(dtype)]


@dataclass(frozen=True)
class TableRun:
    """A trained model and how it reads tables. A subclass narrows the types of these, and names their classes."""

    model: Any
    encoding: Any
    data: Any

    #: classes of the model, the encoding and the data
    _classes: ClassVar[tuple[Any, Any, Any]]

    @classmethod
    def open(cls, path: str | Path, trust_imports: bool = False) -> Self:
        """Raises RunError for what is no run of this kind, or a model that was saved without data."""
        kind, encoding, data = cls._classes
        config = Run.open(path).read_config(trust_imports, kind=kind._kind)
        if "data" not in config or "encoding" not in config:
            raise RunError(f"{path} is a model that was saved without data: load it with {kind.__name__}.load")
        model = kind.load(path, trust_imports)
        return cls(model, from_dict(encoding, config["encoding"], "encoding"), from_dict(data, config["data"], "data"))

    def save(self, path: str | Path, overwrite: bool = False, **sections: Mapping[str, Any]) -> None:
        """Write a run directory that `open` opens, whole or not at all; `sections` go into its configuration.

        Raises RunError, before anything is written, where there is something at `path` that may not be replaced.
        """
        target = Path(path).expanduser()
        require_replaceable(target, overwrite)
        config = {"model": self.model.config, "data": self.data, "encoding": self.encoding}
        plain = {"kind": self.model._kind, **{name: to_dict(part) for name, part in config.items()}, **sections}
        with publishing(target) as folder:
            Run.create(folder).write_model(self.model.state_dict(), plain)

    def clock(self, origins: np.ndarray | None = None) -> Clock:
        """How times are written and spans are read, of series that begin at `origins`."""
        return Clock(self.encoding.time_form, self.encoding.unit, np.empty(0) if origins is None else origins)

    def horizons(self, horizon: str | float | Sequence[str | float], every: str | float | None = None) -> np.ndarray:
        """(J,) ascending times in the unit of the table: `horizon` itself, or every `every` up to it; or several."""
        return self.clock().horizons(horizon, every)

    def reading(self, options: Mapping[str, Any]) -> Self:
        """The same model, which reads tables by other `options` of the data."""
        return replace(self, data=from_dict(type(self.data), {**to_dict(self.data), **options}, "data"))
