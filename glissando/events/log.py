"""A log of events as a model reads it: series of steps, and what of them is predicted.

A step is an event, an observation of values, or the start of prediction. At one time the predicted events come first,
by the index of their kind, then events that are read alone, then values, then the start, so that nothing that is
predicted comes after what is known at its own time.

Letters: S series, N steps of all series together, M numeric and Q categorical marks, K channels of values, P numeric
and R categorical static columns.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from glissando.config import options
from glissando.errors import ConfigError
from glissando.events.options import EventsData
from glissando.series.panel import Clock, Encoding, Form, held_series, known_codes
from glissando.series.tables import counted, place

#: codes of a step: no event, an event of a kind that training does not know, and the first known kind
NONE, UNKNOWN, FIRST = 0, 1, 2


@options
class EventEncoding:
    """What a log's columns mean to a model: fixed by the training table, saved with the run, and applied to every other
    table.

    kinds              predicted kinds: the step's code is 2 and the index here
    inputs             kinds that are read and not predicted: codes after those of `kinds`
    marks              numeric marks
    mark_categories    categorical mark -> its known categories, the most frequent first: code 2 and on
    static             numeric static columns
    static_categories  as mark_categories, of static columns
    values             of the table of values; None without one
    ties               whether several events of a series may have one time
    resolution         unit that the times are rounded up to, in `unit`; 0: none
    clock              whether the time of the day and of the week is read
    time_form          date: times are dates; number: numbers
    unit               unit of EventLog.times: s of dates, data.time_unit of numbers
    """

    kinds: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    mark_categories: dict[str, list[str]] = field(default_factory=dict)
    static: list[str] = field(default_factory=list)
    static_categories: dict[str, list[str]] = field(default_factory=dict)
    values: Encoding | None = None
    ties: bool = False
    resolution: float = 0.0
    clock: bool = False
    time_form: Form = "number"
    unit: str = "s"

    @property
    def codes(self) -> int:
        """Number of codes of a step."""
        return FIRST + len(self.kinds) + len(self.inputs)


class EventLog(NamedTuple):
    """S series of N steps in all.

    names         (S) the user's names of the series
    starts        (S + 1,) int64: series s has the steps starts[s]:starts[s + 1]
    times         (N,) float64: time since the series' first step, in clock.unit
    gaps          (N,) float64: time since the step before, 0 at the first; differences are taken before rounding
    codes         (N,) int64: 0 no event, 1 of an unknown kind, 2 and on the kinds of the encoding
    scored        (N,) bool: events that are predicted; the others are history
    marks         (N, M) float64, NaN where missing
    mark_codes    (N, Q) int64: 0 missing, 1 unknown, 2 and on the known categories
    values        (N, K) float64, NaN where nothing was observed
    static        (S, P) float64, NaN where missing
    static_codes  (S, R) int64, as mark_codes
    since         (S,) time after which events are predicted, since the first step
    until         (S,) time at which observation ends, since the first step; of one that ends with its last event, its
                  time
    ended         (S,) bool: whether the end is known, so that the wait from the last event to it counts
    phases        (N, 2) fractions of the day and of the week that have passed; 0 without a clock
    rows          (N,) int64: the file's line of the event; 0 of other steps
    clock         how times are written in the user's own form
    report        lines for the user
    source, unit  the file, or "frame", and what `rows` counts in it: line or row
    """

    names: list[str]
    starts: np.ndarray
    times: np.ndarray
    gaps: np.ndarray
    codes: np.ndarray
    scored: np.ndarray
    marks: np.ndarray
    mark_codes: np.ndarray
    values: np.ndarray
    static: np.ndarray
    static_codes: np.ndarray
    since: np.ndarray
    until: np.ndarray
    ended: np.ndarray
    phases: np.ndarray
    rows: np.ndarray
    clock: Clock
    report: list[str]
    source: str
    unit: str

    def place(self, step: int) -> str:
        """Where an event stands in the user's table, for errors."""
        return place(self.source, self.unit, int(self.rows[step]))

    @property
    def lengths(self) -> np.ndarray:
        """(S,) the number of steps of each series."""
        return np.diff(self.starts)

    @property
    def series(self) -> np.ndarray:
        """(N,) the index of the series of each step."""
        return np.repeat(np.arange(len(self.names)), self.lengths)

    def choose(self, chosen: np.ndarray) -> EventLog:
        """The series with these indices, in this order."""
        chosen = np.asarray(chosen, np.int64)
        ranges = [np.arange(self.starts[s], self.starts[s + 1]) for s in chosen]
        steps = np.concatenate(ranges) if ranges else np.empty(0, np.int64)
        return self._taken(chosen, steps)

    def cut(self, until: np.ndarray) -> EventLog:
        """The steps up to the time until[s] (S,) of each series, where its observation ends."""
        kept = self.times <= until[self.series]
        ended = self.ended | (until < self.until)
        return self._taken(np.arange(len(self.names)), np.flatnonzero(kept))._replace(until=until, ended=ended)

    def _taken(self, chosen: np.ndarray, steps: np.ndarray) -> EventLog:
        counts = np.bincount(self.series[steps], minlength=len(self.names))[chosen]
        return self._replace(
            names=[self.names[s] for s in chosen], starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            times=self.times[steps], gaps=self.gaps[steps], codes=self.codes[steps], scored=self.scored[steps],
            marks=self.marks[steps], mark_codes=self.mark_codes[steps], values=self.values[steps],
            static=self.static[chosen], static_codes=self.static_codes[chosen], since=self.since[chosen],
            until=self.until[chosen], ended=self.ended[chosen], phases=self.phases[steps], rows=self.rows[steps],
            clock=self.clock._replace(origins=self.clock.origins[chosen]),
        )  # fmt: skip


