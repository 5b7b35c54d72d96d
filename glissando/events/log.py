"""A log of events as a model reads it: series of steps, and what of them is predicted.

A step is an event, an observation of values, or the start of prediction. At one time the predicted events come first,
by the index of their kind, then events that are read alone, then values, then the start, so that nothing that is
predicted comes after what is known at its own time.

Letters: S series, N steps of all series together, M numeric and Q categorical marks, K channels of values, P numeric
and R categorical static columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from glissando.config import options
from glissando.errors import ConfigError
from glissando.events.options import EventsData
from glissando.series.panel import Encoding, Form, StepTable, held_series, known_codes
from glissando.series.tables import counted

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


@dataclass(frozen=True, kw_only=True)
class EventLog(StepTable):
    """Series of events; those that are `scored` are predicted.

    codes       (N,) int64: 0 no event, 1 of an unknown kind, 2 and on the kinds of the encoding
    marks       (N, M) float64, NaN where missing
    mark_codes  (N, Q) int64, as static_codes
    since       (S,) time after which events are predicted, since the first step
    until       (S,) time at which observation ends, since the first step; of one that ends with its last event, its
                time
    ended       (S,) bool: whether the end is known, so that the wait from the last event to it counts
    phases      (N, 2) fractions of the day and of the week that have passed; 0 without a clock
    """

    codes: np.ndarray
    marks: np.ndarray
    mark_codes: np.ndarray
    since: np.ndarray
    until: np.ndarray
    ended: np.ndarray
    phases: np.ndarray

    def of_series(self) -> set[str]:
        return super().of_series() | {"since", "until", "ended"}

    def cut(self, until: np.ndarray) -> EventLog:
        """The steps up to the time until[s] (S,) of each series, where its observation ends."""
        count = len(self.names)
        lengths = np.bincount(self.series[self.times <= until[self.series]], minlength=count)
        cut = self.choose(np.arange(count), lengths)
        return replace(cut, until=until, ended=self.ended | (until < self.until))


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
        valid = replace(log, since=cut, scored=log.scored & (log.times > cut[log.series]))
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
    return train, replace(valid, **changed), line
