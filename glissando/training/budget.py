"""How much of a training's budget is spent, what is due after a step, and when training stops."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import torch

from glissando.data.base import Corpus
from glissando.data.corpora import CORPORA
from glissando.errors import ConfigError
from glissando.training.config import RunConfig
from glissando.training.fabric import Fabric
from glissando.training.state import TrainState

#: steps between validations, checkpoints and samples of a training that only Ctrl-C ends, unless they are given
ENDLESS_EVERY = 1000
#: seconds after which such a training saves in any case
ENDLESS_SECONDS = 600.0


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
    """

    def __init__(self, steps: int | None, tokens: int | None, seconds: float | None, flops: float | None) -> None:
        self.limits = {"step": steps, "tokens": tokens, "seconds": seconds, "flops": flops}
        self.steps, self.seconds = steps, seconds
        self.endless = not any(self.limits.values())
        self.share = self.share_before = 0.0  # at the end of the last two steps
        self.ended = self.asked = False

    @classmethod
    def of(cls, config: RunConfig, corpus: Corpus) -> Budget:
        """Raises ConfigError for epochs of a corpus that has no known end."""
        t, steps = config.training, config.training.steps
        if t.epochs is not None and corpus.epoch_rows is None:
            raise ConfigError(
                "training.epochs counts passes over a text or over pairs, and corpus "
                f"{CORPORA.kind_of(config.data)} has no known end: give training.steps or another budget"
            )
        if t.epochs is not None and corpus.epoch_rows is not None:
            steps = max(1, math.ceil(t.epochs * corpus.epoch_rows / config.data.batch_size))
        return cls(steps, t.tokens, t.seconds, t.flops)

    @property
    def stopping(self) -> bool:
        return self.ended or self.asked

    @property
    def interrupted(self) -> bool:
        return self.asked and not self.ended

    def begin(self, state: TrainState) -> None:
        """Take note of where a training starts."""
        self.spend(state)
        self.share_before = self.share

    def spend(self, state: TrainState) -> None:
        """Take note of a step that is done."""
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


def agree(fabric: Fabric, seconds: float, asked: bool) -> tuple[float, bool]:
    """The first process's clock, and whether any process was asked to stop."""
    if fabric.world_size == 1:
        return seconds, asked
    both = torch.tensor(
        [seconds if fabric.is_global_zero else 0.0, float(asked)], dtype=torch.float64, device=fabric.device
    )
    torch.distributed.all_reduce(both)
    return both[0].item(), both[1].item() > 0
