"""What is kept of a series between two observations of it, in one size however long it is.

Series (`glissando.series.stream`) and logs of events (`glissando.events.stream`) are read so, one observation after
another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from glissando.backbone import ModelState
from glissando.errors import DataError
from glissando.series.panel import Clock


class Live(NamedTuple):
    """What is kept of a series between two observations.

    state     the model's
    moment    the last observation's time, exact, as Clock.origins
    features  what else answers need: of events (D,) what the head reads after the last step, of the class of a series
              by the mean over its steps the sum (C,) of their logits
    """

    state: ModelState
    moment: Any
    features: Tensor | None = None


def since(clock: Clock, before: Any, column: str | None) -> float:
    """The time from `before` to the moment of `clock`, read in `column`; a negative one raises DataError."""
    difference = clock.origins[0] - before
    gap = float(difference) / 1e9 if clock.form == "date" else float(difference)
    if gap < 0:
        raise out_of_order(clock, before, column)
    return gap


def out_of_order(clock: Clock, before: Any, column: str | None) -> DataError:
    """The error of an observation that does not come after the one before."""
    now, then = clock.written([0], [0.0])[0], clock._replace(origins=np.array([before], object))
    return DataError(
        f"the observation at {column} {now} is not after the one before, at {then.written([0], [0.0])[0]}: give "
        "observations in order of time, those of one time together"
    )
