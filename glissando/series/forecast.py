"""A run and a table -> what comes after the table's end, in the user's own names of groups, times and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import ConfigError, DataError, NotFiniteError, RunError
from glissando.sampling import require_seed
from glissando.series.answers import outputs
from glissando.series.asking import ask, draw_paths
from glissando.series.batches import Floats, Scales, Steps, require_near, scales_of
from glissando.series.model import SeriesModel
from glissando.series.options import SeriesData
from glissando.series.panel import Encoding, Panel
from glissando.series.reading import read_panel
from glissando.series.table_model import TableRun
from glissando.series.tables import read_table
from glissando.series.task import windows_of
from glissando.storage import write_atomic

#: roundings of float64 by which a time of a known-future column may differ
_ROUNDINGS = 4 * np.finfo(np.float64).eps


@dataclass(frozen=True)
class SeriesRun(TableRun):
    """A trained model and how it reads tables."""

    model: SeriesModel
    encoding: Encoding
    data: SeriesData
    _classes = SeriesModel, Encoding, SeriesData

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


# ---------------------------------------------------------------------- the table of an answer


def answer_table(columns: Sequence[tuple[str | None, str | None, Any]]) -> Any:
    """A frame of pandas of columns (user's name, usual name, cells): a usual name that the user has, too, gets an
    underscore, and a column without either is left out."""
    import pandas

    users, made = {user for user, _, _ in columns}, dict[str, Any]()
    for user, usual, cells in columns:
        if (name := usual if user is None else user) is not None:
            while user is None and (name in users or name in made):
                name += "_"
            made[name] = cells
    return pandas.DataFrame(made)


def placed(run: SeriesRun, panel: Panel, series: np.ndarray, times: Floats | None) -> list[tuple[Any, ...]]:
    """The columns of `answer_table` with the names of series (G,), and with the times (G,) of all but whole series."""
    names = (run.data.group, None, np.array(panel.names, object)[series])
    return [names] if times is None else [names, (run.data.time, "step", panel.clock.written(series, times))]


def require_absent(out: str | Path) -> Path:
    """The path of a file to write. Raises RunError where there is one."""
    out = Path(out).expanduser()
    if out.exists():
        raise RunError(f"{out} exists; nothing is overwritten: name another file")
    return out


def write_table(table: Any, out: str | Path, digits: str | None = "%.8g") -> None:
    """A CSV of a frame of pandas. Raises RunError where a file exists."""
    out = require_absent(out)
    write_atomic(out, table.to_csv(index=False, float_format=digits, lineterminator="\n").encode())


# ---------------------------------------------------------------------- what is asked


def require_answerable(
    run: SeriesRun, horizon: Any = None, every: Any = None, quantiles: Sequence[float] = (), samples: int = 0,
    future: Any = None,
) -> None:  # fmt: skip
    """Raises ConfigError for options of `predict` that the run cannot serve, whatever the table."""
    encoding, head = run.encoding, run.model.distribution
    if horizon is not None:
        if encoding.task != "forecast":
            raise ConfigError(f"the model's task is {encoding.task}, which has no horizon: leave horizon and every out")
        run.horizons(horizon, every)
        if encoding.future and future is None:
            raise ConfigError(
                f"the model reads {', '.join(encoding.future)}, which are known in advance: name the table that has "
                "them at the times to forecast with --future FILE"
            )
        if future is not None and not encoding.future:
            raise ConfigError("the model reads no known-future columns (data.future): leave --future out")
    else:
        unused = {"every": every, "samples": samples or None, "future": future}
        for name in (name for name, value in unused.items() if value is not None):
            raise ConfigError(f"{name} is of forecasts, and no horizon was given: give one, or leave it out")
        if encoding.task == "forecast":
            raise ConfigError("the model forecasts: say how far with --horizon, such as --horizon 24h")
        if encoding.classes and quantiles:
            raise ConfigError("the model predicts classes, which have no quantiles: leave quantiles out")
    if samples < 0:
        raise ConfigError(f"samples is {samples}: give the number of paths to draw, or 0 for none")
    params = head.parameters(torch.zeros(1, head.width))
    if quantiles:
        head.quantile(params, quantiles)
    if samples:
        head.sample(params, 1)


def predict(
    run: SeriesRun, panel: Panel, horizon: str | float | Sequence[str | float] | None = None,
    every: str | float | None = None, quantiles: Sequence[float] = (), samples: int = 0, future: Any = None,
    seed: int = 0,
) -> Any:  # fmt: skip
    """What the run's task predicts of a panel: a frame of pandas with the user's names.

    Of a forecast, what comes after each series' last step: a row a series, time and channel, with the mean as value.
    Means and quantiles are those of each time alone. Samples are paths over all times together, of which the sum of a
    day can be taken: each value that is drawn is read as an observation at its time before the next one is drawn, and
    the channels of one time are drawn independently of each other, given the path before. Of a regression or a
    classification, the target at each step, or the class of each step or series with the probability of each, p_NAME.

    Args:
        run: The trained model.
        panel: As run.read reads a table.
        horizon: Of a forecast, how far: such as 24h, or a number in the unit of the column of times; or several.
        every: The step between the times that are forecast, up to the horizon; None: the horizon alone.
        quantiles: Levels of the quantiles, each of which is a column q0.1.
        samples: Number of paths, each of which is a column sample_1.
        future: File or frame with the known-future columns at the times that are forecast.
        seed: Of the paths.

    Raises:
        ConfigError: The run's task has no such options, its head no spread, or a duration cannot be read.
        DataError: `future` lacks a column, or a time of a series.
    """
    require_answerable(run, horizon, every, quantiles, samples, future)
    if run.encoding.classes:
        p, classes, whole = probabilities(run, panel), run.encoding.classes, run.encoding.label == "series"
        series, moments = (np.arange(len(p)), None) if whole else (panel.series, panel.times)
        likeliest = (run.encoding.target[0], None, np.array(classes, object)[p.argmax(-1)])
        each = [(None, f"p_{name}", column) for name, column in zip(classes, p.T, strict=True)]
        return answer_table([*placed(run, panel, series, moments), likeliest, *each])
    if horizon is None:
        params = run.model.params(_answers(run, panel))
        return _number_table(run, panel, panel.series, panel.times, params, quantiles)
    model, times, steps = run.model, run.horizons(horizon, every), run.steps(panel)
    at = np.r_[np.flatnonzero(steps.first.numpy())[1:], len(steps.first)] - 1
    ahead = None
    if future is not None:
        ahead = torch.from_numpy(ahead_of(run.data, run.encoding, panel, times, future))
    asked = torch.from_numpy(np.broadcast_to(times, (len(at), len(times))).copy())
    params = ask(model, steps, at, asked, ahead, run.data.window)  # (S, J, O, P)
    paths: Sequence[Tensor] = ()
    if samples:
        require_seed(seed)
        generator = torch.Generator(model.output_scale.device).manual_seed(seed)
        drawn = draw_paths(model, steps, at, times.tolist(), ahead, run.data.window, samples, generator)
        paths = drawn.unbind(1)  # each (S, J, O)
    when = steps.time.numpy()[at][:, None] + times
    return _number_table(run, panel, np.repeat(np.arange(len(at)), len(times)), when.ravel(), params, quantiles, paths)


def _number_table(
    run: SeriesRun, panel: Panel, series: np.ndarray, times: Floats, params: Tensor, quantiles: Sequence[float],
    paths: Sequence[Tensor] = (),
) -> Any:  # fmt: skip
    """The table of G answers (..., O, P), of the series (G,) at the times (G,)."""
    require_finite(params)
    data, head, targets = run.data, run.model.distribution, run.encoding.target
    parts = {"value": head.mean(params)}
    if quantiles:
        spread = head.quantile(params, quantiles).unbind(-1)
        parts |= {f"q{level:g}": part for level, part in zip(quantiles, spread, strict=True)}
    parts |= {f"sample_{number}": path for number, path in enumerate(paths, 1)}
    columns: list[tuple[Any, str, Any]] = [
        (user, usual, np.repeat(cells, len(targets))) for user, usual, cells in placed(run, panel, series, times)
    ]
    columns.append((data.channel, "channel", targets * len(series)))
    for name, part in parts.items():
        columns.append((data.value if name == "value" else None, name, part.flatten().double().numpy()))
    return answer_table(columns)


def probabilities(run: SeriesRun, panel: Panel) -> Floats:
    """(N, C) those of the classes of the panel's steps, or (S, C) of its series."""
    logits = _answers(run, panel)
    require_finite(logits)
    return np.asarray(logits.softmax(-1).numpy())


def ahead_of(data: SeriesData, encoding: Encoding, panel: Panel, after: Floats, source: Any) -> Floats:
    """(S, J, U) the columns of encoding.future, `after` (J,) each series' last step.

    Args:
        data: How the panel was read.
        encoding: Names of the columns.
        panel: The series.
        after: (J,) times since the last step, in the panel's unit.
        source: File or frame with a row for each series and time. Without a column of groups, its rows are of every
            series; without one of times, row j is the j-th row after a series' last.

    Raises DataError for a column or a time that is missing, and for a value that is none.
    """
    table, names = read_table(source, data), encoding.future
    data = replace(
        data, group=data.group if data.group in table.columns else None, columns=names, channel=None, value=None,
        categorical=[], static=[], static_path=None, future=[], target=[], task=None, label=None,
    )  # fmt: skip
    known, _ = read_panel(data, table, Encoding(columns=names, time_form=encoding.time_form, unit=encoding.unit))
    made, index = np.empty((len(panel.names), len(after), len(names))), {n: s for s, n in enumerate(known.names)}
    for s, (name, last) in enumerate(zip(panel.names, panel.times[panel.starts[1:] - 1], strict=True)):
        since, asked, first = np.empty(0), last + after, 0
        roundings, origin = asked, panel.clock.origins[s]
        if (of := index.get(name if data.group else "")) is not None:
            first, start = known.starts[of], known.clock.origins[of]
            offset = last + 1 if data.time is None else float(Decimal(str(start)) - Decimal(str(origin)))
            offset /= 1e9 if encoding.time_form == "date" else 1
            since = known.times[first : known.starts[of + 1]] + offset
            if not isinstance(start, int | np.integer):  # what was computed with fractions is rounded as its size is
                roundings = asked + abs(float(start))
        place = np.searchsorted((since[1:] + since[:-1]) / 2, asked)  # the nearest of each
        near = np.abs(since[place] - asked) <= _ROUNDINGS * roundings if len(since) else asked < 0
        if not near.all():
            written = panel.clock.written([s], [last + after[np.argmin(near)]])[0]
            of_group = f" of {data.group} {name!r}" if data.group else ""
            raise DataError(
                f"{table.source} has no row{of_group} at {data.time or 'step'} {written}, which is forecast: add it"
            )
        made[s] = known.values[first + place]
        for j, column in np.argwhere(np.isnan(made[s]))[:1]:
            raise DataError(
                f"{known.place(first + place[j])}, column {names[column]!r}: the value is missing, and is needed "
                "there: fill it in"
            )
    return made


def _answers(run: SeriesRun, panel: Panel) -> Tensor:
    """What the model answers about each step, or each series, in their order."""
    at, y = outputs(run.model, windows_of(panel, run.data, run.encoding, run.scales))
    return y[at.argsort()].double()


def require_finite(answers: Tensor | float, what: str = "the predictions") -> None:
    """Raise NotFiniteError for answers, or a loss, that are not finite."""
    if not bool(torch.as_tensor(answers).isfinite().all()):
        raise NotFiniteError(
            f"{what} are not all finite: the training diverged, or the table has values far beyond those trained on. "
            "Train again with a lower training.optimizer.learning_rate"
        )
