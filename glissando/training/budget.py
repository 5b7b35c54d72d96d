"""How much of a training's budget is spent, and what is due after a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from glissando.errors import ConfigError
from glissando.training.config import TrainingConfig
from glissando.training.state import TrainState

#: steps between validations, checkpoints and samples of a training that only Ctrl-C ends, unless they are given
ENDLESS_EVERY = 1000


class Clock:
    """Wall time of this process; `aside` is for what is not part of a step.

    now  the clock that is read, in seconds; a comparison on a machine that others use too may read the process's own
    """

    now = staticmethod(lambda: time.perf_counter())

    def __init__(self, before: float = 0.0) -> None:
        self._before, self._started, self._aside = before, self.now(), 0.0

    def elapsed(self) -> float:
        """Seconds of the whole run until now, resumptions added up."""
        return self._before + self.now() - self._started

    def working(self) -> float:
        """Seconds that this process has spent on steps, not on validating, sampling and saving."""
        return self.now() - self._started - self._aside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        began = self.now()
        try:
            yield
        finally:
            self._aside += self.now() - began


class Budget:
    """What has been spent, counted over resumptions too.

    limits  those that are given; empty where training goes on until it is asked to stop
    share   of the budget that is spent, at most 1

    Raises ConfigError for epochs of data that have no known end.
    """

    def __init__(self, t: TrainingConfig, epoch_rows: int | None, batch_size: int) -> None:
        self.steps = t.steps
        if t.epochs is not None:
            if epoch_rows is None:
                raise ConfigError(
                    "training.epochs counts passes over a text or over pairs, and this corpus has no known end: give "
                    "training.steps or another budget"
                )
            self.steps = max(1, math.ceil(t.epochs * epoch_rows / batch_size))
        limits = {"step": self.steps, "tokens": t.tokens, "seconds": t.seconds, "flops": t.flops}
        self.limits = {name: limit for name, limit in limits.items() if limit}
        self.share = self.share_before = 0.0  # at the end of the last two steps

    def spend(self, state: TrainState) -> None:
        """Take note of where training is."""
        share = next((getattr(state, name) / limit for name, limit in self.limits.items()), 0.0)
        self.share_before, self.share = self.share, min(1.0, share)

    def due(self, every: int | None, step: int) -> bool:
        """Whether something is due after `step`: every so many steps, or ten times a run.

        Where there is no budget, every ENDLESS_EVERY steps.
        """
        if every is None and self.steps is None and self.limits:
            return int(10 * self.share) > int(10 * self.share_before)
        return step % (every or (max(1, (self.steps or 0) // 10) if self.limits else ENDLESS_EVERY)) == 0
