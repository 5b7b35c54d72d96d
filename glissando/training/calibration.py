"""Calibration: what mixers with a method `calibrate` set from data, before a step, and not by gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from glissando.data.base import Batch
from glissando.evaluation.observe import show
from glissando.evaluation.scoring import accepted_control, to_device
from glissando.mixers import Context, Mixer
from glissando.mixers.base import Moment
from glissando.sharding import all_gathered
from glissando.training.loop import Hook, Loop


class Calibration(Hook):
    """Asks the mixers before each step, on every process alike; `count`: calibrations of the run so far."""

    def __init__(self) -> None:
        self.count, self._restarted = 0, True

    def before_step(self, loop: Loop, batches: list[Batch]) -> None:
        restarted, self._restarted = self._restarted, False
        mixers: list[Any] = _calibrated(loop)
        for kind in dict.fromkeys(map(type, mixers)):
            alike: list[Any] = [mixer for mixer in mixers if type(mixer) is kind]
            now = Moment(loop.state.step, restarted, alike, partial(_measured, loop, batches, alike[0]))
            with loop.clock.aside():
                self.count += bool(alike[0].calibrate(now))

    def columns(self, loop: Loop) -> list[str]:
        return ["calibrations"] if _calibrated(loop) else []

    def row(self, loop: Loop) -> dict[str, Any]:
        """How often something was calibrated: alike in two rows, it was frozen between them."""
        return dict.fromkeys(self.columns(loop), self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _calibrated(loop: Loop) -> list[Any]:
    return [m for m in loop.model.modules() if isinstance(m, Mixer) and hasattr(m, "calibrate")]


def _measured(
    loop: Loop, batches: list[Batch], mixer: Mixer, method: Callable[[Tensor, Context], Tensor]
) -> np.ndarray:
    """What `method(x, ctx)` returns of the mixer's input, (N,) over the batches of all processes."""
    parts = []
    for batch in batches:
        seen: list[Tensor] = []

        def note(mixer: Mixer, x: Tensor, ctx: Context, seen: list[Tensor] = seen) -> None:
            if not seen:  # a block that is applied again sees other vectors
                seen.append(method(x, ctx))

        rows = to_device(batch, loop.fabric.device)
        with loop.fabric.autocast():
            show(loop.model, [mixer], note, rows.ids, rows.mask, accepted_control(loop.model, rows))
        parts.append(seen[0].flatten().cpu().numpy())
    return np.concatenate(all_gathered(np.concatenate(parts), loop.fabric.world_size))
