"""Calibration of tau: one number for the model, set from the energies of its keys.

    tau := median of E(k) over the keys k of the first tau layer, all heads and real tokens of a batch

The batch is the one that the next step trains on, the rows of all processes and micro-batches together, so that tau
does not depend on how a step is parted. It is set before that step, so that a row of metrics.csv is of one tau where
`log_every` divides `every`. As tau moves with the energies, a loss that falls with it is worth less than one that falls
on a frozen tau: `tau_calibrations` in metrics.csv separates the two.

The Tauformer calibrates at start and restart; its adaptive strategies recalibrate at intervals, or where the energies
have drifted while gradients are small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from glissando.data.base import Batch
from glissando.errors import ConfigError, TrainingError
from glissando.evaluation.observe import show
from glissando.evaluation.scoring import accepted_control, to_device
from glissando.mixers import Context
from glissando.mixers.tau import Tau
from glissando.model import LanguageModel
from glissando.observation.calibration_options import DriftOptions, FixedOptions, PeriodicOptions, StartOptions
from glissando.sharding import all_gathered
from glissando.training.hook import Hook
from glissando.training.loop import Loop

#: of the exponential average of gradient norms, over about 1 / (1 - 0.95) = 20 steps
_DECAY = 0.95


class Calibration(Hook):
    """Sets tau before a step that is due for it, on every process alike; its options say when.

    count     calibrations of the run so far
    gradient  exponential average of the gradient norm before clipping; None before the first step
    """

    def __init__(self, options: FixedOptions | StartOptions | PeriodicOptions | DriftOptions) -> None:
        self.options, self.count, self._restarted = options, 0, True
        self.gradient: float | None = None

    def before_step(self, loop: Loop, batches: list[Batch]) -> None:
        restarted, self._restarted = self._restarted, False
        if not self._due(loop, restarted):
            return
        with loop.clock.aside():
            median = batch_median(loop, batches)
            if loop.state.step and isinstance(self.options, DriftOptions):
                tau = float(tau_mixers(loop.model)[0].tau)
                if abs(median - tau) <= self.options.drift_tolerance * tau:
                    return
            set_tau(loop.model, median)
            self.count += 1

    def _due(self, loop: Loop, restarted: bool) -> bool:
        """Whether the energies are looked at before the next step."""
        options, step = self.options, loop.state.step
        if isinstance(options, FixedOptions):
            return False
        if isinstance(options, StartOptions):
            return step == 0 or (restarted and options.at_restart)
        if step % options.every or isinstance(options, PeriodicOptions) or self.gradient is None:
            return step % options.every == 0
        # By the first process's gradient: one that decided otherwise would leave the others waiting.
        return loop.fabric.broadcast(self.gradient < options.gradient_gate)

    def after_step(self, loop: Loop) -> None:
        before = loop.grad_norm if self.gradient is None else self.gradient
        self.gradient = _DECAY * before + (1 - _DECAY) * loop.grad_norm

    def columns(self, loop: Loop) -> list[str]:
        return ["tau_calibrations"] if any(isinstance(m, Tau) for m in loop.model.modules()) else []

    def row(self, loop: Loop) -> dict[str, Any]:
        """How often tau was calibrated: alike in two rows, it was frozen between them."""
        return dict.fromkeys(self.columns(loop), self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "gradient": self.gradient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.gradient = state["count"], state["gradient"]


def tau_mixers(model: LanguageModel) -> list[Tau]:
    """In the order of the layers. Raises ConfigError if there is none."""
    found = [m for m in model.modules() if isinstance(m, Tau)]
    if not found:
        raise ConfigError("no layer of the model is a tau mixer, so there is no tau to calibrate")
    return found


def set_tau(model: LanguageModel, tau: float) -> None:
    """tau is one number for the model: every layer gets it."""
    for mixer in tau_mixers(model):
        mixer.tau.fill_(tau)


def key_energies(
    model: LanguageModel, ids: Tensor, mask: Tensor | None = None, control: Tensor | None = None
) -> Tensor:
    """E (N, H) of the first tau layer's keys at the N real tokens of ids (B, T), by one forward of the model."""
    seen: list[Tensor] = []

    def note(mixer: Tau, x: Tensor, ctx: Context) -> None:
        if not seen:  # a block that is applied again sees other vectors
            seen.append(mixer.key_energies(x, ctx))

    show(model, tau_mixers(model)[:1], note, ids, mask, control)
    return seen[0]


def batch_median(loop: Loop, batches: list[Batch]) -> float:
    """The median key energy over the batch of the next step, over all processes; the same number on each of them.

    Raises TrainingError, on every process, unless it is finite and above 0.
    """
    found = []
    for batch in batches:
        on_device = to_device(batch, loop.fabric.device)
        with loop.fabric.autocast():
            energies = key_energies(loop.model, on_device.ids, on_device.mask, accepted_control(loop.model, on_device))
        found.append(energies.flatten().cpu().numpy())
    median = float(np.median(np.concatenate(all_gathered(np.concatenate(found), loop.fabric.world_size))))
    if not (math.isfinite(median) and median > 0):
        raise TrainingError(
            f"tau cannot be calibrated before step {loop.state.step + 1}: the median energy of the keys is {median}, "
            "and tau must be finite and above 0. Train again with another model.mixer.laplacian, or with "
            "training.calibration.kind: fixed"
        )
    return median
