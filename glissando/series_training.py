"""Training a series model on a table, and measuring it: a small loop on Fabric, over one process.

The data are windows of series (glissando.data.series), the loss is the mean square of the error over the variance of
what is predicted, or the cross-entropy of a class. A run directory is what a language model's is, and resumes to the
same weights.
"""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from glissando.checkpoints import BEST, CHECKPOINTS, checkpoint_path, keep_newest, saved_step, saved_weights
from glissando.config import from_dict, hints_of, merge, options, to_dict
from glissando.data.series import (
    Scales,
    SeriesData,
    Windows,
    classes_of,
    described,
    order,
    read_series,
    require_near,
    resolved,
    scales,
    split,
    windows,
)
from glissando.data.tables import read_table
from glissando.errors import ConfigError, DivergenceError, NotFiniteError, RunError, Stopped, nearest
from glissando.evaluation.series import Score, loss_of, predict, predictions, score, write_predictions
from glissando.imports import imported
from glissando.metrics import append, read_metrics
from glissando.precision import flushed_subnormals
from glissando.run_files import TEXTS, alone, fingerprints, require_texts
from glissando.runs import METRICS, Run
from glissando.series import SeriesConfig, SeriesModel
from glissando.storage import publish_directory, write_atomic
from glissando.training.config import TrainingConfig
from glissando.training.launch import build_fabric
from glissando.training.progress import print_line
from glissando.training.stopping import Stopping
from glissando.trees import load_tree, save_tree


@options
class SeriesTraining:
    """How to train: AdamW; the rate rises over the first 20th of the budget and falls by a cosine to a 20th.

    steps                    budget in optimizer steps; give at most one budget; without one, 30 epochs
    epochs                   budget in passes over the training windows
    seconds                  budget in seconds of wall time
    learning_rate            largest learning rate
    weight_decay             decoupled decay of the weights
    clip                     largest norm of the gradient of all parameters; None: no clipping
    precision                32-true, bf16-mixed or 64-true
    accelerator              cpu, cuda, mps or another name of Lightning's; auto: the one that PyTorch finds, or else
                             the CPU
    early_stopping           stop after this many validations (10 a run) without a new best; None: never
    log_every                steps between rows of metrics.csv
    keep_checkpoints         number of latest checkpoints to keep
    seed                     seed of the initial weights and of dropout
    """

    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    seconds: PositiveFloat | None = None
    learning_rate: PositiveFloat = 1e-2
    weight_decay: float = 0.0
    clip: PositiveFloat | None = 1.0
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    accelerator: str = "auto"
    early_stopping: PositiveInt | None = None
    log_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "epochs", "seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"the budget is one of training.steps, .epochs, .seconds; got {' and '.join(given)}")
        if not given:
            self.epochs = 30.0


#: what to do about a table that is not the run's
_OTHER_TABLE = (
    "the table of the run with --{option} FILE, train anew into another directory, or measure the run on all of "
    "a file: glissando series evaluate RUN --file FILE"
)


class Prepared(NamedTuple):
    """What a configuration and its table come to; `data` names every column.

    lines  for the user: how the tables were read
    """

    data: SeriesData
    classes: list[str]
    train: Windows
    valid: Windows
    scales: Scales
    lines: list[str]


def prepare(data: SeriesData, classes: list[str] | None = None) -> Prepared:
    """Read and split the table. `classes`: those of a run that goes on. Raises DataError for what cannot be used."""
    table = read_table(data.path, data.delimiter)
    data = resolved(data, table)
    train = read_series(data, table)
    if data.valid_path is not None:
        valid = read_series(data, read_table(data.valid_path, data.delimiter))
    else:
        train, valid = split(data, train)
    classes, found = classes_of(data, train) if classes is None else classes, scales(data, train)
    require_near(data, [*train, *valid], found)
    lines = described(data, table, found.time_scale)
    return Prepared(data, classes, windows(data, train, classes), windows(data, valid, classes), found, lines)


# ---------------------------------------------------------------------- training


#: the sections of a configuration and their types
SECTIONS: dict[str, Any] = {
    "preset": str, "model": SeriesConfig, "data": SeriesData, "training": SeriesTraining, "imports": list[str],
}  # fmt: skip


