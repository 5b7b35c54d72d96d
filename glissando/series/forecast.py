"""A run and a table -> what comes after the table's end, in the user's own names of groups, times and channels."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.config import from_dict, to_dict
from glissando.errors import ConfigError, NotFiniteError, RunError
from glissando.runs import Run, require_replaceable
from glissando.series.answers import call
from glissando.series.asking import ask, draw_paths
from glissando.series.batches import Floats, Scales, Steps, require_near, scales_of
from glissando.series.future import ahead_of
from glissando.series.model import SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Clock, Encoding, Panel
from glissando.series.reading import read_panel
from glissando.series.task import windows_of
from glissando.storage import publish_directory, write_atomic

#: times that are forecast of a series at most
_MOST_TIMES = 100_000


@dataclass(frozen=True)
class SeriesRun:
    """A trained model and how it reads tables."""

    model: SeriesModel
    encoding: Encoding
    data: SeriesData

    @classmethod
    def open(cls, path: str | Path, trust_imports: bool = False) -> SeriesRun:
        """Raises RunError for what is no run of series, or a model that was saved without data."""
        run = Run.open(path)
        config = run.read_config(trust_imports, kind="series")
        if "data" not in config or "encoding" not in config:
            raise RunError(f"{path} is a model that was saved without data: load it with SeriesModel.load")
        model = SeriesModel.load(path, trust_imports)
        data = from_dict(SeriesData, config["data"], "data")
        return cls(model, from_dict(Encoding, config["encoding"], "encoding"), data)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write a run directory that `open` opens, whole or not at all.

        Raises RunError, before anything is written, where there is something at `path` that may not be replaced.
        """
        target = Path(path).expanduser()
        require_replaceable(target, overwrite)
        config = {"model": self.model.config, "data": self.data, "encoding": self.encoding}
        plain = {"kind": "series", **{name: to_dict(part) for name, part in config.items()}}
        publish_directory(target, lambda folder: Run.create(folder).write_model(self.model.state_dict(), plain))

    def reading(self, options: Mapping[str, Any]) -> SeriesRun:
        """The same model, which reads tables by other `options` of SeriesData."""
        return replace(self, data=from_dict(SeriesData, {**to_dict(self.data), **options}, "data"))

    def read(self, source: Any) -> Panel:
        """A new table, or frame, as the model reads it. Raises DataError for what it cannot read."""
        panel, _ = read_panel(self.data, source, self.encoding)
        require_near(panel, self.encoding, self.scales)
        return panel

    @property
    def scales(self) -> Scales:
        return scales_of(self.model)

    def steps(self, panel: Panel) -> Steps:
        return Steps.of(panel, self.scales, self.model.config.forecast)

    def horizons(self, clock: Clock, horizon: str | float | Sequence[str | float], every: str | float | None) -> Floats:
        """(J,) ascending times in the panel's unit: `horizon` itself, or every `every` up to it; or several."""
        if not isinstance(horizon, str | int | float):
            if every is not None or not len(horizon):
                raise ConfigError(
                    f"horizon is {horizon!r} and every is {every!r}: give several horizons, or one and every"
                )
            return np.array(sorted({clock.span(each, "horizon") for each in horizon}))
        end = clock.span(horizon, "horizon")
        if every is None:
            return np.array([end])
        step = clock.span(every, "every")
        count = int(np.floor(end / step * (1 + 1e-9)))
        if not count:
            raise ConfigError(f"every is {every!r} and the horizon {horizon!r}, which is less: give a longer horizon")
        if count > _MOST_TIMES:
            raise ConfigError(
                f"every is {every!r} and the horizon {horizon!r}, which are {count:,} times of each series, and "
                f"{_MOST_TIMES:,} are the most: give a longer step"
            )
        return np.array([step * (number + 1) for number in range(count)])


class Forecast(NamedTuple):
    """G forecasts, one of each series, time and channel, in this order.

    names      the user's names of the group, if there is one, the time, the channel and the value
    value      (G,) means
    levels     of the quantiles
    quantiles  (G, L)
    samples    (G, n) of n paths drawn over all times and channels of a series together
    """

    names: tuple[str | None, str, str, str]
    series: list[str]
    time: list[str]
    channel: list[str]
    value: Floats
    levels: Sequence[float]
    quantiles: Floats
    samples: Floats

    def columns(self) -> dict[str, Sequence[Any]]:
        """The columns of the table that `write` writes, by name."""
        group, time, channel, value = self.names
        labels = {} if group is None else {group: self.series}
        found: dict[str, Sequence[Any]] = {**labels, time: self.time, channel: self.channel, value: self.value.tolist()}
        found |= {f"q{level:g}": each.tolist() for level, each in zip(self.levels, self.quantiles.T, strict=True)}
        return found | {f"sample_{n + 1}": each.tolist() for n, each in enumerate(self.samples.T)}

    def frame(self) -> Any:
        """The same as a frame of pandas."""
        return _frame(self.columns())

    def write(self, out: str | Path) -> None:
        """A CSV. Raises RunError where a file exists."""
        write_columns(self.columns(), out)


