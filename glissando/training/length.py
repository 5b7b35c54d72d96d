"""How long to train. It imports no torch, so that a budget which cannot be used is refused at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from glissando.config import options
from glissando.errors import ConfigError

#: the ways to say how long to train
BUDGETS = ("steps", "epochs", "tokens", "seconds", "flops")
BUDGET_OPTIONS = f"training.steps, .{', .'.join(BUDGETS[1:])}"

Positive = Annotated[float, Field(gt=0)]


@options
class Length:
    """How long to train.

    steps    budget in optimizer steps; give at most one budget; without one, training ends at Ctrl-C
    epochs   budget in passes over a text or over pairs
    tokens   budget in scored targets
    seconds  budget in seconds of wall time
    flops    budget in FLOPs: three times those of the forward pass, padding included (glissando.flops)
    """

    steps: PositiveInt | None = None
    epochs: Positive | None = None
    tokens: PositiveInt | None = None
    seconds: Positive | None = None
    flops: Positive | None = None

    def __post_init__(self) -> None:
        if len(self.budgets) > 1:
            raise ConfigError(f"the budget is one of {BUDGET_OPTIONS}; got {' and '.join(self.budgets)}")

    @property
    def budgets(self) -> list[str]:
        """The names in BUDGETS that have a value."""
        return [name for name in BUDGETS if getattr(self, name) is not None]
