"""What a training run is told: the model, the data and how to train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glissando.config import require_chosen, require_used, to_dict, used_with
from glissando.data.corpora import CORPORA, DataConfig
from glissando.errors import ConfigError, unknown_name
from glissando.mixers import MIXERS
from glissando.model import ModelConfig
from glissando.training.schedules import ScheduleConfig, require

#: options that say what to train on, and not how: a run may be resumed with others
MACHINE = ("devices", "num_nodes", "accelerator", "strategy")

#: the ways to say how long to train
BUDGETS = ("steps", "epochs", "tokens", "seconds", "flops")

_POSITIVE = (
    "clip", "accumulate", "early_stopping", "validate_every", "save_every", "sample_every", "log_every",
    "keep_checkpoints", "devices", "num_nodes",
)  # fmt: skip


@dataclass
class OptimizerConfig:
    """AdamW. Weight decay applies to matrices alone, not to gains, biases and vectors.

    release   of a grown model: steps at the shares of the learning rate that growth left its matrices; in as many again
              they go to the whole rate, geometrically; none: they stay
    """

    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    release: int | None = None

    def check(self) -> None:
        """Raise ConfigError for a number out of its range."""
        where = "training.optimizer"
        require(0 < self.learning_rate < math.inf, f"{where}.learning_rate", self.learning_rate, "positive and finite")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{where}.{name}", value, "at least 0 and below 1")
        require(0 < self.eps < math.inf, f"{where}.eps", self.eps, "positive and finite")
        decay = self.weight_decay
        require(0 <= decay < math.inf, f"{where}.weight_decay", decay, "at least 0 and finite")
        require(self.release is None or self.release >= 1, f"{where}.release", self.release, "at least 1 step, or null")

    def held(self, step: int) -> float:
        """How much of growth's shares is left at a step, from 1 to 0: a share s of the rate is then s to this power."""
        return 1.0 if self.release is None else min(1.0, max(0.0, 2 - step / self.release))


@dataclass
class CalibrationConfig:
    """When tau, one number for the model, is set to the median energy of the first tau layer's keys over a batch.

    kind             `fixed`: never; `start`: before the first step; `periodic`: then and every so many steps;
                     `drift`: then, and where the median has drifted while gradients are small
    at_restart       start: also when training is resumed, as published; a resumed run is then not the uninterrupted one
    every            periodic: steps between calibrations; drift: steps between checks
    drift_tolerance  drift: calibrate where |median - tau| is more than this share of tau ...
    gradient_gate    ... and the gradient norm, averaged exponentially over about 20 steps, is below this
    """

    kind: Literal["fixed", "start", "periodic", "drift"] = "fixed"
    at_restart: bool = used_with(True, kind="start")
    every: int = used_with(100, kind=("periodic", "drift"))
    drift_tolerance: float = used_with(0.1, kind="drift")
    gradient_gate: float = used_with(1.0, kind="drift")

    def check(self, mixers: Sequence[str]) -> None:
        """Raise ConfigError for a number out of its range, or where none of the model's mixers has a tau."""
        where = "training.calibration"
        require(self.every > 0, f"{where}.every", self.every, "at least 1")
        require(
            0 < self.drift_tolerance < math.inf, f"{where}.drift_tolerance", self.drift_tolerance, "above 0, finite"
        )
        require(self.gradient_gate > 0, f"{where}.gradient_gate", self.gradient_gate, "above 0 (.inf: always open)")
        if self.kind != "fixed" and "tau" not in mixers:
            raise ConfigError(
                f"{where}.kind is {self.kind!r}, but the model's mixer is {', '.join(mixers)}, which has no tau: leave "
                "training.calibration out, or set model.mixer: tau"
            )


