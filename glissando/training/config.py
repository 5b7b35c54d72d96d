"""A training run's configuration: the model, the data and how to train."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from glissando.config import Registry, options, to_dict
from glissando.data.corpora import CORPORA, StoriesOptions
from glissando.errors import ConfigError, DataError
from glissando.model import ModelConfig
from glissando.presets import load_preset, preset_note
from glissando.training.length import BUDGET_OPTIONS, Length, Positive
from glissando.training.schedules import SCHEDULES, WarmupCosineOptions

if TYPE_CHECKING:
    from glissando.runs import Run
    from glissando.training.task import Task

#: options of the machine, not of the training: a run may be resumed with others
MACHINE = ("devices", "accelerator", "strategy")


@options
class OptimizerOptions:
    """Options of every optimizer. Weight decay applies to matrices alone, not to gains, biases and vectors.

    learning_rate  base rate, which the schedule multiplies
    beta2          decay rate of AdamW's second moment
    weight_decay   decoupled decay of the matrices
    release        for a grown model: the matrices keep their reduced learning rates for this many steps, and reach the
                   full rate geometrically after as many more; None: they keep them
    """

    #: decay rate of AdamW's first moment; what is added to the root of the second
    beta1: ClassVar[float] = 0.9
    eps: ClassVar[float] = 1e-8

    learning_rate: Positive = 2e-3
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    release: PositiveInt | None = None

    def held(self, step: int) -> float:
        """How much of growth's shares is left at a step, from 1 to 0: a share s of the rate is then s to this power."""
        return 1.0 if self.release is None else min(1.0, max(0.0, 2 - step / self.release))


@options
class AdamWOptions(OptimizerOptions):
    """AdamW for all parameters."""


@options
class MuonOptions(OptimizerOptions):
    """Muon for the linear maps inside the model; AdamW for the embedding, the head, convolutions, gains and biases.

    A matrix moves by its momentum made orthogonal, times 0.2 sqrt(its larger side): as far as under AdamW at that rate.
    """

    momentum: ClassVar[float] = 0.95


#: optimizers by name
OPTIMIZERS: Registry[Any] = Registry("optimizer", "adamw")
OPTIMIZERS.add("adamw", AdamWOptions, "torch.optim:AdamW")
OPTIMIZERS.add("muon", MuonOptions, "glissando.training.muon:MuonWithAdamW")


@options
class TrainingConfig(Length):
    """How to train.

    clip                     largest norm of the gradient of all parameters; None: no clipping
    accumulate               parts in which the data.batch_size rows of a step are processed
    carry                    share of the training rows that continue from the state after an earlier row, whose text
                             they go on with; the others start from an empty state. See glissando.training.lanes
    precision                32-true, bf16-mixed or 64-true; auto: bf16-mixed if the device has bfloat16, else 32-true
    compile                  torch.compile the model (needs a C++ compiler)
    gradient_checkpointing   recompute each block in the backward pass: less memory, a third more time
    freeze                   parameters not to train, by shell pattern: ["embedding.*"]
    neutral_kl               weight of KL(base || model at u = 0) in the loss; the base is the model that training
                             started from
    early_stopping           stop after this many validations without a new best, and keep the best weights; None: never
    validate_every           steps between validations; None: 10 validations a run, or one every 1000 steps without a
                             budget; with a budget in seconds, they then score fewer batches and take at most a fifth of
                             it
    save_every               steps between checkpoints; None: 10 a run, or one every 1000 steps without a budget
    sample_every             steps between samples; None: 10 a run, or one every 1000 steps without a budget
    log_every                steps between rows of metrics.csv
    seed                     seed of the initial weights and of dropout
    devices                  number of processes on each node, each with a GPU of its own if there are GPUs
    accelerator              cpu, cuda, mps or another name of Lightning's; auto: the one that PyTorch finds, or else
                             the CPU
    strategy                 how several processes share the model: `ddp`, each has a copy; `fsdp`, weights and
                             optimizer are sharded; auto: ddp if there are several
    """

    optimizer: OPTIMIZERS.section() = field(default_factory=AdamWOptions)  # type: ignore[valid-type]
    schedule: SCHEDULES.section() = field(default_factory=WarmupCosineOptions)  # type: ignore[valid-type]
    clip: Positive | None = 1.0
    accumulate: PositiveInt = 1
    carry: Annotated[float, Field(ge=0, le=1)] = 0.0
    precision: Literal["auto", "32-true", "bf16-mixed", "64-true"] = "auto"
    compile: bool = False
    gradient_checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    neutral_kl: NonNegativeFloat = 0.0
    early_stopping: PositiveInt | None = None
    validate_every: PositiveInt | None = None
    save_every: PositiveInt | None = None
    sample_every: PositiveInt | None = None
    log_every: PositiveInt = 10
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    devices: PositiveInt = 1
    accelerator: str = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"


