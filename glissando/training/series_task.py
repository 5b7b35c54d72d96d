"""Numeric series: a model predicts the columns of a table (glissando.data.series)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from glissando.config import from_dict, options, to_dict
from glissando.data.base import WHOLE, Shard, Split, shard_rows
from glissando.data.order import shuffled
from glissando.data.series import Prepared, SeriesData, Windows, prepare
from glissando.errors import ConfigError, DivergenceError
from glissando.evaluation.series import BATCH, Score, loss_of, predict, score
from glissando.runs import Run
from glissando.series import SeriesConfig, SeriesModel
from glissando.training.config import TrainingConfig, require_parts
from glissando.training.task import Loss, Task


@options
class SeriesRunConfig:
    """All of a run of series: what config.yaml holds, resolved.

    model    options of SeriesConfig; inputs, outputs and dt follow from the table
    classes  of a classification, the most frequent first
    imports  the Python files that registered what the run is made of (--import on the command line)
    """

    data: SeriesData
    preset: str | None = None
    model: Annotated[dict[str, Any], SeriesConfig] = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    classes: list[str] = field(default_factory=list)
    imports: list[Annotated[str, Field(strict=True)]] = field(default_factory=list)

    kind: ClassVar[str | None] = "series"
    command: ClassVar[str] = "series train"
    other_texts: ClassVar[str | None] = (
        "the table of the run with --{option} FILE, train anew into another directory, or measure the run on all of "
        "a file: glissando series evaluate RUN --file FILE"
    )
    start_from: ClassVar[str | None] = None
    grown: ClassVar[dict[str, list[float]]] = {}

    def check(self, processes: int) -> None:
        """Set the budget where none is given: 30 epochs. Raise ConfigError for what cannot be trained so."""
        t = self.training
        if not t.budgets:
            t.epochs = 30.0
        text_only = {"flops": t.flops, "neutral_kl": t.neutral_kl, "sample_prompt": t.sample_prompt}
        if unused := [name for name, value in text_only.items() if value]:
            raise ConfigError(f"training.{unused[0]} is an option of language models only: leave it out")
        require_parts(t, self.data.batch_size, processes)

    def task(self, resumed: Run | None = None) -> SeriesTask:
        """Read the table."""
        prepared = prepare(self.data, self.classes or None)
        self.data, self.classes = prepared.data, prepared.classes
        return SeriesTask(self, prepared)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values."""
        return {"kind": self.kind, **to_dict(self)}


def series_config(values: Mapping[str, Any]) -> SeriesRunConfig:
    """Raises ConfigError for what is no configuration of series."""
    return from_dict(SeriesRunConfig, {"data": {}, **values})


