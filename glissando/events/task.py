"""Events in the training loop: a model of a log's events, by their log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from glissando.config import options, recorded
from glissando.events.batches import Batch, Scales, Steps, Targets, Windows, scales
from glissando.events.log import EventEncoding, EventLog, parts
from glissando.events.model import EventConfig, EventModel, Likelihood
from glissando.events.options import EventsData
from glissando.events.reading import read_events
from glissando.runs import Run
from glissando.series.table_model import TableRun
from glissando.state import map_state
from glissando.training.table import TableRunConfig, TableTask, with_sizes
from glissando.training.task import Loss


@options
class EventsRunConfig(TableRunConfig):
    """All of a run of events."""

    data: EventsData
    model: Annotated[dict[str, Any], EventConfig] = field(default_factory=dict)
    encoding: EventEncoding | None = recorded(default=None)

    kind: ClassVar[str | None] = "events"

    def task_of(self, *sources: Any) -> EventsTask:
        return EventsTask(self, prepare(self.data, self.encoding, *sources))


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
    units = scales(train, encoding)
    cut = Windows.of(Steps.of(train, encoding, units), data, warm=data.window // 4)
    return Prepared(encoding, units, cut, windows_of(valid, data, encoding, units), train, valid, lines)


def windows_of(log: EventLog, data: EventsData, encoding: EventEncoding, units: Any) -> Windows:
    """The windows of a log as it is scored: each knows a whole window of steps before it."""
    return Windows.of(Steps.of(log, encoding, units), data, warm=data.window)


def call(model: EventModel, batch: Batch) -> Likelihood:
    """Log-likelihoods of a batch's targets, on the model's device."""
    h, targets, _ = features(model, batch)
    return model.log_likelihood(h, targets)


def features(
    model: EventModel, batch: Batch, compiled: bool = False, state: Any = None
) -> tuple[torch.Tensor, Targets, Any]:
    """The features (n, D) after each scored step of a batch, its targets, and the state after the batch where one
    is given."""
    inputs = moved(batch.inputs, model.time_scale.device)
    if state is not None and "past" in inputs:  # what is known does not depend on the state that layers start from
        state = inputs.pop("past").put_into(state)
    run = torch.compile(_features, dynamic=False) if compiled else _features
    targets = map_state(lambda part: part.to(model.time_scale.device), batch.targets)
    h, after = run(model, state, inputs)
    return h.flatten(0, 1)[targets.place], targets, after


def _features(model: EventModel, state: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    return model(inputs["codes"], state, **{name: part for name, part in inputs.items() if name != "codes"})


def moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What the model is called with on its device; times keep their digits until they are divided."""
    return {name: map_state(lambda part: part.to(device), value) for name, value in inputs.items()}


class EventsTask(TableTask):
    """The negative log-likelihood of waits and kinds, over the number of events and of ends of observation."""

    columns = ("valid_time", "valid_kind")
    _call, _model = staticmethod(call), EventModel

    def _built(self) -> EventModel:
        return build(self.config.model, self.encoding, self.prepared.scales)

    def loss(self, model: EventModel, batch: Batch, state: Any = None, logged: bool = False) -> Loss:
        h, targets, state = features(model, batch, self.config.training.compile, state)
        likelihood = model.log_likelihood(h, targets)
        return Loss(-(likelihood.time.sum() + likelihood.kind.sum()), batch.weight, state=state)

    @torch.no_grad()
    def _scored(self, model: EventModel, stride: int) -> dict[str, float]:
        time, kind, weight, events = 0.0, 0.0, 0, 0
        for batch in self.prepared.valid.scoring(stride):
            likelihood = call(model, batch)
            time -= float(likelihood.time.double().sum())
            kind -= float(likelihood.kind.double().sum())
            weight += batch.weight
            events += int((batch.targets.kind >= 0).sum())
        loss = (time + kind) / max(weight, 1)
        return {"valid_loss": loss, "valid_time": time / max(weight, 1), "valid_kind": kind / max(events, 1)}

    def _about(self) -> str:
        encoding = self.encoding
        also = {
            "kinds that are read alone": encoding.inputs, "marks": encoding.marks or encoding.mark_categories,
            "values": encoding.values, "static facts": encoding.static or encoding.static_categories,
        }  # fmt: skip
        beside = ", ".join(name for name, read in also.items() if read)
        return f"{len(encoding.kinds)} kinds of events{', with ' * bool(beside)}{beside}"

    def _measured(self, model: EventModel, run: Run) -> dict[str, Any]:
        return self.score(model, torch.device("cpu"))

    def _results(self, best: Mapping[str, Any]) -> list[str]:
        return [f"held out: {-best['valid_loss']:.4f} nats of log-likelihood an event or end of observation"]


def build(options: Mapping[str, Any], encoding: EventEncoding, units: Scales) -> EventModel:
    """A new model of the table's sizes and scales."""
    sizes: dict[str, Any] = {
        "kinds": len(encoding.kinds), "codes": encoding.codes, "ties": encoding.ties,
        "resolution": encoding.resolution, "marks": len(encoding.marks), "clock": encoding.clock,
        "mark_categories": [2 + len(names) for names in encoding.mark_categories.values()],
        "values": len(encoding.values.columns) if encoding.values is not None else 0, "static": len(encoding.static),
        "static_categories": [2 + len(names) for names in encoding.static_categories.values()],
    }  # fmt: skip
    model = EventModel.from_config(with_sizes(options, sizes))
    model.set_scales(**units._asdict())
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

    def windows(self, log: EventLog) -> Windows:
        return windows_of(log, self.data, self.encoding, self.model)
