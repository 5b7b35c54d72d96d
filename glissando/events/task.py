"""Events in the training loop: a model of a log's events, by their log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from glissando.config import options, recorded, to_dict
from glissando.data.base import WHOLE, Shard, Split
from glissando.errors import ConfigError, DivergenceError
from glissando.events.batches import After, Batch, Scales, Steps, Targets, Windows, scales
from glissando.events.log import EventEncoding, EventLog, parts
from glissando.events.model import EventConfig, EventModel, Likelihood
from glissando.events.options import EventsData
from glissando.events.reading import read_events
from glissando.runs import Run
from glissando.series.history import Past
from glissando.tables import TableRun
from glissando.training.config import TrainingConfig
from glissando.training.table import TableRunConfig, epoch_batches, table_batches
from glissando.training.task import Loss, Task


@options
class EventsRunConfig(TableRunConfig):
    """All of a run of events: what config.yaml holds, resolved.

    model     options of EventConfig; sizes follow from the table
    encoding  what the table's columns mean
    imports   the Python files that registered what the run is made of (--import on the command line)
    """

    data: EventsData
    preset: str | None = None
    model: Annotated[dict[str, Any], EventConfig] = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    encoding: EventEncoding | None = recorded(default=None)
    imports: list[Annotated[str, Field(strict=True)]] = field(default_factory=list)

    kind: ClassVar[str | None] = "events"

    def task(self, resumed: Run | None = None) -> EventsTask:
        """Read the table."""
        prepared = prepare(self.data, self.encoding)
        self.encoding = prepared.encoding
        return EventsTask(self, prepared)


class Prepared(NamedTuple):
    """What a configuration and its tables come to."""

    encoding: EventEncoding
    scales: Scales
    train: Windows
    valid: Windows
    train_log: EventLog
    valid_log: EventLog
    lines: list[str]


def prepare(
    data: EventsData, encoding: EventEncoding | None = None, source: Any = None, facts: Any = None, values: Any = None
) -> Prepared:
    """Read and split the table.

    Args:
        data: The options of the table.
        encoding: That of a run that goes on.
        source: A frame in the place of data.path; facts and values: as read_events takes them.

    Raises DataError for what cannot be used.
    """
    log, encoding = read_events(data, source, encoding, facts, values)
    if data.valid_path is None:
        train, valid, line = parts(log, data, encoding.resolution)
        lines = [*log.report, line]
    else:
        train, (valid, _) = log, read_events(data, data.valid_path, encoding)
        lines = [*log.report, *valid.report]
    after = After.of(train, encoding)
    found = scales(train, after)
    steps = Steps.of(train, encoding, found, after)
    cut = Windows.of(
        steps, len(encoding.kinds), data.window, data.batch_size, data.seed, warm=data.window // 4
    )  # fmt: skip
    return Prepared(encoding, found, cut, windows_of(valid, data, encoding, found), train, valid, lines)


def windows_of(log: EventLog, data: EventsData, encoding: EventEncoding, found: Scales) -> Windows:
    """The windows of a log as it is scored: each knows a whole window of steps before it."""
    steps = Steps.of(log, encoding, found)
    return Windows.of(steps, len(encoding.kinds), data.window, data.batch_size, data.seed, warm=data.window)


def call(model: EventModel, batch: Batch, compiled: bool = False) -> Likelihood:
    """Log-likelihoods of a batch's targets, on the model's device."""
    h, targets, _ = features(model, batch, compiled)
    return model.log_likelihood(h, targets)


def features(
    model: EventModel, batch: Batch, compiled: bool = False, state: Any = None
) -> tuple[torch.Tensor, Targets, Any]:
    """The features (n, D) after each scored step of a batch, its targets, and the state after the batch where one
    is given."""
    like = model.time_scale
    inputs = {name: moved(part, like) for name, part in batch.inputs.items()}
    if state is not None and "past" in inputs:  # what is known does not depend on the state that layers start from
        state = inputs.pop("past").put_into(state)
    run = torch.compile(_features, dynamic=False) if compiled else _features
    targets = Targets(*(part.to(like.device) for part in batch.targets))
    h, after = run(model, state, inputs)
    return h.flatten(0, 1)[targets.place], targets, after


def _features(model: EventModel, state: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    return model(inputs["codes"], state, **{name: part for name, part in inputs.items() if name != "codes"})


def moved(value: Any, like: torch.Tensor) -> Any:
    """A part of a batch on the model's device; times keep their digits until they are divided."""
    if isinstance(value, Past):
        return Past(*(part.to(like) for part in value))
    return None if value is None else value.to(like.device)


