"""What a report begins with: a headline, and the models in order, the best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from glissando.compare.figures import colour_name
from glissando.compare.plan import Comparison
from glissando.compare.results import ModelResult, difference, reported, sums

#: characters of a sample that are shown before it is unfolded
_SHOWN = 260


class Entry(NamedTuple):
    """A model in the ranking; its bar from 0 to the highest interval's end, in percent of the width."""

    model: str
    colour: str
    bits: str
    interval: str
    bar: float
    low: float
    high: float
    begins: str  # of the sample
    goes_on: str


def ranked(results: Sequence[ModelResult]) -> list[ModelResult]:
    """Those of which a training has ended well, from the fewest bits per byte to the most."""
    return sorted((r for r in results if r.bits is not None), key=lambda r: r.bits.value if r.bits else math.inf)


def headline(comparison: Comparison, results: Sequence[ModelResult]) -> str:
    """One sentence: which model predicts the held-out text best, and which are not significantly different from it."""
    order, budget = ranked(results), comparison.budget
    if not order:
        return f"No training of {len(results)} models has ended well"
    best = order[0]
    assert best.bits is not None
    figure = f"{best.bits.value:.3f} bits per byte"
    if len(order) == 1:
        return f"{best.model} reaches {figure} after {budget}"
    equal = [other.model for other in order[1:] if not _differs(best, other, comparison)]
    if not equal:
        return f"{best.model} predicts the held-out text best after {budget}: {figure}"
    others = " and ".join([", ".join(equal[:-1]), equal[-1]] if len(equal) > 1 else equal)
    return f"{best.model} has {figure} after {budget}; {others} {_are(equal)} not significantly different"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _differs(best: ModelResult, other: ModelResult, comparison: Comparison) -> bool:
    """Whether the 95 % interval of the difference on the same rows leaves out 0."""
    rows = reported(comparison)
    (a, a_bytes), (b, b_bytes) = (sums(result.good, "nats", "bytes", rows) for result in (best, other))
    paired = [run.job.seed for run in best.good] == [run.job.seed for run in other.good]
    between = difference((a / math.log(2), a_bytes), (b / math.log(2), b_bytes), paired)
    return between.low < between.high and not between.low <= 0 <= between.high


def entries(results: Sequence[ModelResult]) -> list[Entry]:
    """The ranking, each with the beginning of what it writes."""
    order, ranking = ranked(results), []
    colours = {result.model: colour_name(number) for number, result in enumerate(results)}
    widest = extent(results)
    for result in order:
        bits, text = result.bits, _sample(result).get("text", "").strip()
        assert bits is not None
        at = len(text) if len(text) <= _SHOWN else text.rfind(" ", 0, _SHOWN) if " " in text[:_SHOWN] else _SHOWN
        interval = "" if bits.low == bits.high else f"{bits.low:.3f} to {bits.high:.3f}"
        bar, low, high = [100 * value / widest for value in (bits.value, bits.low, bits.high)]
        ranking.append(
            Entry(
                result.model, colours[result.model], f"{bits.value:.3f}", interval, bar, low, high, text[:at], text[at:]
            )
        )
    return ranking


def extent(results: Sequence[ModelResult]) -> float:
    """Bits per byte at the right end of the bars, which the floor is not beyond."""
    ends = [max(r.bits.high, r.bits.value, r.floor or 0.0) for r in results if r.bits is not None]
    return max(ends, default=1.0)


def prompt(results: Sequence[ModelResult]) -> str:
    """What the samples go on from, which is the same for all."""
    return next((str(_sample(result)["prompt"]) for result in ranked(results)), "")


def _sample(result: ModelResult) -> dict[str, Any]:
    """The sample of the first run that ended well."""
    return result.good[0].figures["sample"]