@dataclass
class TrainingConfig:
    """How to train.

    steps, epochs, tokens, seconds, flops   the budget: at most one of them, to the end of a step; without one, training
                             ends at Ctrl-C; epochs are passes over a text or over pairs, tokens targets scored, flops
                             three times those of the forward pass, padding included (glissando.flops)
    clip                     largest global gradient norm; none if None
    accumulate               micro-batches a step: data.batch_size rows are processed in so many parts
    precision                32-true, bf16-mixed or 64-true
    compile                  torch.compile the model (needs a C++ compiler)
    gradient_checkpointing   recompute each block in the backward pass: less memory, a third more time
    freeze                   parameters not to train, by shell pattern: ["embedding.*"]
    neutral_kl               weight in the loss of KL(base || model at u = 0); the base is what was started from
    early_stopping           stop after so many validations without a new best; never if None; the weights of the best
                             are then the run's own
    validate_every, save_every, sample_every   in steps; None: 10 times a run; in one of so many seconds fewer
                             validations, where after the first they would take over a fifth of them; every 1000
                             steps without a budget
    sample_prompt            what samples go on from; a held-out beginning if None
    log_every                steps between rows of metrics.csv
    keep_checkpoints         how many of the latest stay
    devices, num_nodes, accelerator, strategy   Lightning's; strategy `auto`, `ddp` or `fsdp`
    tensorboard              write TensorBoard events beside metrics.csv
    """

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    flops: float | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    clip: float | None = 1.0
    accumulate: int = 1
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    compile: bool = False
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    neutral_kl: float = 0.0
    early_stopping: int | None = None
    validate_every: int | None = None
    save_every: int | None = None
    sample_every: int | None = None
    sample_prompt: str | None = None
    log_every: int = 10
    keep_checkpoints: int = 2
    seed: int = 0
    devices: int = 1
    num_nodes: int = 1
    accelerator: str = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    tensorboard: bool = False

    def check(self) -> None:
        """Raise ConfigError for a number that makes no sense."""
        given = [n for n in BUDGETS if getattr(self, n) is not None]
        kinds = f"training.steps, .{', .'.join(BUDGETS[1:])}"
        if len(given) > 1:
            raise ConfigError(f"the budget is one of {kinds}; got {' and '.join(given)}")
        if not given and self.schedule.kind == "warmup-cosine":
            raise ConfigError(
                f"training.schedule.kind warmup-cosine needs an end, and no budget is given: give one of {kinds}; "
                "or train until Ctrl-C with --training.schedule.kind constant (or plateau, homeostatic)"
            )
        for name in (*given, *_POSITIVE):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"training.{name} must be positive, got {value}")
        require(0 <= self.seed < 2**32, "training.seed", self.seed, "at least 0 and below 2**32")
        require(0 <= self.neutral_kl < math.inf, "training.neutral_kl", self.neutral_kl, "at least 0 and finite")
        self.optimizer.check()
        self.schedule.check()


@dataclass
class Stage:
    """One of several trainings in a row: a name, the options that differ from the shared ones, and how the model of the
    stage before is grown first (the options of glissando.growth.Growth)."""

    name: str
    grow: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig:
    """All of a run: what config.yaml holds, resolved.

    start_from  the run whose weights and tokenizer training starts with (--from on the command line)
    stages      trainings in a row, each from the end of the one before; see glissando.training.stages
    grown       what growth has left to remember: [share, copies, released] by parameter, see
                glissando.training.parts.Share; it comes with the run that is started from
    """

    preset: str | None = None
    start_from: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    stages: list[Stage] = field(default_factory=list)
    grown: dict[str, list[float]] = field(default_factory=dict)

    def check(self, processes: int) -> None:
        """Raise ConfigError for a training configuration that makes no sense, with this number of processes."""
        self.training.check()
        self.training.calibration.check(self._mixers())
        eps = self.model.norm.eps
        require(0 <= eps < math.inf, "model.norm.eps", eps, "at least 0 and finite")
        for name in ("seq_len", "batch_size"):
            value = getattr(self.data, name)
            require(value > 0, f"data.{name}", value, "at least 1")
        parts = self.training.accumulate * processes
        if self.data.batch_size % parts:
            raise ConfigError(
                f"data.batch_size {self.data.batch_size} cannot be shared by {processes} process(es) x "
                f"training.accumulate {self.training.accumulate}; use a multiple of {parts}"
            )

    def _mixers(self) -> list[str]:
        return [self.model.mixer] if isinstance(self.model.mixer, str) else self.model.mixer

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values, without the options of mixers and corpora that are not used.

        Raises UnknownNameError for a mixer that there is none of.
        """
        values = to_dict(self)
        for name in ("start_from", "stages", "grown"):
            if not values[name]:
                del values[name]
        for name in self._mixers():
            if name not in values["model"]["mixers"]:
                raise unknown_name("mixer", name, values["model"]["mixers"])
        values["model"]["mixers"] = {name: values["model"]["mixers"][name] for name in self._mixers()}
        for name in set(CORPORA) - {self.data.corpus}:
            del values["data"][name]
        return values


def fitted_vocabulary(given: int, tokens: int) -> int:
    """model.vocab_size beside a tokenizer of so many tokens: as it was given where that is larger, else theirs."""
    return tokens if given == ModelConfig.vocab_size else max(given, tokens)


def require_effect(config: RunConfig, name: str, told: str | None = None) -> None:
    """Raise ConfigError for an option that would do nothing: of a mixer or a corpus that the run does not have, or of
    one that is not used beside the others. `told`: how it was given."""
    mixers = config.as_dict()["model"]["mixers"]
    require_used(config, name, told)
    require_chosen(told or name, "model.mixers", MIXERS, mixers, "model.mixer", config.model.mixer)
    require_chosen(told or name, "data", CORPORA, [config.data.corpus], "data.corpus", config.data.corpus)
