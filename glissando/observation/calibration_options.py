"""When tau is calibrated: the options of training.calibration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from glissando.config import Registry, new_registry, options


@options
class FixedOptions:
    """tau is never set."""


@options
class StartOptions:
    """tau is set before the first step.

    at_restart  also when training is resumed, as published; a resumed run is then not the uninterrupted one
    """

    at_restart: bool = True


@options
class PeriodicOptions:
    """tau is set before the first step and then again. every: steps between."""

    every: PositiveInt = 100


@options
class DriftOptions:
    """tau is set before the first step, and where the median has drifted while gradients are small.

    every            steps between checks
    drift_tolerance  tau is set where |median - tau| is more than this share of tau ...
    gradient_gate    ... and the gradient norm, averaged exponentially over about 20 steps, is below this (.inf: always)
    """

    every: PositiveInt = 100
    drift_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    gradient_gate: PositiveFloat = 1.0


#: when tau, one number for the model, is set to the median energy of the first tau layer's keys over a batch
CALIBRATIONS: Registry[Any] = new_registry("calibration", "calibration", "fixed")
for _name, _options in (
    ("fixed", FixedOptions),
    ("start", StartOptions),
    ("periodic", PeriodicOptions),
    ("drift", DriftOptions),
):
    CALIBRATIONS.add(_name, _options, "glissando.observation.calibration:Calibration")
