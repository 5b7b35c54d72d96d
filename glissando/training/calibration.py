"""Calibration of tau, and a warning where its attention has collapsed into an average.

    tau := median of E(k) over the keys k of the first tau layer, all heads and real tokens of a batch

The batch is the one that the next step trains on, the rows of all processes and micro-batches together, so that tau
does not depend on how a step is parted. It is set before that step, so that a row of metrics.csv tells of one tau where
`log_every` divides `every`. As tau moves with the energies, a loss that falls with it says less than one that falls on
a frozen tau: `tau_calibrations` in metrics.csv tells the two apart.

The Tauformer calibrates at start and restart; its adaptive strategies recalibrate at intervals, or where the energies
have drifted while gradients are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from glissando.errors import ConfigError, TrainingError
from glissando.evaluation.scoring import heard_control
from glissando.mixers import Context
from glissando.mixers.tau import Tau
from glissando.model import LanguageModel
from glissando.training.budget import Budget, StepEnd
from glissando.training.config import CALIBRATIONS
from glissando.training.module import MicroBatch, TrainingModule
from glissando.training.observe import show

#: of the exponential average of gradient norms, over about 1 / (1 - 0.95) = 20 steps
_DECAY = 0.95
#: energies closer together than this share of their median: at T = 0.05 their lambdas give logits within 0.1
_LEAST_SPREAD = 0.02
#: at init T = 1 gives a share of 0.9999 of the keys, 0.1 gives 0.98, 0.05 gives 0.92 (chain over 64 features)
_LARGEST_SHARE = 0.95
#: of so few keys even a selective head hears most
_FEW_KEYS = 16


class CollapseWarning(UserWarning):
    """Tau attention weighs all keys nearly alike."""


class Calibration(StepEnd):
    """Sets tau before a step that is due for it, on every process alike; see CalibrationConfig for when.

    count     calibrations of the run so far
    gradient  exponential average of the gradient norm before clipping; None before the first step
    """

    def __init__(self, config: Any, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self.count = 0
        self.gradient: float | None = None
        self._restarted = False

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        self._restarted = True

    def on_train_batch_start(self, trainer: Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, TrainingModule)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.before_step(trainer, module, trainer.global_step)
            self._restarted = False

    def before_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        """`step` optimizer steps are done."""
        if not self._due(trainer, step):
            return
        with self.budget.aside():
            median = batch_median(trainer, module)
            if step == 0 or CALIBRATIONS.kind_of(self.config) != "drift" or self._has_drifted(module.model, median):
                set_tau(module.model, median)
                self.count += 1

    def _due(self, trainer: Trainer, step: int) -> bool:
        """Whether the energies are looked at before the next step."""
        c = self.config
        kind = CALIBRATIONS.kind_of(c)
        if kind == "fixed":
            return False
        if kind == "start":
            return step == 0 or (self._restarted and c.at_restart)
        if kind == "periodic" or self.gradient is None:
            return step % c.every == 0
        # By the first process's word: one that decided otherwise would leave the others waiting.
        return step % c.every == 0 and trainer.strategy.broadcast(self.gradient < c.gradient_gate)

    def _has_drifted(self, model: LanguageModel, median: float) -> bool:
        tau = float(tau_mixers(model)[0].tau)
        return abs(median - tau) > self.config.drift_tolerance * tau

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        before = module.grad_norm if self.gradient is None else self.gradient
        self.gradient = _DECAY * before + (1 - _DECAY) * module.grad_norm

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "gradient": self.gradient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.gradient = state["count"], state["gradient"]


def tau_mixers(model: LanguageModel) -> list[Tau]:
    """In the order of the layers.

    Raises ConfigError if there is none.
    """
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


def batch_median(trainer: Trainer, module: TrainingModule) -> float:
    """The median key energy over the batch of the next step, over all processes; the same number on each of them.

    Raises TrainingError, on every process, unless it is finite and above 0.
    """
    parts = itertools.islice(module.train_dataloader(), trainer.accumulate_grad_batches)
    mine = np.concatenate([_energies(trainer, module, part) for part in parts])
    everyone: list[Any] = [mine]
    if trainer.world_size > 1:
        everyone = [None] * trainer.world_size
        torch.distributed.all_gather_object(everyone, mine)
    median = float(np.median(np.concatenate(everyone)))
    if not (math.isfinite(median) and median > 0):
        raise TrainingError(
            f"tau cannot be calibrated before step {trainer.global_step + 1}: the median energy of the keys is "
            f"{median}, and tau must be finite and above 0. Train again with another model.mixers.tau.laplacian, or "
            "with training.calibration.kind: fixed"
        )
    return median


def _energies(trainer: Trainer, module: TrainingModule, part: MicroBatch) -> np.ndarray:
    batch = module.transfer_batch_to_device(part, module.device, 0).batch
    with trainer.precision_plugin.train_step_context():
        found = key_energies(module.model, batch.ids, batch.mask, heard_control(module.model, batch))
    return found.flatten().cpu().numpy()


def collapses(observed: Mapping[str, float]) -> dict[str, str]:
    """What is wrong with the attention that was observed, by kind: `energies`, `attention`; {} if nothing is.

    Both go by means over the layers: one layer may well average.
    """
    found = {}
    low, middle, high = (observed.get(f"energy_{q}", math.nan) for q in ("p05", "p50", "p95"))
    if high - low <= _LEAST_SPREAD * middle:
        found["energies"] = (
            f"the keys' energies are nearly all the same: from their 5th to their 95th percentile they differ by "
            f"{high - low:.3g} around {middle:.3g}, and tau attention tells keys apart by nothing else. Learn L "
            "(model.mixers.tau.laplacian_weights: learned or diagonal), or take another model.mixers.tau.laplacian"
        )
    keys, share = (observed.get(name, math.nan) for name in ("effective_keys", "effective_share"))
    if share > _LARGEST_SHARE and keys > _FEW_KEYS:
        found["attention"] = (
            f"attention is nearly an average: {share:.1%} of the visible keys are heard alike. Lower the temperature "
            f"(model.mixers.tau.temperature; it is {observed['temperature']:.3g}), let it be learned if it is not "
            "(model.mixers.tau.learn_temperature: true), or recalibrate tau if it is far from the energies (it is "
            f"{observed['tau']:.3g}, their median {middle:.3g}; training.calibration.kind)"
        )
    return found
