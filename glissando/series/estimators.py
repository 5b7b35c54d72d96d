"""Forecaster and Classifier: series models with scikit-learn's conventions, for frames and arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from glissando.errors import ConfigError, DataError, InputError
from glissando.series import tables
from glissando.series.answers import answers
from glissando.series.forecast import SeriesRun, predict, probabilities
from glissando.series.model import SeriesConfig
from glissando.series.table_estimator import Estimator, typed
from glissando.series.task import SeriesRunConfig, windows_of


class _Estimator(Estimator):
    run_: SeriesRun
    _task: ClassVar[str]

    _kind = "series"
    _classes = SeriesRun, SeriesRunConfig, SeriesConfig
    _sizes = (
        "inputs", "outputs", "targets", "forecast", "categories", "static", "static_categories", "future", "scale",
    )  # fmt: skip

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks of an estimator: called by it alone."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        is_classifier = self._task == "classification"
        return Tags(
            estimator_type="classifier" if is_classifier else None,
            target_tags=TargetTags(required=False, one_d_labels=is_classifier),
            classifier_tags=ClassifierTags() if is_classifier else None,
            input_tags=InputTags(three_d_array=is_classifier, allow_nan=True),
            non_deterministic=False,
        )

    @classmethod
    def _require_own(cls, run: SeriesRun, path: str | Path) -> None:
        if (run.encoding.task == "classification") != (cls._task == "classification"):
            raise ConfigError(f"{path} is a run of {run.encoding.task}, and {cls.__name__} is for {cls._task}")


class Forecaster(_Estimator):
    """Forecasts of the numeric channels of a frame.

    Args:
        group: Column that names the series of a row; without it, the frame is one series.
        time: Column of times, dates or numbers; without it, each row is a step.
        time_unit: Unit of numeric times.
        channel: Of a long frame: the column that names what was measured.
        value: Of a long frame: the column with what was measured.
        columns: Channels to read; by default all columns that nothing else names.
        categorical: Columns of categories.
        static: Columns that do not vary within a series.
        future: Columns that are known in advance.
        target: Channels to forecast; by default all numeric ones.
        head: point, quantiles, gaussian or student; by default that of the preset.
        preset: liquid-series or attention-series.
        options: More options, as the command line has them: {"model.hidden_size": 32, "training.seconds": 60}.
        seed: Of the weights, of the part that is held out and of the order of training.
        verbose: Whether training shows its progress.
    """

    _task = "forecast"

    def __init__(
        self, group: str | None = None, time: str | None = None, time_unit: str | None = None,
        channel: str | None = None, value: str | None = None, columns: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None, static: Sequence[str] | None = None,
        future: Sequence[str] | None = None, target: Sequence[str] | None = None, head: str | None = None,
        preset: str = "liquid-series", options: Mapping[str, Any] | None = None, seed: int = 0, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.time, self.time_unit = group, time, time_unit
        self.channel, self.value, self.columns, self.categorical = channel, value, columns, categorical
        self.static, self.future, self.target, self.head = static, future, target, head
        self.preset, self.options, self.seed, self.verbose = preset, options, seed, verbose

    def fit(self, frame: Any, y: None = None) -> Self:
        """Train on a frame of pandas or polars, or a file; a part of it is held out, by which the best weights are
        chosen."""
        model = {} if self.head is None else {"model": {"head": self.head}}
        self._set(self._train({"data": {"task": "forecast"}, **model}, frame))
        return self

    def predict(
        self, frame: Any, horizon: Any = None, every: Any = None, quantiles: Sequence[float] = (), samples: int = 0,
        future: Any = None, seed: int = 0,
    ) -> Any:  # fmt: skip
        """Forecasts after each series' last row, as a frame of pandas.

        Args:
            frame: Frame or file with the past.
            horizon: How far: a text such as 24h, a number in the unit of the times, or several; by default one median
                step of the training.
            every: The step between the times that are forecast; by default the horizon alone.
            quantiles: Levels, each of which is a column.
            samples: Number of joint paths, each of which is a column.
            future: Frame or file with the known-future columns at the times that are forecast.
            seed: Of the paths.
        """
        run = self._fitted()
        horizon = float(run.model.time_scale) if horizon is None else horizon
        table = predict(run, run.read(frame), horizon, every, quantiles, samples, future, seed)
        return typed(table, run.data.group, run.data.time, frame)

    def score(self, frame: Any, y: None = None) -> float:
        """The mean over channels of R^2, of each step's forecast of the next: 1 minus the mean square error over the
        variance of the values."""
        run = self._fitted()
        panel = run.read(frame)
        forecast = answers(run.model, windows_of(panel, run.data, run.encoding, run.scales))
        predicted = run.model.distribution.mean(forecast.params).double().numpy()
        each = []
        for number in np.unique(forecast.channel):
            chosen = forecast.channel == number
            error, values = (predicted - forecast.target)[chosen], forecast.target[chosen]
            if values.min() == values.max():
                raise DataError(
                    f"{run.encoding.target[number]} is {values[0]:g} wherever it is scored: R^2 is not defined, give "
                    "a frame in which it varies"
                )
            each.append(1 - (error**2).mean() / values.var())
        return float(np.mean(each))


class Classifier(_Estimator):
    """Classes of series, or of their steps.

    `fit(frame)` reads a frame whose column `target` has the classes; `fit(X, y)` an array (n, channels, time), or
    (n, time) of one channel, or a list of arrays (channels, time) of different lengths, as aeon has it, where NaN is a
    value that was not observed.

    Args:
        group: Column that names the series of a row; without it, the frame is one series.
        time: Column of times, dates or numbers; without it, each row is a step.
        time_unit: Unit of numeric times.
        channel: Of a long frame: the column that names what was measured.
        value: Of a long frame: the column with what was measured.
        columns: Channels to read; by default all columns that nothing else names.
        categorical: Columns of categories.
        static: Columns that do not vary within a series.
        target: The column of classes.
        preset: liquid-series or attention-series.
        options: More options, as the command line has them.
        seed: Of the weights, of the part that is held out and of the order of training.
        verbose: Whether training shows its progress.

    `classes_` are the classes, sorted, which are the columns of `predict_proba`: as `y` had them, or, of a frame and of
    what was loaded, integers where all are whole numbers, else texts.
    """

    _task = "classification"
    classes_: np.ndarray

    def __init__(
        self, group: str | None = None, time: str | None = None, time_unit: str | None = None,
        channel: str | None = None, value: str | None = None, columns: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None, static: Sequence[str] | None = None,
        target: Sequence[str] | str | None = None, preset: str = "liquid-series",
        options: Mapping[str, Any] | None = None, seed: int = 0, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.time, self.time_unit = group, time, time_unit
        self.channel, self.value, self.columns, self.categorical = channel, value, columns, categorical
        self.static, self.target = static, target
        self.preset, self.options, self.seed, self.verbose = preset, options, seed, verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on a frame or a file, or on an array and the class of each of its series."""
        data: dict[str, Any] = {"task": "classification"}
        labels = None
        if y is not None:
            labels = np.asarray(y)
            if labels.dtype.kind == "f" and (labels % 1 > 0).any():
                raise InputError("Unknown label type: y has numbers with fractions, and classes are expected")
            X = _framed(X, labels)
            if (missing := np.flatnonzero(_names_of(labels) == "")).size:
                raise InputError(
                    f"y[{missing[0]}] is {tables.plain(labels[missing[0]])}, a missing class, as {missing.size} of "
                    f"{len(labels)} are: leave such series out"
                )
            if len(np.unique(labels)) < 2:
                raise InputError(f"y has one class, {tables.plain(labels[0])}: a classification needs two")
            columns = [name for name in X.columns if name.startswith("x")]
            data |= {"group": "series", "label": "series", "target": ["class"], "columns": columns}
        elif self.target is None:
            raise ConfigError("the column of classes is not named: give Classifier(target=...), or fit(X, y) an array")
        run: SeriesRun = self._train({"data": data}, X)
        self._set(run)
        if labels is not None:
            self.classes_ = np.unique(labels)
        return self

    def _set(self, run: SeriesRun) -> None:
        super()._set(run)
        names = run.encoding.classes
        whole = all(re.fullmatch("0|-?[1-9][0-9]*", name) for name in names)
        self.classes_ = np.array(sorted(map(int, names) if whole else names))

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, C) probabilities of `classes_`, for each series in the order of its first row, or for each step."""
        run = self._fitted()
        place = {name: number for number, name in enumerate(run.encoding.classes)}
        is_table = isinstance(X, str | Path) or hasattr(X, "columns")
        table = probabilities(run, run.read(X if is_table and not self._of_arrays else self._arrays(X)))
        return table[:, [place[name] for name in _names_of(self.classes_)]]

    def predict(self, X: Any) -> np.ndarray:
        """(n,) the likeliest class of each series, or of each step."""
        return self.classes_[self.predict_proba(X).argmax(-1)]

    @property
    def _of_arrays(self) -> bool:
        """Whether it was fitted with arrays."""
        run = self._fitted()
        channels = run.encoding.columns
        return run.data.group == "series" and channels == [f"x{k}" for k in range(len(channels))]

    def _arrays(self, X: Any) -> Any:
        """Arrays like those of `fit`, as a frame. Raises InputError for another number of channels."""
        frame, columns = _framed(X), self._fitted().encoding.columns
        if columns != (channels := [name for name in frame.columns if name != "series"]):
            fitted = f"arrays of {len(columns)}" if self._of_arrays else f"the columns {columns}"
            raise InputError(
                f"X is an array {np.shape(X)} of {len(channels)} channels, and this Classifier was fitted with "
                f"{fitted}: give the same channels in the same order"
            )
        return frame

    def score(self, X: Any, y: Any = None) -> float:
        """The accuracy, of series or of steps that have a class."""
        if y is not None:
            return float((_names_of(self.predict(X)) == _names_of(np.asarray(y))).mean())
        run = self._fitted()
        panel = run.read(X)
        if panel.labels is None:
            raise ConfigError(f"the frame has no column {run.encoding.target[0]!r}: nothing can be scored")
        known = panel.labels >= 0
        return float((probabilities(run, panel).argmax(-1) == panel.labels)[known].mean())


def _names_of(y: np.ndarray) -> np.ndarray:
    """The names (n,) that a run has for classes, empty for missing ones: 1, 1.0 and "1" have one."""
    import pandas

    names = tables.names(tables.read_table(pandas.DataFrame({"class": y})), "class")
    return np.array([*names.names, ""], object)[names.codes]


def _framed(X: Any, y: np.ndarray | None = None) -> Any:
    """An array (n, K, T), or (n, T), or a list of n arrays (K, T_i), as a frame with a row for each series and step:
    its columns are series, x0, x1, ... and class.

    Raises InputError for others.
    """
    import pandas

    if hasattr(X, "toarray"):
        raise InputError("X is a sparse matrix, and sparse input is not supported: give X.toarray()")
    is_list = isinstance(X, list | tuple) and all(np.ndim(each) == 2 for each in X)
    parts = [np.asarray(each) for each in X] if is_list else [np.asarray(X)]
    if any(map(np.iscomplexobj, parts)):
        raise InputError("Complex data not supported: X has complex numbers; give their parts as two channels")
    if not is_list and parts[0].ndim not in (2, 3):
        raise InputError(
            f"X is an array {np.shape(X)}. Reshape your data: give (n, channels, time), or (n, time), or a list of "
            "arrays (channels, time)"
        )
    if not is_list:
        parts = list(parts[0] if parts[0].ndim == 3 else parts[0][:, None])
    series = [each.astype(np.float64) for each in parts]
    if y is not None and y.shape != (len(series),):
        raise InputError(f"X has {len(series)} series with the classes {y.shape}: give a class for each series, (n,)")
    channels = len(series[0]) if series else 0
    if other := [number for number, each in enumerate(series) if len(each) != channels]:
        raise InputError(
            f"X[{other[0]}] has {len(series[other[0]])} channels, and X[0] has {channels}: give arrays (channels, time)"
        )
    lengths = [each.shape[1] for each in series]
    values = np.concatenate(series, 1) if series else np.empty((0, 0))
    made = {"series": np.repeat(np.arange(len(series)), lengths)} | {f"x{k}": row for k, row in enumerate(values)}
    return pandas.DataFrame(made if y is None else {**made, "class": np.repeat(y, lengths)})