@options
class Stage:
    """One of several trainings in a row: a name, the options that differ from the shared ones, and how the model of the
    stage before is grown first (the options of glissando.growth.Growth)."""

    name: str
    grow: dict[str, Any] = field(default_factory=dict)
    model: Annotated[dict[str, Any], ModelConfig] = field(default_factory=dict)
    data: Annotated[dict[str, Any], CORPORA] = field(default_factory=dict)
    training: Annotated[dict[str, Any], TrainingConfig] = field(default_factory=dict)


@options
class RunConfig:
    """All of a run of a language model: what config.yaml holds, resolved.

    start_from  the run whose weights and tokenizer training starts with (--from on the command line)
    stages      trainings in a row, each from the end of the one before; see glissando.stages
    grown       what growth has left to remember: [share, copies, released] by parameter, see
                glissando.training.shares.Share; it comes with the run that is started from
    imports     the Python files that registered what the run is made of (--import on the command line)
    """

    preset: str | None = None
    start_from: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: CORPORA.section() = field(default_factory=StoriesOptions)  # type: ignore[valid-type]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    stages: list[Stage] = field(default_factory=list)
    grown: dict[str, list[float]] = field(default_factory=dict)
    imports: list[Annotated[str, Field(strict=True)]] = field(default_factory=list)

    #: of config.yaml, where it is not a language model's
    kind: ClassVar[str | None] = None
    #: what continues a run, with --resume
    command: ClassVar[str] = "train"
    #: for errors: what may be given in the place of a text that has changed; None: what `train --resume` takes
    other_texts: ClassVar[str | None] = None

    def task(self, resumed: Run | None = None) -> Task:
        """Open the data; those of a run that is `resumed` must be what they were."""
        from glissando.training.language_task import open_task

        return open_task(self, resumed)

    def check(self, processes: int) -> None:
        """Raise ConfigError for a training configuration that makes no sense, with this number of processes, and
        DataError where `require_text` does."""
        self.require_text()
        require_parts(self.training, self.data.batch_size, processes)

    def require_text(self) -> None:
        """Raise DataError where the preset was published with a text, and no text is given."""
        text = preset_note(self.preset, "text")
        if text is None or getattr(self.data, "path", "") is not None:
            return
        if CORPORA.kind_of(self.data) == load_preset(str(self.preset))["data"]["kind"]:
            raise DataError(
                f"the preset {self.preset} was published with a text that is not part of the package: {text}. Give it, "
                "or another, with --data.path FILE; or train on the built-in stories: --data.kind stories"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain nested values."""
        values = to_dict(self)
        return {k: v for k, v in values.items() if v or k not in ("start_from", "stages", "grown", "imports")}


#: RunConfig, or the glissando.training.task.TaskConfig of another task
AnyRunConfig = Any


def require_parts(training: TrainingConfig, batch_size: int, processes: int) -> None:
    """Raise ConfigError for a schedule without the end that it needs, and a batch that cannot be divided."""
    if not training.budgets and training.schedule.needs_end:
        raise ConfigError(
            f"training.schedule.kind {SCHEDULES.kind_of(training.schedule)} needs an end, and no budget is given: give "
            f"one of {BUDGET_OPTIONS}; or, to train until Ctrl-C, --training.schedule.kind constant"
        )
    parts = training.accumulate * processes
    if batch_size % parts:
        raise ConfigError(
            f"data.batch_size {batch_size} cannot be divided among {processes} process(es) x "
            f"training.accumulate {training.accumulate}; use a multiple of {parts}"
        )


def fitted_vocabulary(size: int, tokens: int) -> int:
    """model.vocab_size beside a tokenizer of so many tokens: as it was given where that is larger, else theirs."""
    return tokens if size == ModelConfig.vocab_size else max(size, tokens)
