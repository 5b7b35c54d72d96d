"""EventForecaster: a model of events with scikit-learn's conventions, for frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from glissando.events.evaluation import predicted
from glissando.events.forecast import predict, sample
from glissando.events.model import EventConfig
from glissando.events.task import EventRun, EventsRunConfig
from glissando.series.table_estimator import Estimator, typed


class EventForecaster(Estimator):
    """When the next event of each series of a frame comes, and of which kind.

    Args:
        group: Column that names the series of an event; without it, the frame is one series.
        time: Column of times, dates or numbers.
        time_unit: Unit of numeric times.
        kind: Column of kinds; without it, there is one.
        inputs: Kinds that are read and not predicted.
        marks: Columns of the events that are read beside the kind.
        categorical: Columns among marks and static that hold categories.
        static: Columns that do not vary within a series.
        channel: Of a long frame of values: the column that names what was measured.
        value: Of a long frame of values: the column with what was measured.
        columns: Channels of the frame of values to read.
        start: When prediction starts: a time, or a column of times.
        end: When observation ends: a time, or a column of times.
        resolution: Unit that the times are rounded up to; by default found from them.
        head: mixture or intensity; by default that of the preset.
        preset: liquid-events, delta-events, spectral-events or attention-events.
        options: More options, as the command line has them: {"model.hidden_size": 32, "training.seconds": 60}.
        seed: Of the weights, of the part that is held out and of the order of training.
        verbose: Whether training shows its progress.

    Every method takes beside the log, a frame or a file, two more: `facts` with the static columns and the starts and
    ends, a row a series, and `values` with what was measured.
    """

    _kind = "events"
    _classes = EventRun, EventsRunConfig, EventConfig
    _sizes = (
        "kinds", "codes", "ties", "resolution", "marks", "mark_categories", "values", "static", "static_categories",
        "clock",
    )  # fmt: skip

    run_: EventRun

    def __init__(
        self, group: str | None = None, time: str | None = None, time_unit: str | None = None, kind: str | None = None,
        inputs: Sequence[str] | None = None, marks: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None, static: Sequence[str] | None = None, channel: str | None = None,
        value: str | None = None, columns: Sequence[str] | None = None, start: Any = None, end: Any = None,
        resolution: Any = None, head: str | None = None, preset: str = "liquid-events", options: Any = None,
        seed: int = 0, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.time, self.time_unit, self.kind = group, time, time_unit, kind
        self.inputs, self.marks, self.categorical, self.static = inputs, marks, categorical, static
        self.channel, self.value, self.columns = channel, value, columns
        self.start, self.end, self.resolution, self.head = start, end, resolution, head
        self.preset, self.options, self.seed, self.verbose = preset, options, seed, verbose

    def fit(self, frame: Any, y: None = None, facts: Any = None, values: Any = None) -> Self:
        """Train on a log; a part of it is held out, by which the best weights are chosen."""
        self._set(self._train({} if self.head is None else {"model": {"head": self.head}}, frame, facts, values))
        return self

    def predict(
        self, frame: Any, horizon: Any, every: Any = None, samples: int = 0, quantiles: Sequence[float] = (),
        seed: int = 0, facts: Any = None, values: Any = None,
    ) -> Any:  # fmt: skip
        """What may come after the end of each series' observation, a frame with a row a series, time and kind: see
        glissando.events.forecast.predict."""
        run = self._fitted()
        table = predict(run, run.read(frame, facts, values), horizon, every, samples, quantiles, seed)
        return typed(table, run.data.group, run.data.time, frame, facts)

    def sample(
        self, frame: Any, horizon: Any, samples: int = 100, seed: int = 0, facts: Any = None, values: Any = None
    ) -> Any:
        """Simulated futures, a frame with a row an event: see glissando.events.forecast.sample."""
        run = self._fitted()
        table = sample(run, run.read(frame, facts, values), horizon, samples, seed)
        return typed(table, run.data.group, run.data.time, frame, facts)

    def score(self, frame: Any, y: None = None, facts: Any = None, values: Any = None) -> float:
        """The log-likelihood an event, in nats and in the unit of the times."""
        run = self._fitted()
        windows = run.windows(run.read(frame, facts, values))
        prediction = predicted(run.model, windows)
        return float((prediction.time + prediction.kind).sum() / windows.steps.after.events)