class Classes(NamedTuple):
    """The classes of S series, or of their N steps.

    names          the user's names of the group, if there is one, the time of steps, and the class
    time           None where each series has a class
    classes        names of the classes
    probabilities  (G, C)
    """

    names: tuple[str | None, str, str]
    series: list[str]
    time: list[str] | None
    classes: list[str]
    probabilities: Floats

    @property
    def predicted(self) -> list[str]:
        """(G,) the likeliest class of each."""
        return [self.classes[number] for number in self.probabilities.argmax(-1)]

    def columns(self) -> dict[str, Sequence[Any]]:
        """The columns of the table that `write` writes, by name."""
        group, time, name = self.names
        labels: dict[str, Sequence[Any]] = {} if group is None else {group: self.series}
        labels |= {} if self.time is None else {time: self.time}
        each = {f"p_{c}": p.tolist() for c, p in zip(self.classes, self.probabilities.T, strict=True)}
        return labels | {name: self.predicted} | each

    def frame(self) -> Any:
        """The same as a frame of pandas."""
        return _frame(self.columns())

    def write(self, out: str | Path) -> None:
        """A CSV. Raises RunError where a file exists."""
        write_columns(self.columns(), out)


def _frame(columns: dict[str, Sequence[Any]]) -> Any:
    import pandas

    return pandas.DataFrame(columns)


def require_absent(out: str | Path) -> Path:
    """The path of a file to write. Raises RunError where there is one."""
    out = Path(out).expanduser()
    if out.exists():
        raise RunError(f"{out} exists; nothing is overwritten: name another file")
    return out


