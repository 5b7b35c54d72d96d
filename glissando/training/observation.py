"""What the mixers of a model report to the log of its training."""

from __future__ import annotations

import warnings
from typing import Any

from glissando.data.base import Batch
from glissando.evaluation.observe import columns, first_row, observe, observed_warnings
from glissando.evaluation.scoring import accepted_control, to_device
from glissando.training.loop import Hook, Loop

#: the mixers are observed on so much of one row
_TOKENS = 256


class Observation(Hook):
    """What the mixers measure of themselves after a step that is logged, on the beginning of its first row.

    That takes a quarter of a step of 512 tokens: 2.4 % of training tauformer-nano with training.log_every 10, and less
    of larger steps. What an observer finds wrong is a warning, once a run.
    """

    def __init__(self) -> None:
        self.beginning: Batch | None = None  # of this step's first row
        self.warned: list[str] = []

    def before_step(self, loop: Loop, batches: list[Batch]) -> None:
        self.beginning = first_row(batches[0], _TOKENS)

    def columns(self, loop: Loop) -> list[str]:
        return columns(loop.model)

    def row(self, loop: Loop) -> dict[str, Any]:
        """Computed by every process, because a sharded model takes all of them."""
        assert self.beginning is not None
        row = to_device(self.beginning, loop.fabric.device)
        with loop.clock.aside(), loop.fabric.autocast():
            values = observe(loop.model, row.ids, row.mask, accepted_control(loop.model, row))
        for kind, (category, message) in observed_warnings(loop.model, values).items():
            if kind not in self.warned and loop.fabric.is_global_zero:
                warnings.warn(message, category)
            self.warned = sorted({*self.warned, kind})
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"warned": self.warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.warned = state["warned"]
