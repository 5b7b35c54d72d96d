"""Events that are generated, with what was likely: what `glissando events example` writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from glissando.events.processes import PROCESSES, Hawkes, Truth, process_of

#: columns with the log-likelihood of the truth, which `glissando events evaluate` compares with the model's
TRUTH_TIME, TRUTH_KIND, TRUTH_END = "truth_time", "truth_kind", "truth_end"
#: digits after the point that times are written with
_DIGITS = 6
#: series of which `glissando corpora hawkes` takes the truth
_SHOWN = 40


def drawn(process: Hawkes, count: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, Truth]]:
    """The times (N,), as they are written, and kinds (N,) of `count` series of a process, and what was likely; no two
    times of a series are equal."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        times, kinds = process.draw(rng)
        ticks = np.rint(times * 10**_DIGITS).astype(np.int64).clip(1)
        steps = np.arange(len(ticks))
        times = (np.maximum.accumulate(ticks - steps) + steps) / 10**_DIGITS  # ascending in the last digit too
        times, kinds = times[times < process.end], kinds[times < process.end]
        yield times, kinds, process.truth(times, kinds)


def table(name: str, count: int, seed: int = 0) -> str:
    """A CSV of series, time, kind, end of observation, and the truth's log-likelihood of time, kind and end."""
    process = process_of(name)
    lines = [f"series,time,kind,end,{TRUTH_TIME},{TRUTH_KIND},{TRUTH_END}"]
    for number, (times, kinds, truth) in enumerate(drawn(process, count, seed)):
        for t, k, at, of in zip(times, kinds, truth.time, truth.kind, strict=True):
            letter = chr(ord("a") + k)
            lines.append(f"{number},{t:.{_DIGITS}f},{letter},{process.end:g},{at:.6f},{of:.6f},{truth.end:.6f}")
    return "\n".join(lines) + "\n"


def describe() -> dict[str, Any]:
    """What there is, and the truth's log-likelihood of a sample of each."""
    columns = {}
    for name, process in PROCESSES.items():
        series = list(drawn(process, _SHOWN, 0))
        events = sum(len(times) for times, *_ in series)
        time, kind, end = (
            sum(float(np.sum(part)) for part in parts) / events
            for parts in zip(*((truth.time, truth.kind, truth.end) for *_, truth in series), strict=True)
        )
        columns[name] = (
            f"{process.about}; about {events // _SHOWN} events a series; the truth has {time + kind + end:.3f} nats an "
            f"event ({time + end:.3f} of the time, {kind:.3f} of the kind)"
        )
    return columns


def sample() -> list[str]:
    """The first lines of a table."""
    return table("hawkes5", 1).splitlines()[:6]
