"""Events that are generated, with what was likely: what `glissando events example` writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glissando.events.processes import Hawkes, Truth, process_of

#: columns with the log-likelihood of the truth, which `glissando events evaluate` compares with the model's
TRUTH_TIME, TRUTH_KIND, TRUTH_END = "truth_time", "truth_kind", "truth_end"
#: digits after the point that times are written with
_DIGITS = 6


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
