"""Calibration of tau: one number for the model, set from the energies of its keys.

    tau := median of E(k) over the keys k of the first tau layer, all heads and real tokens of a batch

The batch is the one that the next step trains on, so that a row of metrics.csv is of one tau where `log_every` divides
`every`. As tau moves with the energies, a loss that falls with it is worth less than one that falls on a frozen tau:
`calibrations` in metrics.csv separates the two.

The Tauformer calibrates at start and restart; its adaptive strategies recalibrate at intervals, or where the energies
have drifted while gradients are small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from glissando.config import Registry, options
from glissando.errors import TrainingError

if TYPE_CHECKING:
    from glissando.training.calibration import Moment

    from .layer import Tau


@options
class FixedOptions:
    """tau is never set."""

    def due(self, now: Moment) -> bool:
        return False


@options
class StartOptions:
    """tau is set before the first step.

    at_restart  set tau again when training is resumed, as published; the result then differs from that of an
                uninterrupted training
    """

    at_restart: bool = True

    def due(self, now: Moment) -> bool:
        return now.step == 0 or (now.restarted and self.at_restart)


@options
class PeriodicOptions:
    """tau is set before the first step and then at regular intervals.

    every  number of steps between two calibrations
    """

    every: PositiveInt = 100

    def due(self, now: Moment) -> bool:
        return now.step % self.every == 0


@options
class DriftOptions:
    """tau is set before the first step, and again when the median energy has drifted while gradients are small.

    every            number of steps between two checks
    drift_tolerance  smallest |median - tau| at which tau is set, as a fraction of tau
    gradient_gate    tau is set only if the norm of the gradient, averaged exponentially over about 20 steps, is below
                     this number; .inf: always
    """

    every: PositiveInt = 100
    drift_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    gradient_gate: PositiveFloat = 1.0

    def due(self, now: Moment) -> bool:
        return now.step % self.every == 0 and (now.gradient is None or now.agreed(now.gradient < self.gradient_gate))


#: when tau, one number for the model, is set to the median energy of the first tau layer's keys over a batch
CALIBRATIONS: Registry[Any] = Registry("calibration", "fixed")
for _name, _options in (
    ("fixed", FixedOptions),
    ("start", StartOptions),
    ("periodic", PeriodicOptions),
    ("drift", DriftOptions),
):
    CALIBRATIONS.add(_name, _options, _options)


def calibrate(mixer: Tau, now: Moment) -> bool:
    """Set tau in all tau mixers, where that is due; whether it was.

    Raises TrainingError, on every process, unless the median energy is finite and above 0.
    """
    options = mixer.config.calibration
    if not options.due(now):
        return False
    median = float(np.median(now.measure(mixer.key_energies)))
    if not (math.isfinite(median) and median > 0):
        raise TrainingError(
            f"tau cannot be calibrated before step {now.step + 1}: the median energy of the keys is {median}, "
            "and tau must be finite and above 0. Train again with another model.mixer.laplacian, or with "
            "model.mixer.calibration.kind: fixed"
        )
    tau = float(mixer.tau)
    if now.step and isinstance(options, DriftOptions) and abs(median - tau) <= options.drift_tolerance * tau:
        return False
    for each in now.mixers:
        each.tau.fill_(median)
    return True
