"""What estimators share: scikit-learn's conventions of parameters, training in memory, saving and loading.

Parameters are those of the constructor and are stored as they are given, `fit` returns the estimator and sets what ends
in an underscore, so that scikit-learn's `clone`, `cross_val_score` and searches take them; scikit-learn is not needed.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from glissando.config import flat, from_dict, hints_of, merge, to_dict
from glissando.errors import ConfigError, InputError, unknown_name
from glissando.presets import load_preset
from glissando.runs import Run
from glissando.series import tables
from glissando.training.fit import train
from glissando.training.loop import Hook
from glissando.training.progress import Progress
from glissando.training.state import restore_rng, rng_state


class Estimator:
    """A subclass has these parameters beside its own.

    preset   of its kind
    options  more options, as the command line has them
    seed     of weights, the part that is held out and the order of training
    verbose  whether training shows its progress
    """

    run_: Any
    preset: str
    options: Mapping[str, Any] | None
    seed: int
    verbose: bool

    #: kind of the runs, and folder of the presets
    _kind: ClassVar[str]
    #: classes of a run, of its configuration, and of its model's options
    _classes: ClassVar[tuple[Any, Any, Any]]
    #: options of the model that follow from the table
    _sizes: ClassVar[tuple[str, ...]]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's parameters."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Raises UnknownNameError for one that the constructor has not."""
        for name, value in params.items():
            if name not in self._names():
                raise unknown_name(f"parameter of {type(self).__name__}", name, self._names())
            setattr(self, name, value)
        return self

    @classmethod
    def _names(cls) -> list[str]:
        return list(inspect.signature(cls).parameters)

    @classmethod
    def _data(cls) -> list[str]:
        """The parameters that are options of the data."""
        options = hints_of(hints_of(cls._classes[1])["data"])
        return [name for name in cls._names() if name in options]

    def __repr__(self) -> str:
        usual = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        changed = [f"{name}={value!r}" for name, value in self.get_params().items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join(changed)})"

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write a directory that `load` and the commands open.

        Raises RunError where there is something at `path`, InputError for parameters that are no plain values.
        """
        self._fitted().save(path, overwrite, estimator=_plain(self.get_params(), "parameters"))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote, or a run of the command's, whose options become parameters.

        Raises RunError for what is no such run, ConfigError for a run of another task.
        """
        run = cls._classes[0].open(path)
        cls._require_own(run, path)
        config = Run.open(path).read_config(kind=cls._kind)
        made = cls(**(config.get("estimator") or cls._parameters(config)))
        made._set(run)
        return made

    @classmethod
    def _require_own(cls, run: Any, path: str | Path) -> None:
        """Raise ConfigError for a run that another estimator's is; by default none is."""
        return

    def _fitted(self) -> Any:
        if not hasattr(self, "run_"):
            raise ConfigError(f"this {type(self).__name__} is not fitted: call fit with a frame first")
        return self.run_

    def _set(self, run: Any) -> None:
        self.run_ = run

    def _train(self, more: Mapping[str, Any], *sources: Any) -> Any:
        """The run of a training, in a directory that lasts as long.

        Args:
            more: Options of the configuration, before the user's own.
            *sources: Frames, or files, in the place of those that the configuration names.
        """
        opened, config, _ = self._classes
        data = {name: getattr(self, name) for name in self._data() if getattr(self, name) is not None}
        last = {"preset": self.preset, "data": data, "training": {"seed": self.seed}}

        class InMemory(config):  # type: ignore[misc, valid-type]
            """A run whose table is the frame."""

            def task(self, resumed: Run | None = None) -> Any:
                return self.task_of(*sources)

        values = merge(config, load_preset(self.preset, self._kind), last, more, self.options or {})
        before = rng_state()
        try:  # training seeds every global generator: the caller's go on as if it had not
            with tempfile.TemporaryDirectory() as folder:
                path, hook = Path(folder) / "run", Progress() if self.verbose else Hook()
                train(from_dict(InMemory, {"data": {}, **values}), path, hook)
                return opened.open(path)
        finally:
            restore_rng([before], 0)

    @classmethod
    def _parameters(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of an estimator that would train as a run did; `options` has what its preset does not."""
        _, kind, model = cls._classes
        names = cls._names()
        preset = config.get("preset") or str(inspect.signature(cls).parameters["preset"].default)
        sizes = {name: config["model"][name] for name in cls._sizes}
        data = {name: config["data"][name] for name in cls._data()}
        base = from_dict(kind, {"data": {}, **merge(kind, load_preset(preset, cls._kind), {"data": data})}).as_dict()
        base["model"] = to_dict(from_dict(model, {**base["model"], **sizes}, "model"))
        base["training"]["seed"] = data["seed"]
        parameters, known = (
            flat({name: each.get(name, {}) for name in ("data", "model", "training")}) for each in (config, base)
        )
        options = {
            name: value for name, value in parameters.items()
            if (name not in known or known[name] != value) and name not in ("data.path", "data.task")
        }  # fmt: skip
        made = {**data, "preset": preset, "options": options or None}
        if "head" in names:
            made["head"] = options.pop("model.head", None)
        return made


def _plain(value: Any, where: str) -> Any:
    """A parameter as YAML has it. Raises InputError for what it has not."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part, f"{where}[{name!r}]") for name, part in value.items()}
    if isinstance(value, Sequence):
        return [_plain(part, where) for part in value]
    raise InputError(f"{where} is a {type(value).__name__}, which cannot be saved: give texts, numbers and lists")


def typed(answer: Any, group: str | None, time: str | None, *sources: Any) -> Any:
    """Groups and times of a frame as the user's frames have them, in their columns or index, so that both can be
    joined; those of files stay texts."""
    import pandas

    frames = [tables.flat(tables.as_pandas(each)) for each in sources if not isinstance(each, str | Path | None)]
    columns = [{str(name).strip(): frame.iloc[:, n] for n, name in enumerate(frame.columns)} for frame in frames]
    if cells := [each[group] for each in columns if group in each]:
        named = pandas.concat(cells, ignore_index=True) if len(cells) > 1 else cells[0]
        known = tables.names(tables.read_table(named.to_frame(group)), str(group), "group")
        _, first = np.unique(known.codes, return_index=True)
        row = dict(zip(known.names, first, strict=True))
        if all(name in row for name in answer[group]):
            answer[group] = named.take([row[name] for name in answer[group]]).array
    kind = next((each[time].dtype for each in columns if time in each), None)
    if kind is None or time not in answer:
        return answer
    if isinstance(kind, pandas.DatetimeTZDtype) or kind.kind == "M":
        times, zone = pandas.to_datetime(answer[time], utc=True, format="ISO8601"), getattr(kind, "tz", None)
        answer[time] = times.dt.tz_convert(zone) if zone is not None else times.dt.tz_localize(None)
    elif kind.kind in "iuf":
        answer[time] = pandas.to_numeric(answer[time])
    return answer