@flushed_subnormals()
def train(values: Mapping[str, Any], out: str | Path) -> Run:
    """Train by the sections `model`, `data` and `training` into the new run directory `out`.

    Raises ConfigError, DataError, RunError or TrainingError; Ctrl-C and SIGTERM raise Stopped, with everything saved.
    """
    for name in values:
        if name not in SECTIONS:
            raise ConfigError(f"unknown option {name!r}. Did you mean {nearest(name, SECTIONS)!r}?")
    training = from_dict(SeriesTraining, values.get("training", {}), "training")
    prepared = prepare(from_dict(SeriesData, values.get("data", {}), "data"))
    torch.manual_seed(training.seed)
    model = build(values.get("model", {}), prepared)
    config = {
        "kind": "series",
        "preset": values.get("preset"),
        "model": to_dict(model.config),
        "data": to_dict(prepared.data),
        "training": to_dict(training),
        "classes": prepared.classes,
        "imports": imported(),
    }
    fit = _Fit(Run(Path(out).expanduser()), config, prepared, model, training)
    with torch.no_grad():  # what does not fit together is found before anything is made
        predict(model, prepared.train.batch(slice(0, 1)), prepared.data)
    fit.run.require_free(anew=True)
    with alone(fit.run.path) as locked:
        Run.create(out, {TEXTS: fingerprints(prepared.data)}, anew=locked).write_config(config)
        return fit.run_all(None)


@flushed_subnormals()
def resume(path: str | Path, tables: Mapping[str, str] | None = None) -> Run:
    """Go on from the newest checkpoint, to the weights of a training without a break.

    tables  where they lie now, {"data.path": "traces.csv"}; the run keeps that

    Raises RunError where there is none, or the table is not what it was; else as `train`.
    """
    run = Run(Path(path).expanduser())
    run.require_run()
    run.require_inside()
    with alone(run.path):
        checkpoint = run.require_checkpoint()
        opened = Run.open(checkpoint)
        config = merge(SECTIONS, opened.read_config(kind="series"), tables or {})
        data = from_dict(SeriesData, config["data"], "data")
        training = from_dict(SeriesTraining, {k: v for k, v in config["training"].items() if v is not None}, "training")
        require_texts(data, opened, tables or {}, _OTHER_TABLE)
        prepared = prepare(data, config["classes"] or None)
        torch.manual_seed(training.seed)
        fit = _Fit(run, config, prepared, build(config["model"], prepared), training)
        opened.restore(checkpoint)
        run.note_resumed({TEXTS: fingerprints(data)} if tables else {})
        return fit.run_all(checkpoint)


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


