"""What happens at the end of a step, in this order: budget, validate, sample, log, save."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer

from glissando.data.base import Batch
from glissando.errors import DivergenceError, NotFiniteError, RunError, TrainingError
from glissando.evaluation.scoring import heard_control
from glissando.generation import generate, visible
from glissando.mixers.tau import Tau
from glissando.runs import BEST, CHECKPOINTS, METRICS, Run, checkpoint_path, keep_newest
from glissando.storage import write_atomic
from glissando.training.budget import Budget, StepEnd
from glissando.training.calibration import Calibration, CollapseWarning, collapses
from glissando.training.checkpoint import PatientCheckpointIO
from glissando.training.module import TrainingModule
from glissando.training.observe import columns, first_row, observe

#: the mixers are observed on so much of one row
_OBSERVED_TOKENS = 256
SAMPLES = "samples.txt"
COLUMNS = (
    "step", "tokens", "seconds", "flops", "train_loss", "train_bits_per_byte", "learning_rate", "grad_norm",
    "tokens_per_second", "valid_loss", "valid_bits_per_byte", "valid_accuracy", "train_accuracy", "stability", "epoch",
)  # fmt: skip


class Validation(StepEnd):
    """Scores the held-out text every so many steps and at the end; may end the run early.

    Of a budget in seconds it takes a fifth at most after the first, unless `every` or the end asks for more.
    """

    def __init__(self, budget: Budget, every: int | None, patience: int | None) -> None:
        self.budget, self.every, self.patience = budget, every, patience
        self.best, self.best_step, self.waited = math.inf, -1, 0
        self.spent = self.latest_cost = 0.0  # seconds on all validations, and on the latest of this process
        self.latest: dict[str, float] = {}
        self.latest_step = -1

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        if self._patience_is_over():
            trainer.should_stop = True

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if self.budget.due(self.every, step) and self._affordable(trainer):
            began = time.perf_counter()
            with self.budget.aside():
                self.measure(trainer, module, step)
            self.latest_cost = time.perf_counter() - began
            self.spent += self.latest_cost
            if self._patience_is_over():
                self.budget.end(trainer)

    def _affordable(self, trainer: Trainer) -> bool:
        if self.every is not None or self.budget.seconds is None or self.budget.ends:
            return True
        # By the first process's clock: one that decided otherwise would leave the others waiting.
        return trainer.strategy.broadcast(self.spent + self.latest_cost <= 0.2 * self.budget.seconds)

    def _patience_is_over(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def measure(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        result = module.validate_now()
        module.schedule.observe_validation(result.loss)
        self.latest_step = step
        self.latest = {
            "valid_loss": result.loss,
            "valid_bits_per_byte": result.bits_per_byte,
            "valid_accuracy": result.accuracy,
        }
        if result.floor is not None:
            self.latest["entropy_floor"] = result.floor
        self.waited += 1
        if result.loss < self.best:
            self.best, self.best_step, self.waited = result.loss, step, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited, "spent": self.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.spent = state["best"], state["waited"], state.get("spent", 0.0)
        self.best_step = state.get("best_step", -1)


class Samples(StepEnd):
    """Writes what the model says now to samples.txt, and shows it. Resuming drops what came after the checkpoint."""

    def __init__(
        self, path: Path, budget: Budget, every: int | None, show: Callable[[str], None], prompt: str | None = None
    ) -> None:
        self.path, self.budget, self.every, self.show, self.prompt = path / SAMPLES, budget, every, show, prompt
        self.size = 0

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self.path.is_file() and self.path.stat().st_size > self.size:
            os.truncate(self.path, self.size)

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if not self.budget.due(self.every, step):
            return
        with self.budget.aside():
            module.require_finite_weights()
            try:
                text = visible(self.sample(module))  # by every process, because a sharded model takes all of them
            except NotFiniteError as error:
                raise DivergenceError(
                    f"after step {step} the model's logits are not finite; the last checkpoint stands. Train again "
                    "with a lower training.optimizer.learning_rate."
                ) from error
            if trainer.is_global_zero:
                self.size += _append(self.path, f"--- step {step}\n{text}\n".encode())
                self.show(f"step {step}: {text}")

    def sample(self, module: TrainingModule, tokens: int = 200) -> str:
        """The prompt, or a held-out beginning, a bar, and how the model goes on."""
        prompt = module.corpus.prompts(1, seed=0)[0] if self.prompt is None else self.prompt
        was_training = module.model.training
        module.model.eval()
        try:
            with module.whole_weights():
                tokens = min(tokens, _room(module, prompt))
                texts = (
                    generate(module.model, prompt, max_tokens=tokens, temperature=0.8, top_p=0.9) if tokens else [""]
                )
        finally:
            module.model.train(was_training)
        return f"{prompt}|{texts[0]}"

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.size = state["size"]


def _room(module: TrainingModule, prompt: str) -> int:
    """How many tokens have a position behind the end marker and the prompt."""
    config = module.model.config
    if config.positions != "learned" or config.max_length is None:
        return sys.maxsize
    return max(0, config.max_length - 1 - len(module.corpus.tokenizer.encode(prompt)))


class Metrics(StepEnd):
    """metrics.csv: a row every `every` steps and at every validation. Resuming drops the rows after the checkpoint.

    epoch is that of a text or of pairs; train_accuracy is of the step's own batch, every `every` steps; stability is
    1 / |gradient|, by which the homeostatic schedule goes; tokens_per_second counts the time of steps alone.
    Also offers `latest`, the newest row, to whoever shows it.

    What the mixers tell of themselves is measured after the step, on the beginning of its first row. That takes a
    quarter of a step of 512 tokens: 2.4 % of training tauformer-nano with `every` 10, and less of larger steps.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        validation: Validation,
        budget: Budget,
        tensorboard: bool,
        calibration: Calibration | None = None,
    ) -> None:
        self.path, self.every, self.validation, self.budget = path / METRICS, every, validation, budget
        self.calibration = calibration
        self.observed: list[str] = []
        self.beginning: Batch | None = None  # of this step's first row
        self.warned: list[str] = []
        self.latest: dict[str, Any] = {}
        self.columns: list[str] = []
        self.mark = (0, 0.0)
        self.events: Any = None
        self.want_events = tensorboard

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        tied = ["neutral_kl"] if module.base is not None else []
        self.observed = columns(module.model)
        told = [*tied, *self.observed, *self._calibrations(module)]
        self.columns = [*COLUMNS, *told, *(f"grad_norm/{part}" for part in module.parts())]
        self.mark = (module.tokens, self.budget.working())
        if not trainer.is_global_zero:
            return
        rows = [row for row in read_metrics(self.path) if int(row["step"]) <= trainer.global_step]
        write_atomic(self.path, _csv([self.columns, *[[r.get(c, "") for c in self.columns] for r in rows]]))
        if self.want_events:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=trainer.global_step + 1)

    def on_train_batch_start(self, trainer: Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.observed and batch_idx % trainer.accumulate_grad_batches == 0:
            self.beginning = first_row(batch.batch, _OBSERVED_TOKENS)

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        validated = self.validation.latest_step == step
        if step % self.every and not validated and not self.budget.ends:
            return
        row = self._row(module, step) | self._observe(trainer, module) | self._calibrations(module)
        row |= self.validation.latest if validated else {}
        self.latest = {**self.latest, **row}
        if trainer.is_global_zero:
            _append(self.path, _csv([[_shown(row.get(c, "")) for c in self.columns]]))
            self._send(row, step)

    def _row(self, module: TrainingModule, step: int) -> dict[str, Any]:
        loss, bits, neutral = module.meter.read()
        (last_tokens, last_time), now = self.mark, self.budget.working()
        self.mark = (module.tokens, now)
        rows = module.corpus.epoch_rows
        return {
            "step": step,
            "epoch": step * module.config.data.batch_size / rows if rows else "",
            "train_accuracy": "" if module.accuracy is None else module.accuracy,
            "stability": 1 / (module.grad_norm + 1e-6),
            "tokens": module.tokens,
            "seconds": self.budget.spent,
            "flops": module.flops,
            "train_loss": loss,
            "train_bits_per_byte": bits,
            **({} if module.base is None else {"neutral_kl": neutral}),
            "learning_rate": module.learning_rate,
            "grad_norm": module.grad_norm,
            "tokens_per_second": (module.tokens - last_tokens) / max(now - last_time, 1e-9),
            **{f"grad_norm/{part}": norm for part, norm in module.part_norms().items()},
        }

    def _observe(self, trainer: Trainer, module: TrainingModule) -> dict[str, float]:
        """Computed by every process, because a sharded model takes all of them; logged by the first."""
        if not self.observed:
            return {}
        row, model = self.beginning, module.model
        assert row is not None
        with self.budget.aside(), trainer.precision_plugin.train_step_context():
            values = observe(model, row.ids, row.mask, heard_control(model, row))
        for kind, message in collapses(values).items():
            if kind not in self.warned and trainer.is_global_zero:
                warnings.warn(message, CollapseWarning)
            self.warned = sorted({*self.warned, kind})
        return values

    def _calibrations(self, module: TrainingModule) -> dict[str, int]:
        """How often tau was calibrated, of a model that has one: alike in two rows, it was frozen between them."""
        has_tau = any(isinstance(m, Tau) for m in module.model.modules())
        return {"tau_calibrations": self.calibration.count} if has_tau and self.calibration else {}

    def state_dict(self) -> dict[str, list[str]]:
        return {"warned": self.warned}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.warned = state["warned"]

    def _send(self, row: dict[str, Any], step: int) -> None:
        if self.events is not None:
            for name, value in row.items():
                if value == "":
                    continue
                self.events.add_scalar(name, value, step)

    def on_exception(self, trainer: Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, module)

    def on_train_end(self, trainer: Trainer, module: pl.LightningModule) -> None:
        if self.events is not None:
            self.events.close()


class Saver(StepEnd):
    """Checkpoints, and the run's own weights with them: atomically, after everything else of the step.

    The checkpoint `best` comes before the step's own: a run that is killed in between goes on from before both.
    """

    def __init__(
        self, run: Run, budget: Budget, every: int | None, keep: int, files: PatientCheckpointIO, validation: Validation
    ) -> None:
        self.run, self.budget, self.every, self.keep, self.files = run, budget, every, keep, files
        self.validation = validation

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if self.validation.best_step == step:
            with self.budget.aside():
                module.require_finite_weights()
                self._write(trainer, step, self.run.path / CHECKPOINTS / BEST)
        if trainer.should_stop or self.budget.due(self.every, step):
            with self.budget.aside():
                module.require_finite_weights()
                self.save(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Raises TrainingError, on every process, if the disk does not take it; the message says what stands."""
        self._write(trainer, step, checkpoint_path(self.run.path / CHECKPOINTS, step), self._publish)

    def _write(
        self, trainer: Trainer, step: int, target: Path, publish: Callable[[Path], Exception | None] | None = None
    ) -> None:
        trainer.save_checkpoint(target)
        problem = self.files.problem or (publish(target) if publish and trainer.is_global_zero else None)
        # Only the first process writes: without being told the others would wait for it for ever.
        reason = trainer.strategy.broadcast(str(problem) if problem else None)
        if reason:
            raise TrainingError(f"could not save step {step}: {reason}") from problem

    def _publish(self, checkpoint: Path) -> Exception | None:
        try:
            weights = Run(self.run.path, checkpoint).read_state_dict()
            self.run.write_model(weights, self.run.read_config())
            keep_newest(checkpoint.parent, self.keep)
        except (OSError, RunError) as error:
            return error
        return None


def _append(path: Path, data: bytes) -> int:
    """The number of bytes added. Raises TrainingError if the disk does not take them."""
    try:
        with path.open("ab") as file:
            return file.write(data)
    except OSError as error:
        raise TrainingError(
            f"could not write {path}: {error.strerror}. The last checkpoint stands: free space and resume."
        ) from error


def _shown(value: Any) -> Any:
    return f"{value:.7g}" if isinstance(value, float) else value


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv; a last line cut short by a crash is left out. [] without a file.

    Raises RunError for a file that does not begin with the names of its columns.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = csv.DictReader(lines)
    if lines and "step" not in (rows.fieldnames or ()):
        raise RunError(
            f"{path} is damaged: its first line names no column `step`. Move it elsewhere; training goes on without "
            "its rows"
        )
    return [row for row in rows if None not in row.values() and row["step"].isdigit()]
