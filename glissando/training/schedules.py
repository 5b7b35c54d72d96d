"""Learning-rate schedules: a factor on the base rate from where training is and what it feels.

A schedule is a value with `factor(progress)` and, where it remembers something, a `state_dict`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from glissando.config import used_with
from glissando.errors import ConfigError, unknown_name


@dataclass
class ScheduleConfig:
    """How the learning rate moves.

    kind            warmup-cosine, constant, plateau or homeostatic
    warmup_steps    linear rise from 0 (all kinds)
    final_ratio     warmup-cosine ends at this fraction of the base rate
    plateau_factor  plateau: each cut multiplies the rate by this ...
    plateau_cuts    ... at most this often ...
    plateau_patience ... after so many validations without a new best loss
    """

    kind: str = "warmup-cosine"
    warmup_steps: int = 50
    final_ratio: float = used_with(0.1, kind="warmup-cosine")
    plateau_factor: float = used_with(0.5, kind="plateau")
    plateau_cuts: int = used_with(5, kind="plateau")
    plateau_patience: int = used_with(3, kind="plateau")

    def check(self) -> None:
        """Raise UnknownNameError for a kind that is not in SCHEDULES, ConfigError for a number out of its range."""
        if self.kind not in SCHEDULES:
            raise unknown_name("schedule", self.kind, SCHEDULES)
        for name, holds, expected in (
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("final_ratio", 0 <= self.final_ratio <= 1, "from 0 to 1"),
            ("plateau_factor", 0 < self.plateau_factor < 1, "above 0 and below 1"),
            ("plateau_cuts", self.plateau_cuts >= 0, "at least 0"),
            ("plateau_patience", self.plateau_patience > 0, "at least 1"),
        ):
            require(holds, f"training.schedule.{name}", getattr(self, name), expected)


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError about an option's value unless it holds."""
    if not holds:
        raise ConfigError(f"{name} must be {expected}, got {value}")


@dataclass(frozen=True)
class Progress:
    """Where training is: optimizer steps done, the share of the budget spent, |grad| before clipping."""

    step: int
    share: float
    grad_norm: float


class Schedule(ABC):
    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config

    def factor(self, now: Progress) -> float:
        """The multiple of the base learning rate for this step."""
        warmup = self.config.warmup_steps
        rise = min(1.0, (now.step + 1) / warmup) if warmup else 1.0
        return rise * self.shape(now)

    @abstractmethod
    def shape(self, now: Progress) -> float:
        """The factor once warm."""

    def observe_validation(self, loss: float) -> None:  # noqa: B027 (most schedules do not listen)
        """Told the validation loss each time it is measured."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ConfigError(f"schedule {self.config.kind} keeps no state, the checkpoint holds {sorted(state)}")


class WarmupCosine(Schedule):
    """r + (1 - r) (1 + cos(pi s)) / 2 at share s of the budget, r = final_ratio."""

    def shape(self, now: Progress) -> float:
        floor = self.config.final_ratio
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, now.share)))


class Constant(Schedule):
    """1."""

    def shape(self, now: Progress) -> float:
        return 1.0


class Plateau(Schedule):
    """plateau_factor ** cuts: one cut whenever `plateau_patience` validations bring no new best loss.

    As the Tauformer was trained: a warm-up, a constant, and a factor of 0.5 cut at most five times.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        super().__init__(config)
        self.best, self.waited, self.cuts = math.inf, 0, 0

    def shape(self, now: Progress) -> float:
        return self.config.plateau_factor**self.cuts

    def observe_validation(self, loss: float) -> None:
        if loss < self.best:
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= self.config.plateau_patience and self.cuts < self.config.plateau_cuts:
            self.cuts, self.waited = self.cuts + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "cuts": self.cuts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.cuts = state["best"], state["waited"], state["cuts"]


class Homeostatic(Schedule):
    """sigmoid(1 / (|grad| + 1e-6) - 0.5): the Continuous Transformer's rate, calm gradients being stepped faster."""

    def shape(self, now: Progress) -> float:
        # The argument is at most 1e6; exp(-x) underflows to 0 there, which is the limit.
        return 1 / (1 + math.exp(0.5 - 1 / (now.grad_norm + 1e-6)))


SCHEDULES: dict[str, type[Schedule]] = {
    "warmup-cosine": WarmupCosine,
    "constant": Constant,
    "plateau": Plateau,
    "homeostatic": Homeostatic,
}


def build_schedule(config: ScheduleConfig) -> Schedule:
    """Raises UnknownNameError for a kind that is not in SCHEDULES, ConfigError for a number out of its range."""
    config.check()
    return SCHEDULES[config.kind](config)