class _Fit:
    """One training: `run_all` is its loop."""

    def __init__(
        self, run: Run, config: dict[str, Any], prepared: Prepared, model: SeriesModel, training: SeriesTraining
    ) -> None:
        self.run, self.config, self.prepared, self.training = run, config, prepared, training
        self.fabric = build_fabric(TrainingConfig(accelerator=training.accelerator, precision=training.precision))
        self.model = model.to(self.fabric.device)
        if training.precision == "64-true":
            self.model.double()
        rate, decay = training.learning_rate, training.weight_decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=decay)
        self.step, self.seconds, self.best, self.best_step, self.waited = 0, 0.0, math.inf, -1, 0
        per_epoch = -(-len(prepared.train.x) // prepared.data.batch_size)
        self.steps = training.steps or (training.epochs and max(1, math.ceil(training.epochs * per_epoch)))
        self.columns = ["step", "epoch", "seconds", "train_loss", "learning_rate", "grad_norm", "valid_loss"]
        self.per_epoch = per_epoch

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return min(1.0, self.step / self.steps if self.steps else self.seconds / (self.training.seconds or 1.0))

    def run_all(self, checkpoint: Path | None) -> Run:
        with Stopping() as stopping:
            if checkpoint is not None:
                self._restore(checkpoint)
            self._start_metrics()
            self._say_what()
            nothing_done = self.share >= 1 or self._patience_is_over()
            batches, before = order(self.prepared.data, len(self.prepared.train.x), self.step), self.seconds
            began, t, losses = time.perf_counter(), self.training, []
            ended, asked = nothing_done, False
            while not ended and not asked:
                batch, share = self.prepared.train.batch(next(batches)), self.share
                rise, fall = min(1.0, 0.05 + 20 * share), 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))
                rate = t.learning_rate * rise * fall
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                with self.fabric.autocast():
                    loss = loss_of(self.model, predict(self.model, batch, self.prepared.data), batch)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.clip or math.inf)
                losses.append(loss.item())
                if not (math.isfinite(losses[-1]) and math.isfinite(norm.item())):
                    raise DivergenceError(
                        f"the loss is {losses[-1]} and the gradient {norm.item()} in step {self.step + 1}. It is "
                        "not taken and the last checkpoint is kept: train again with a lower training.learning_rate"
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step, self.seconds = self.step + 1, before + time.perf_counter() - began
                ended, asked = self.share >= 1, stopping.asked is not None
                is_due = ended or int(10 * self.share) > int(10 * share)
                valid = self._validate() if is_due else None
                ended = ended or self._patience_is_over()
                if is_due or self.step % t.log_every == 0:
                    mean, losses = sum(losses) / len(losses), []
                    self._log(mean, rate, norm.item(), valid)
                if is_due or asked:
                    self._save(checkpoint_path(self.run.path / CHECKPOINTS, self.step))
            lines = self._finish(ended, nothing_done)
        for line in lines:
            print_line(line, sys.stderr)
        if not ended:
            raise Stopped(f"training was stopped at step {self.step} and saved", stopping.asked)
        return self.run

    def _patience_is_over(self) -> bool:
        return self.training.early_stopping is not None and self.waited >= self.training.early_stopping

    def _validate(self) -> Score:
        valid = score(self.model, self.prepared.valid, self.prepared.data, self.prepared.classes)
        if not math.isfinite(valid.loss):
            raise DivergenceError(
                f"the held-out loss is {valid.loss} after step {self.step}, and the last checkpoint is kept: train "
                "again with a lower training.learning_rate"
            )
        self.waited += 1
        if valid.loss < self.best:
            self.best, self.best_step, self.waited = valid.loss, self.step, 0
            self._save(self.run.path / CHECKPOINTS / BEST)
        return valid

    # ------------------------------------------------------------------ what is written

    def _start_metrics(self) -> None:
        """Rows after the checkpoint, of a training that got further, are dropped."""
        rows = [row for row in read_metrics(self.run.path / METRICS) if int(row["step"]) <= self.step]
        lines = [self.columns, *([row.get(name, "") for name in self.columns] for row in rows)]
        write_atomic(self.run.path / METRICS, _csv(lines))

    def _log(self, loss: float, rate: float, norm: float, valid: Score | None) -> None:
        valid_loss = "" if valid is None else f"{valid.loss:.7g}"
        epoch = self.step / self.per_epoch
        row = [self.step, *(f"{v:.7g}" for v in (epoch, self.seconds, loss, rate, norm)), valid_loss]
        append(self.run.path / METRICS, _csv([row]))
        if valid is not None:
            left = self.seconds * (1 - self.share) / self.share if self.share else 0.0
            print_line(
                f"step {self.step}, epoch {epoch:.3g}, {self.share:.0%}: loss {loss:.4f}, held out {valid.loss:.4f} "
                f"({valid.headline()}), {left:.0f} s left",
                sys.stderr,
            )

    def _say_what(self) -> None:
        for line in self.prepared.lines:
            print_line(line, sys.stderr)
        data, model = self.prepared.data, self.model
        read, given = ", ".join(data.columns), f", time {data.time} ({model.config.dt})" if data.time else ""
        print_line(
            f"{data.task} of {', '.join(data.target)} from {read}{given}; {len(self.prepared.train.x)} windows of "
            f"{data.window} steps to train, {len(self.prepared.valid.x)} held out; "
            f"parameters {model.num_parameters():,}; device {self.fabric.device}, {self.training.precision}",
            sys.stderr,
        )

    def _save(self, path: Path) -> None:
        """A checkpoint, and with a regular one the run's own weights."""
        if bad := next((n for n, p in self.model.named_parameters() if not bool(p.isfinite().all())), None):
            raise DivergenceError(f"{bad} is not finite after step {self.step}: train again with a lower learning rate")
        random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if _has_cuda() else []}
        kept = {
            **{name: getattr(self, name) for name in _KEPT},
            "optimizer": self.optimizer.state_dict(),
            "random": random,
        }

        def fill(directory: Path) -> None:
            save_tree(directory, dict(self.model.state_dict()), "model")
            save_tree(directory, kept, "trainer")
            self.run.copy_files(directory)

        publish_directory(path, fill)
        if path.name != BEST:
            self.run.write_model(self.model.state_dict(), self.config)
            keep_newest(path.parent, self.training.keep_checkpoints)

    def _restore(self, checkpoint: Path) -> None:
        self.model.load_state_dict(saved_weights(checkpoint))
        kept = load_tree(checkpoint, "trainer")
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in _KEPT:
            setattr(self, name, kept[name])
        torch.set_rng_state(kept["random"]["torch"])
        if _has_cuda():
            torch.cuda.set_rng_state_all(kept["random"]["cuda"])

    def _finish(self, ended: bool, nothing_done: bool) -> list[str]:
        """Of a finished training the run's own weights become those of the best validation; the summary."""
        path, best = self.run.path, self.run.best_checkpoint()
        if not ended:
            return [f"stopped and saved at step {self.step}; continue with: glissando series train --resume {path}"]
        if best is None or saved_step(best) != self.best_step:
            raise RunError(f"{path} has lost the checkpoint of its best validation, step {self.best_step}: train again")
        self.model.load_state_dict(saved_weights(best))
        found = score(self.model, self.prepared.valid, self.prepared.data, self.prepared.classes)
        summary = {"steps": self.step, "seconds": self.seconds, "finished": True, "weights": BEST}
        self.run.write_summary(summary | {"best": {"step": self.best_step, **found.as_dict()}})
        self.run.write_model(self.model.state_dict(), self.config)
        done = f"{path} is finished, at step {self.step}: nothing is left to train" if nothing_done else None
        return [
            *([done] if done else []),
            f"{self.step} steps, {self.seconds:.0f} s; the run's own weights are those of the best validation, step "
            f"{self.best_step}:",
            found.table(),
            f"run: {path}   (try: glissando series evaluate {path})",
        ]


