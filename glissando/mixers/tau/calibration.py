"""Calibration of tau: one number for the model, set from the energies of its keys.

    tau := median of E(k) over the keys k of the first tau layer, all heads and real tokens of a batch

The batch is the one that the next step trains on. As tau moves with the energies, a loss that falls with it is worth
less than one that falls on a frozen tau: `calibrations` in metrics.csv separates the two. The Tauformer calibrates at
start and restart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from glissando.errors import TrainingError
from glissando.mixers.base import Moment

if TYPE_CHECKING:
    from .layer import Tau


def calibrate(mixer: Tau, now: Moment) -> bool:
    """Set tau in all tau mixers, where that is due; whether it was.

    Raises TrainingError, on every process, unless the median energy is finite and above 0.
    """
    if mixer.config.calibration == "fixed" or not now.restarted:
        return False
    median = float(np.median(now.measure(mixer.key_energies)))
    if not (math.isfinite(median) and median > 0):
        raise TrainingError(
            f"tau cannot be calibrated before step {now.step + 1}: the median energy of the keys is {median}, "
            "and tau must be finite and above 0. Train again with another model.mixer.laplacian, or with "
            "model.mixer.calibration fixed"
        )
    for each in now.mixers:
        each.tau.fill_(median)
    return True