def write_columns(columns: dict[str, Sequence[Any]], out: str | Path) -> None:
    """A CSV. Raises RunError where a file exists."""
    out = require_absent(out)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    rows = zip(*columns.values(), strict=True)
    writer.writerows([f"{cell:.8g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    write_atomic(out, text.getvalue().encode())


def forecast(
    run: SeriesRun,
    panel: Panel,
    horizon: str | float | Sequence[str | float],
    every: str | float | None = None,
    quantiles: Sequence[float] = (),
    samples: int = 0,
    future: Any = None,
    seed: int = 0,
) -> Forecast:
    """Forecasts of every series of the panel after its last step.

    Means and quantiles are those of each time alone. Samples are paths over all times together, of which the sum of a
    day can be taken: each value that is drawn is read as an observation at its time before the next one is drawn, and
    the channels of one time are drawn independently of each other, given the path before.

    Args:
        run: A model of task forecast.
        panel: As run.read reads a table.
        horizon: How far, such as 24h, or a number in the unit of the column of times; or several.
        every: The step between the times that are forecast, up to the horizon; None: the horizon alone.
        quantiles: Levels of the quantiles.
        samples: Number of paths.
        future: File or frame with the known-future columns at the times that are forecast.
        seed: Of the paths.

    Raises:
        ConfigError: The model does not forecast, has no spread, or a duration cannot be read.
        DataError: `future` lacks a column, or a time of a series.
    """
    model, encoding = run.model, run.encoding
    if encoding.task != "forecast":
        raise ConfigError(f"the model's task is {encoding.task}, which has no horizon: leave horizon and every out")
    if samples < 0:
        raise ConfigError(f"samples is {samples}: give the number of paths to draw, or 0 for none")
    times = run.horizons(panel.clock, horizon, every)
    steps = run.steps(panel)
    at = np.r_[np.flatnonzero(steps.first.numpy())[1:], len(steps.first)] - 1
    ahead = _ahead(run, panel, times, future)
    asked = torch.from_numpy(np.broadcast_to(times, (len(at), len(times))).copy())
    params = ask(model, steps, at, asked, ahead, run.data.window).transpose(1, 2)  # (S, O, J, P)
    head = model.distribution
    spread = head.quantile(params.transpose(1, 2), quantiles).transpose(1, 2) if quantiles else params[..., :0]
    size = params.shape[:3]
    paths = torch.empty(*size, 0, dtype=torch.float64)
    if samples:
        generator = torch.Generator(model.output_scale.device).manual_seed(seed)
        drawn = draw_paths(model, steps, at, times.tolist(), ahead, run.data.window, samples, generator)
        paths = drawn.permute(0, 3, 2, 1)  # (S, n, J, O) -> (S, O, J, n)
    _require_finite(params)
    data, (series, outputs, count) = run.data, size
    # by series, time and channel
    rows: list[Tensor] = [each.transpose(1, 2).flatten(0, 2) for each in (spread, paths)]
    value = head.mean(params.transpose(1, 2)).flatten()
    which = np.repeat(np.arange(series), count * outputs)
    last = steps.time.numpy()[at]
    when = (last[:, None] + times).repeat(outputs, 1).flatten()
    names = (data.group, data.time or "step", data.channel or "channel", data.value or "value")
    if len(set(names)) < len(names):
        raise ConfigError(f"the columns of the forecast would be {', '.join(map(str, names))}: rename the table's")
    return Forecast(
        names, [panel.names[s] for s in which], panel.clock.written(which.tolist(), when.tolist()),
        encoding.target * (series * count), value.double().numpy(), tuple(quantiles), rows[0].double().numpy(),
        rows[1].numpy(),
    )  # fmt: skip


def at_steps(run: SeriesRun, panel: Panel, quantiles: Sequence[float] = ()) -> Forecast | Classes:
    """What a regression or a classification predicts of the panel's steps, or of its series.

    Raises ConfigError for a model that forecasts.
    """
    data, encoding, model = run.data, run.encoding, run.model
    if encoding.task == "forecast":
        raise ConfigError("the model forecasts: say how far with --horizon, such as --horizon 24h")
    if encoding.classes and quantiles:
        raise ConfigError("the model predicts classes, which have no quantiles: leave quantiles out")
    y = _answers(run, panel)
    _require_finite(y)
    step = np.arange(len(panel.times))
    series = panel.series if len(y) == len(step) else np.arange(len(panel.names))
    names, time = [panel.names[s] for s in series], data.time or "step"
    written = panel.clock.written(panel.series.tolist(), panel.times.tolist()) if len(y) == len(step) else None
    if encoding.classes:
        p = y.softmax(-1).numpy()
        return Classes((data.group, time, encoding.target[0]), names, written, encoding.classes, p)
    assert written is not None
    head, targets = model.distribution, len(encoding.target)
    spread = head.quantile(y, quantiles) if quantiles else y[..., :0]
    return Forecast(
        (data.group, time, "channel", "value"), [name for name in names for _ in range(targets)],
        [each for each in written for _ in range(targets)], encoding.target * len(step),
        head.mean(y).flatten().numpy(), tuple(quantiles), spread.flatten(0, 1).numpy(),
        np.empty((targets * len(step), 0)),
    )  # fmt: skip


@torch.no_grad()
def _answers(run: SeriesRun, panel: Panel) -> Tensor:
    """The parameters (N, O, P) or the logits (N, C) of each step, or (S, C) of each series, float64."""
    per_series = run.encoding.task == "classification" and run.encoding.label == "series"
    windows = windows_of(panel._replace(labels=None, target=None), run.data, run.encoding, run.scales)
    found: Tensor | None = None
    for batch in windows.scoring():
        y = call(run.model, batch).cpu().double()
        if not run.encoding.classes and run.model.config.head == "point":
            y = y.unsqueeze(-1)
        rows, y = (windows.steps.series[batch.index[:, 0]], run.model.pooled(y, batch.mask)) if per_series else (
            batch.index[batch.mask], y[batch.mask]
        )  # fmt: skip
        if found is None:
            size = len(panel.names) if per_series else len(panel.times)
            found = torch.full((size, *y.shape[1:]), torch.nan, dtype=torch.float64)
        found[rows] = y
    assert found is not None, "a panel has steps"
    return found


def predict(
    run: SeriesRun, panel: Panel, horizon: Any = None, quantiles: Sequence[float] = (), **options: Any
) -> Forecast | Classes:
    """What the run's task predicts of a panel: forecasts at horizons, or numbers or classes of its steps or series.

    Args:
        run: The trained model.
        panel: As run.read reads a table.
        horizon: As in `forecast`.
        quantiles: As in `forecast`.
        **options: The others of `forecast`.
    """
    if horizon is None:
        if unused := [name for name, value in options.items() if value]:
            raise ConfigError(f"{unused[0]} is of forecasts, and no horizon was given: give one, or leave it out")
        return at_steps(run, panel, quantiles)
    return forecast(run, panel, horizon, quantiles=quantiles, **options)


def _require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise NotFiniteError(
            "the predictions are not all finite: the training diverged, or the table has values far beyond those "
            "trained on. Train again with a lower training.optimizer.learning_rate"
        )


def _ahead(run: SeriesRun, panel: Panel, times: Floats, future: Any) -> Tensor | None:
    """(S, J, U) known-future columns at the times that are asked about."""
    names = run.encoding.future
    if not names:
        if future is not None:
            raise ConfigError("the model reads no known-future columns (data.future): leave --future out")
        return None
    if future is None:
        raise ConfigError(
            f"the model reads {', '.join(names)}, which are known in advance: name the table that has them at the "
            "times to forecast with --future FILE"
        )
    return torch.from_numpy(ahead_of(run.data, run.encoding, panel, times, future))