#: attributes of a training that its checkpoints hold
_KEPT = ("step", "seconds", "best", "best_step", "waited")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


# ---------------------------------------------------------------------- measuring


def evaluate(path: str | Path, file: str | None = None, out: str | None = None) -> Score:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns.

    out  CSV to write: the file's row that is predicted, each target there and its prediction

    Raises DataError for a file that does not fit, RunError for what is no run of series, or one that exists at `out`,
    NotFiniteError for predictions that are not finite.
    """
    run = Run.open(path)
    config, model = run.read_config(kind="series"), SeriesModel.load(path)
    if "data" not in config:
        raise RunError(f"{path} is a model that was saved without data: it can be loaded, and not evaluated here")
    data = from_dict(SeriesData, config["data"], "data")
    if file is None:
        require_texts(data, run, fix="--file FILE")
        prepared = prepare(data, config["classes"] or None)
        held, lines = prepared.valid, prepared.lines
    else:
        values = {name: getattr(data, name) for name in hints_of(SeriesData)}
        data = SeriesData(**values | {"path": file, "valid_path": None})
        table = read_table(file, data.delimiter)
        data = resolved(data, table)
        series = read_series(data, table)
        require_near(data, series, Scales(*(getattr(model, n).double().numpy() for n in Scales._fields)))
        lines = described(data, table, float(np.median(np.concatenate([one.dt for one in series]))))
        held = windows(data, series, config["classes"])
    for line in lines:
        print_line(line, sys.stderr)
    y = predictions(model, held, data)
    if not bool(y[held.mask].isfinite().all()):
        raise NotFiniteError(
            f"the predictions of {path} are not all finite: its training diverged, or the file has values far beyond "
            "those trained on. Train again with a lower training.learning_rate"
        )
    if out is not None:
        write_predictions(Path(out).expanduser(), y, held, data, config["classes"])
    return score(model, held, data, config["classes"], y)
