"""The lines at the start: what a log holds."""

from __future__ import annotations

import numpy as np

from glissando.events.log import FIRST, NONE, EventEncoding, EventLog
from glissando.events.options import EventsData
from glissando.series.inspection import duration
from glissando.series.tables import counted


def described(log: EventLog, encoding: EventEncoding, data: EventsData) -> list[str]:
    """What was read: series, events by kind, ties, resolution, the median gap, and how much is censored."""
    scored, names = log.scored, encoding.kinds
    counts = np.bincount(log.codes[scored] - FIRST, minlength=len(names))
    kinds = ", ".join(f"{name} {count:,}" for name, count in list(zip(names, counts, strict=True))[:12])
    lines = [
        f"{log.source}: {counted(len(log.names), 'series')}, {counted(int(scored.sum()), 'event')} of "
        f"{counted(len(names), 'kind')} to predict: {kinds}{', ...' if len(names) > 12 else ''}"
    ]
    is_event = log.codes != NONE
    if before := int((is_event & ~scored & (log.codes < FIRST + len(names)) & (log.codes >= FIRST)).sum()):
        why = "at the start of their series" if data.start is None else f"at or before --data.start ({data.start})"
        lines.append(f"{counted(before, 'event')} {why}: read, and not predicted")
    inputs = np.bincount(log.codes, minlength=encoding.codes)[FIRST + len(names) :]
    if encoding.inputs:
        each = ", ".join(f"{name} {count:,}" for name, count in zip(encoding.inputs, inputs, strict=True))
        lines.append(f"read, and not predicted: {each}")
    later = np.ones(len(log.times), bool)
    later[log.starts[:-1]] = False
    tied = later & scored & (log.gaps == 0) & np.r_[False, scored[:-1]]
    if tied.any():
        what = "predicted as sets" if encoding.ties else "training has none such: read, and not scored"
        lines.append(f"{counted(int(tied.sum()), 'event')} at the time of another of the same series: {what}")
    gaps = log.gaps[later & (log.gaps > 0)]
    if len(gaps):
        assumed = f": the numbers {data.time} are read in {encoding.unit}; if they are not, give --data.time_unit"
        is_known = encoding.time_form == "date" or data.time_unit is not None
        lines.append(f"median gap {_time(float(np.median(gaps)), encoding)}{'' if is_known else assumed}")
    if encoding.resolution:
        lines.append(
            f"resolution {_time(encoding.resolution, encoding)}: a likelihood is the probability of that interval "
            "(--data.resolution 0 for exact times)"
        )
    else:
        lines.append("times are exact: a likelihood is a density (--data.resolution for rounded ones)")
    ends = int((log.ended & (log.until > log.times[log.starts[1:] - 1])).sum())
    if log.ended.any():
        without = len(log.names) - len(np.unique(log.series[scored]))
        share = 100 * ends / max(1, ends + int(scored.sum()))
        lines.append(
            f"{counted(ends, 'wait')} censored by the end of observation, {share:.0f} % of all waits; "
            f"{without:,} series without an event to predict"
        )
    else:
        lines.append("each series ends with its last event: if it was observed for longer, say until when: --data.end")
    return lines


def _time(time: float, encoding: EventEncoding) -> str:
    return duration(time) if encoding.time_form == "date" else f"{time:.6g} {encoding.unit}"
