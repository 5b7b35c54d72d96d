"""How much of a training's budget is spent, what is due after a step, and when training stops."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from glissando.data.base import Corpus
from glissando.errors import ConfigError
from glissando.training.config import TrainingConfig
from glissando.training.state import TrainState

#: steps between validations, checkpoints and samples of a training that only Ctrl-C ends, unless they are given
ENDLESS_EVERY = 1000


class Clock:
    """Wall time of this process; `aside` is for what is not part of a step."""

    def __init__(self, before: float = 0.0) -> None:
        self._before, self._started, self._aside = before, time.perf_counter(), 0.0

    def elapsed(self) -> float:
        """Seconds of the whole run until now, resumptions added up."""
        return self._before + time.perf_counter() - self._started

    def working(self) -> float:
        """Seconds that this process has spent on steps, not on validating, sampling and saving."""
        return time.perf_counter() - self._started - self._aside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - began


class Budget:
    """What has been spent, counted over resumptions too.

    share   of the budget that is spent, at most 1
    ended   the step just done was the last one of the run
    asked   somebody asked to stop: the run can go on, and what is due after this step is done all the same, for
            resuming begins with the next one

    Raises ConfigError for epochs of a corpus that has no known end.
    """

    def __init__(self, t: TrainingConfig, corpus: Corpus, batch_size: int) -> None:
        self.steps = t.steps
        if t.epochs is not None:
            if corpus.epoch_rows is None:
                raise ConfigError(
                    "training.epochs counts passes over a text or over pairs, and this corpus has no known end: give "
                    "training.steps or another budget"
                )
            self.steps = max(1, math.ceil(t.epochs * corpus.epoch_rows / batch_size))
        self.limits = {"step": self.steps, "tokens": t.tokens, "seconds": t.seconds, "flops": t.flops}
        self.endless = not any(self.limits.values())
        self.share = self.share_before = 0.0  # at the end of the last two steps
        self.ended = self.asked = False

    @property
    def stopping(self) -> bool:
        return self.ended or self.asked

    @property
    def interrupted(self) -> bool:
        return self.asked and not self.ended

    def spend(self, state: TrainState) -> None:
        """Take note of where training is."""
        share = next((getattr(state, name) / limit for name, limit in self.limits.items() if limit), 0.0)
        self.share_before, self.share = self.share, min(1.0, share)
        self.ended = self.share >= 1

    def due(self, every: int | None, step: int) -> bool:
        """Whether something is due after `step`: every so many steps, or ten times a run; and at its end.

        Where there is no budget, every ENDLESS_EVERY steps.
        """
        if self.ended:
            return True
        if every is None and self.steps is None and not self.endless:
            return int(10 * self.share) > int(10 * self.share_before)
        return step % (every or (ENDLESS_EVERY if self.endless else max(1, (self.steps or 0) // 10))) == 0
