"""How much of the budget is spent, what is due when, and when training ends."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer

from glissando.training.module import TrainingModule

#: steps between validations, checkpoints and samples of a training that only Ctrl-C ends, unless they are given
ENDLESS_EVERY = 1000


class StepEnd(Callback):
    """Base of callbacks that act once an optimizer step is done, not after every micro-batch."""

    def on_train_batch_end(
        self, trainer: Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, TrainingModule)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.after_step(trainer, module, trainer.global_step)

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        """`step` optimizer steps are done."""


class Budget(StepEnd):
    """Counts what is spent, over resumptions too, and ends training when the budget, if there is one, is spent or when
    somebody asks.

    Every process goes by the first one's clock and by anybody's request: what is due on one is due on all.

    ends          this is the last step of the run
    interrupted   training stops here, but the run could go on: what is due after this step is done all the same, for
                  resuming begins with the next one
    """

    def __init__(
        self,
        steps: int | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
        flops: float | None = None,
    ) -> None:
        self.steps, self.tokens, self.seconds, self.flops = steps, tokens, seconds, flops
        self.endless = steps is tokens is seconds is flops is None
        self.share = self.share_before_step = 0.0  # of the budget, at the end of the last two steps
        self.asked_to_stop = self.ends = self.interrupted = False
        self.spent = 0.0  # seconds at the end of the last step
        self._before, self._started, self._aside = 0.0, time.perf_counter(), 0.0

    def elapsed(self) -> float:
        """Seconds of the whole run until now."""
        return self._before + time.perf_counter() - self._started

    def working(self) -> float:
        """Seconds that this process has spent on steps, not on validating, sampling and saving."""
        return time.perf_counter() - self._started - self._aside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - began

    def due(self, every: int | None, step: int) -> bool:
        """Whether something is due after `step`: every so many steps, or ten times a run; and at its end.

        Where there is no budget, every ENDLESS_EVERY steps.
        """
        if self.ends:
            return True
        if self.endless:
            return step % (every or ENDLESS_EVERY) == 0
        if every is None and self.steps is None:
            return int(10 * self.share) > int(10 * self.share_before_step)
        return step % (every or max(1, (self.steps or 0) // 10)) == 0

    def end(self, trainer: Trainer) -> None:
        """Makes the step in progress the last one of the run."""
        self.ends, self.interrupted = True, False
        trainer.should_stop = True

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        self._started, self._aside = time.perf_counter(), 0.0
        self._share(module, trainer.global_step)
        self.share_before_step = self.share
        if self.share >= 1:
            trainer.should_stop = True

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        asked = self.asked_to_stop
        self.spent = self.elapsed()
        if trainer.world_size > 1:
            asked = self._agree(trainer, module)
        self._share(module, step)
        if self.share >= 1:
            self.end(trainer)
        elif asked:
            self.interrupted = trainer.should_stop = True

    def _agree(self, trainer: Trainer, module: TrainingModule) -> bool:
        """Takes the first process's clock, and says whether any process was asked to stop."""
        mine = [float(self.asked_to_stop), self.spent if trainer.is_global_zero else 0.0]
        both = torch.tensor(mine, dtype=torch.float64, device=module.device)
        torch.distributed.all_reduce(both)
        asked, self.spent = both.tolist()
        return asked > 0

    def _share(self, module: Any, step: int) -> None:
        self.share_before_step = self.share
        if self.steps is not None:
            share = step / self.steps
        elif self.tokens is not None:
            share = module.tokens / self.tokens
        elif self.flops is not None:
            share = module.flops / self.flops
        else:
            share = max(self.spent, self._before) / (self.seconds or math.inf)
        self.share = module.share = min(1.0, share)

    def state_dict(self) -> dict[str, float]:
        return {"spent": self.elapsed()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._before = self.spent = state["spent"]
