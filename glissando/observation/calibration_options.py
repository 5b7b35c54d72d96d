"""When tau is calibrated: the options of training.calibration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from glissando.config import Registry, options


@options
class FixedOptions:
    """tau is never set."""


@options
class StartOptions:
    """tau is set before the first step.

    at_restart  set tau again when training is resumed, as published; the result then differs from that of an
                uninterrupted training
    """

    at_restart: bool = True


@options
class PeriodicOptions:
    """tau is set before the first step and then at regular intervals.

    every  number of steps between two calibrations
    """

    every: PositiveInt = 100


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


#: when tau, one number for the model, is set to the median energy of the first tau layer's keys over a batch
CALIBRATIONS: Registry[Any] = Registry("calibration", "fixed")
for _name, _options in (
    ("fixed", FixedOptions),
    ("start", StartOptions),
    ("periodic", PeriodicOptions),
    ("drift", DriftOptions),
):
    CALIBRATIONS.add(_name, _options, "glissando.observation.calibration:Calibration")