class EventsTask(Task):
    """The negative log-likelihood of waits and kinds, over the number of events and of ends of observation."""

    keeps_best = True
    columns = ("valid_time", "valid_kind")

    def __init__(self, config: EventsRunConfig, prepared: Prepared) -> None:
        self.config, self.prepared, self.encoding = config, prepared, prepared.encoding
        self.notes: Sequence[str] = prepared.lines
        self.carries = config.training.carry > 0
        self.nominal = max(1, prepared.train.size * prepared.train.rows)

    @property
    def epoch_rows(self) -> int:
        return epoch_batches(self.prepared.train, self.config.training) * self.config.data.batch_size

    def new_model(self, saved: bool = False) -> EventModel:
        """With the table's sizes and scales; its options become the configuration's."""
        model = build(self.config.model, self.prepared.encoding, self.prepared.scales)
        self.config.model = to_dict(model.config)
        if self.carries:
            model.require_constant_state("training.carry")
        if self.config.training.precision == "64-true":
            model.double()
        with torch.no_grad():  # what does not fit together is found before anything is made
            call(model, self.prepared.train.batch(np.arange(1)))
        return model

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Every window once an epoch, in an order that is a function of data.seed and the epoch."""
        if split == "valid":
            yield from self.prepared.valid.scoring()
            return
        yield from table_batches(self.prepared.train, self.config.training, step, shard)

    def loss(self, model: EventModel, batch: Batch, state: Any = None, logged: bool = False) -> Loss:
        h, targets, state = features(model, batch, self.config.training.compile, state)
        found = model.log_likelihood(h, targets)
        return Loss(-(found.time.sum() + found.kind.sum()), batch.weight, state=state)

    def score(self, model: EventModel, device: torch.device, stride: int = 1, shard: Shard = WHOLE) -> dict[str, float]:
        """Every process scores all windows, which are few."""
        time, kind, weight, events = 0.0, 0.0, 0, 0
        was = model.training
        model.eval()
        try:
            with torch.no_grad():
                for batch in self.prepared.valid.scoring(stride):
                    found = call(model, batch)
                    time -= float(found.time.double().sum())
                    kind -= float(found.kind.double().sum())
                    weight += batch.weight
                    events += int((batch.targets.kind >= 0).sum())
        finally:
            model.train(was)
        loss = (time + kind) / max(weight, 1)
        if not math.isfinite(loss):
            raise DivergenceError(
                f"the held-out loss is {loss}, and the last checkpoint is kept: train again with a lower "
                "training.optimizer.learning_rate"
            )
        return {"valid_loss": loss, "valid_time": time / max(weight, 1), "valid_kind": kind / max(events, 1)}

    def describe(self, batch: Batch) -> str:
        found, train = self.encoding, self.prepared.train
        also = {
            "kinds that are read alone": found.inputs, "marks": found.marks or found.mark_categories,
            "values": found.values, "static facts": found.static or found.static_categories,
        }  # fmt: skip
        beside = ", ".join(name for name, read in also.items() if read)
        return (
            f"{len(found.kinds)} kinds of events{', with ' * bool(beside)}{beside}; {len(train):,} windows of at most "
            f"{int((train.end - train.begin).max())} steps to train, {len(self.prepared.valid):,} held out"
        )

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        """The figures of the best validation's weights on all that is held out."""
        path = run.best_checkpoint()
        if path is None or best_step < 0:
            return {"best": None}
        model = EventModel.load(path)
        self.best = self.score(model, torch.device("cpu"))
        return {"best": {"step": best_step, **self.best}}

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        best = summary["best"]
        if best is None or not summary["finished"]:
            return []
        return [
            f"held out: {-best['valid_loss']:.4f} nats of log-likelihood an event or end of observation",
            f"{summary['steps']} steps, {summary['seconds']:.0f} s; the run's own weights are those of the best "
            f"validation, step {best['step']}",
            f"run: {name}   (try: glissando events evaluate {name})",
        ]


def build(options: Mapping[str, Any], encoding: EventEncoding, found: Scales) -> EventModel:
    """A new model of the table's sizes and scales."""
    sizes: dict[str, Any] = {
        "kinds": len(encoding.kinds), "codes": encoding.codes, "ties": encoding.ties,
        "resolution": encoding.resolution, "marks": len(encoding.marks), "clock": encoding.clock,
        "mark_categories": [2 + len(names) for names in encoding.mark_categories.values()],
        "values": len(encoding.values.columns) if encoding.values is not None else 0, "static": len(encoding.static),
        "static_categories": [2 + len(names) for names in encoding.static_categories.values()],
    }  # fmt: skip
    for name, size in sizes.items():
        if options.get(name, size) != size:
            raise ConfigError(f"model.{name} is {options[name]}, and the table has {size}: leave it out")
    model = EventModel.from_config({**options, **sizes})
    model.set_scales(**found._asdict())
    return model


@dataclass(frozen=True)
class EventRun(TableRun):
    """A trained model and how it reads tables."""

    model: EventModel
    encoding: EventEncoding
    data: EventsData
    _classes = EventModel, EventEncoding, EventsData

    def read(self, source: Any, facts: Any = None, values: Any = None) -> EventLog:
        """A new table, or frame, as the model reads it, with a second one of facts and a third one of values. Raises
        DataError for what it cannot read."""
        return read_events(self.data, source, self.encoding, facts, values)[0]

    @property
    def scales(self) -> Scales:
        """Those that the model was trained with."""
        *parts, time, mean, scale = (self.model.get_buffer(name).double().cpu().numpy() for name in Scales._fields[:-2])
        head = self.model.head
        return Scales._make([*parts, float(time), float(mean), float(scale), float(head.centre), float(head.spread)])

    def windows(self, log: EventLog) -> Windows:
        return windows_of(log, self.data, self.encoding, self.scales)
