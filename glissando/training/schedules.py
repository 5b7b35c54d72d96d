"""Learning-rate schedules: a factor on the base rate from where training is and the gradient's norm."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt

from glissando.config import Registry, options

Share = Annotated[float, Field(ge=0, le=1)]


#: share of a budget, whatever it is counted in, after which the rate has risen
LONGEST_WARMUP = 0.1


@options
class ScheduleOptions:
    """Options of every schedule.

    warmup_steps  number of steps in which the rate rises linearly from 0; at most a tenth of the budget
    """

    #: whether the schedule is a function of the share of a budget that is spent
    needs_end: ClassVar[bool] = False

    warmup_steps: NonNegativeInt = 50


@options
class WarmupCosineOptions(ScheduleOptions):
    """The rate falls by a cosine over the budget.

    final_ratio  fraction of the base rate at the end
    """

    needs_end: ClassVar[bool] = True

    final_ratio: Share = 0.1


@options
class ConstantOptions(ScheduleOptions):
    """The base rate throughout."""


@options
class PlateauOptions(ScheduleOptions):
    """The rate is halved, at most five times, after each three validations without a new best loss."""


@options
class HomeostaticOptions(ScheduleOptions):
    """A rate that follows the gradient's norm."""


class Schedule:
    """A multiple of the base rate; `kept` are the attributes that a checkpoint holds."""

    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    def factor(self, step: int, share: float, grad_norm: float) -> float:
        """The multiple of the base learning rate for a step, from the steps done, the share of the budget that is spent
        and |grad| before clipping."""
        warmup = self.config.warmup_steps
        rise = max((step + 1) / warmup, share / LONGEST_WARMUP) if warmup else 1.0
        return min(1.0, rise) * self.shape(share, grad_norm)

    def shape(self, share: float, grad_norm: float) -> float:
        """The factor once warm."""
        return 1.0

    def observe_validation(self, loss: float) -> None:
        """Called with the validation loss each time it is measured."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


#: learning-rate schedules by name
SCHEDULES: Registry[Schedule] = Registry("schedule", "warmup-cosine", ScheduleOptions)


@SCHEDULES.register("warmup-cosine", WarmupCosineOptions)
class WarmupCosine(Schedule):
    """r + (1 - r) (1 + cos(pi s)) / 2 at share s of the budget, r = final_ratio."""

    def shape(self, share: float, grad_norm: float) -> float:
        floor = self.config.final_ratio
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@SCHEDULES.register("constant", ConstantOptions)
class Constant(Schedule):
    """1."""


@SCHEDULES.register("plateau", PlateauOptions)
class Plateau(Schedule):
    """cut ** cuts: one cut whenever `patience` validations bring no new best loss, as the Tauformer was trained."""

    kept = ("best", "waited", "cuts")
    cut, most_cuts, patience = 0.5, 5, 3

    def __init__(self, config: PlateauOptions) -> None:
        super().__init__(config)
        self.best, self.waited, self.cuts = math.inf, 0, 0

    def shape(self, share: float, grad_norm: float) -> float:
        return self.cut**self.cuts

    def observe_validation(self, loss: float) -> None:
        if loss < self.best:
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= self.patience and self.cuts < self.most_cuts:
            self.cuts, self.waited = self.cuts + 1, 0


@SCHEDULES.register("homeostatic", HomeostaticOptions)
class Homeostatic(Schedule):
    """sigmoid(1 / (|grad| + 1e-6) - 0.5): the Continuous Transformer's rate, calm gradients being stepped faster."""

    def shape(self, share: float, grad_norm: float) -> float:
        # The argument is at most 1e6; exp(-x) underflows to 0 there, which is the limit.
        return 1 / (1 + math.exp(0.5 - 1 / (grad_norm + 1e-6)))