def parts(log: EventLog, data: EventsData, resolution: float = 0.0) -> tuple[EventLog, EventLog, str]:
    """What is trained on, what is held out, and a line that states the split: whole series, or with data.split `future`
    the end of each.

    A series of `future` is cut at a time, not at an event: training sees that nothing came up to it, and the held-out
    part is what comes after it, its earlier steps being history. A category, or a kind that is read alone, that only
    the held-out part has is unknown there, as it would be in any other log.

    Raises ConfigError for a split that leaves nothing on a side.
    """
    share = data.valid_fraction
    if (data.split or ("series" if len(log.names) > 1 else "future")) == "future":
        seen = (1 - share) * (log.until - log.since)
        cut = log.since + (np.floor(seen / resolution) * resolution if resolution else seen)
        valid = log._replace(since=cut, scored=log.scored & (log.times > cut[log.series]))
        train = log.cut(cut)
        line = (
            f"held out: the last {100 * share:g} % of the time of each series, {int(valid.scored.sum()):,} events in "
            "all (--data.split future)"
        )
    else:
        chosen, line = held_series(len(log.names), data)
        train, valid = log.choose(np.flatnonzero(~chosen)), log.choose(np.flatnonzero(chosen))
    for name, each in (("to train on", train), ("held out", valid)):
        if not each.scored.any():
            raise ConfigError(
                f"no event {name}: of {int(log.scored.sum()):,} to predict (the first of a series is not, unless "
                f"data.start says since when it was observed), data.valid_fraction {share} by data.split "
                f"{data.split or 'default'} leaves none there; give more events, or another data.valid_fraction"
            )
    read = known_codes(valid.codes[:, None], train.codes[:, None])[:, 0]
    changed: dict[str, Any] = {
        "codes": np.where(valid.scored, valid.codes, read),
        "mark_codes": known_codes(valid.mark_codes, train.mark_codes),
        "static_codes": known_codes(valid.static_codes, train.static_codes),
    }
    if unseen := sum(int((codes != getattr(valid, name)).sum()) for name, codes in changed.items()):
        line += f"; {counted(unseen, 'value')} of categories that are not trained on, read as unknown there"
    return train, valid._replace(**changed), line