class SeriesTask(Task):
    """The squared error in units of the target's variance, or the cross-entropy of a class, summed over real steps."""

    keeps_best = True

    def __init__(self, config: SeriesRunConfig, prepared: Prepared) -> None:
        self.config, self.prepared, self.data = config, prepared, prepared.data
        self.notes: Sequence[str] = prepared.lines
        self.nominal = self.data.batch_size * prepared.train.mask.shape[1]
        figures = ("accuracy", "cross_entropy") if self.data.task == "classification" else ("rmse", "mae")
        self.columns = tuple(f"valid_{figure}/{target}" for target in self.data.target for figure in figures)

    @property
    def epoch_rows(self) -> int:
        return len(self.prepared.train.x)

    def new_model(self, saved: bool = False) -> SeriesModel:
        """With the table's sizes and scales; its options become those of the configuration."""
        model = build(self.config.model, self.prepared)
        self.config.model = to_dict(model.config)
        if self.config.training.precision == "64-true":
            model.double()
        with torch.no_grad():  # what does not fit together is found before anything is made
            predict(model, self.prepared.train.batch(slice(0, 1)), self.data)
        return model

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Windows]:
        """Every window once an epoch, in an order that is a function of data.seed and the epoch."""
        if split == "valid":
            held = self.prepared.valid
            yield from (held.batch(slice(i, i + BATCH)) for i in range(0, len(held.x), BATCH))
            return
        size, mine = self.data.batch_size, np.array(shard_rows(self.data.batch_size, shard))
        while True:
            rows = shuffled(step * size + mine, self.epoch_rows, self.data.seed)
            yield self.prepared.train.batch(torch.from_numpy(rows))
            step += 1

    def loss(self, model: SeriesModel, batch: Windows, state: Any = None, logged: bool = False) -> Loss:
        y, state = predict(model, batch, self.data, state, compiled=self.config.training.compile)
        return Loss(loss_of(model, y, batch), int(batch.mask.sum()), state=state)

    def score(
        self, model: SeriesModel, device: torch.device, stride: int = 1, shard: Shard = WHOLE
    ) -> dict[str, float]:
        """Every process scores all windows, which are few."""
        held = self.prepared.valid.batch(slice((stride - 1) // 2, None, stride))
        figures = score(model, held, self.data, self.prepared.classes)
        if not np.isfinite(figures.loss):
            raise DivergenceError(
                f"the held-out loss is {figures.loss}, and the last checkpoint is kept: train again with a lower "
                "training.optimizer.learning_rate"
            )
        row = {"valid_loss": figures.loss}
        for target, by_predictor in figures.figures.items():
            row |= {f"valid_{figure}/{target}": value for figure, value in by_predictor["model"].items()}
        return row

    def describe(self, batch: Windows) -> str:
        data, config = self.data, self.config.model
        times = f", time {data.time} ({config['dt']})" if data.time else ""
        return (
            f"{data.task} of {', '.join(data.target)} from {', '.join(data.columns)}{times}; {self.epoch_rows} windows "
            f"of {data.window} steps to train, {len(self.prepared.valid.x)} held out"
        )

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        """The figures of the best validation's weights on all that is held out."""
        path = run.best_checkpoint()
        if path is None or best_step < 0:
            return {"best": None}
        found = score(SeriesModel.load(path), self.prepared.valid, self.data, self.prepared.classes)
        return {"best": {"step": best_step, **found.as_dict()}}

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        best = summary["best"]
        if best is None or not summary["finished"]:
            return []
        return [
            f"{summary['steps']} steps, {summary['seconds']:.0f} s; the run's own weights are those of the best "
            f"validation, step {best['step']}:",
            Score(best["loss"], best["scored"], best["targets"]).table(),
            f"run: {name}   (try: glissando series evaluate {name})",
        ]


def build(options: Mapping[str, Any], prepared: Prepared) -> SeriesModel:
    """A new model of the table's sizes and scales. Where `options` do not say what time does, it is a number that is
    read and, where the mixers accept it, ages their states too."""
    data = prepared.data
    sizes = {"inputs": len(data.columns), "outputs": len(prepared.classes) or len(data.target)}
    for name, size in sizes.items():
        if options.get(name, size) != size:
            raise ConfigError(f"model.{name} is {options[name]}, and the table has {size}: leave it out")
    given = options.get("dt")
    if data.time is None and given not in (None, "step"):
        raise ConfigError(f"model.dt is {given!r}, and no column holds times: name it with data.time")
    if given in (None, "step") and data.time is not None:
        with torch.device("meta"):
            accepts = SeriesModel.from_config({**options, **sizes}).depth.accepts
        if given == "step" and "dt" not in accepts:
            raise ConfigError(
                "model.dt is 'step', and this model does not take time steps: use a mixer that does (liquid, delta) "
                "and block.conv_width 0, or leave model.dt out, so that the model reads the time as one more number"
            )
        if given is None:
            options = {**options, "dt": "both" if "dt" in accepts else "input"}
    model = SeriesModel.from_config({**options, **sizes})
    model.set_scales(**prepared.scales._asdict())
    return model
