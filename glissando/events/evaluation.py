"""A run of events on what it has held out, or on another table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glissando.errors import NotFiniteError
from glissando.events.batches import Windows
from glissando.events.model import EventModel
from glissando.events.task import EventRun, call, prepare
from glissando.run_files import require_texts
from glissando.runs import Run


class Figures(NamedTuple):
    """Sums of log-likelihoods over all that is scored.

    time    of when events came, and of the time in which none did
    kind    of which kind each event was
    events  number of events
    ends    number of ends of observation
    """

    time: float
    kind: float
    events: int
    ends: int

    def as_dict(self) -> dict[str, Any]:
        total = self.events + self.ends
        return {
            "events": self.events, "ends": self.ends, "log_likelihood": (self.time + self.kind) / self.events,
            "time": self.time / self.events, "kind": self.kind / self.events,
            "loss": -(self.time + self.kind) / total,
        }  # fmt: skip

    def table(self) -> str:
        found = self.as_dict()
        return (
            f"{self.events:,} events and {self.ends:,} ends of observation held out\n"
            f"log-likelihood an event: {found['log_likelihood']:.4f} nats "
            f"(when {found['time']:.4f}, which kind {found['kind']:.4f})"
        )


@torch.no_grad()
def measure(model: EventModel, held: Windows) -> Figures:
    """The log-likelihood of what is held out, in the unit of the data."""
    model.eval()
    time, kind, count, ends = 0.0, 0.0, 0, 0
    for batch in held.scoring():
        found = call(model, batch)
        events = int((batch.targets.kind >= 0).sum())
        time, kind = time + float(found.time.double().sum()), kind + float(found.kind.double().sum())
        count, ends = count + events, ends + batch.weight - events
    return Figures(time, kind, count, ends)


def evaluate(
    path: str | Path, file: str | None = None, reading: Mapping[str, Any] | None = None
) -> tuple[Figures, list[str]]:
    """The run at `path` on what it has held out, or on all of a `file` with the same columns, and what was read.

    Args:
        path: The run, or a checkpoint.
        file: Another table.
        reading: Options of EventsData by which the file is read, where they are not those of the run.

    Raises DataError for a file that does not fit, RunError for what is no run of events, NotFiniteError for answers
    that are not finite.
    """
    run = EventRun.open(path).reading(reading or {})
    if file is None:
        require_texts(run.data, Run.open(path), fix="--file FILE")
        prepared = prepare(run.data, run.encoding)
        held, lines = prepared.valid, prepared.lines
    else:
        log = run.read(file)
        held, lines = run.windows(log), log.report
    found = measure(run.model, held)
    if not torch.tensor(found.time + found.kind).isfinite():
        raise NotFiniteError(
            f"the likelihoods of {path} are not all finite: its training diverged, or the file has times far beyond "
            "those trained on. Train again with a lower training.optimizer.learning_rate"
        )
    return found, lines
