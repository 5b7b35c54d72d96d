"""What happens at the end of a step, in this order: budget, validate, sample, log, save."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, Trainer

from glissando.errors import RunError, TrainingError
from glissando.runs import METRICS, Run, checkpoint_path, keep_newest
from glissando.storage import write_atomic
from glissando.training.module import TrainingModule, part_of

SAMPLES = "samples.txt"
COLUMNS = (
    "step", "tokens", "seconds", "train_loss", "train_bits_per_byte", "learning_rate", "grad_norm",
    "tokens_per_second", "valid_loss", "valid_bits_per_byte", "valid_accuracy",
)  # fmt: skip


class StepEnd(Callback):
    """Base of callbacks that act once an optimizer step is done, not after every micro-batch."""

    def on_train_batch_end(
        self, trainer: Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, TrainingModule)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.after_step(trainer, module, trainer.global_step)

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        """`step` optimizer steps are done."""


class Budget(StepEnd):
    """Counts the time spent training, over resumptions too, and stops when the budget is spent."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.steps, self.seconds = steps, seconds
        self.spent_before, self.started = 0.0, time.perf_counter()
        self.asked_to_stop = False

    @property
    def spent(self) -> float:
        return self.spent_before + time.perf_counter() - self.started

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        self.started = time.perf_counter()
        self._share(module, trainer.global_step)

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        self._share(module, step)
        out_of_time = self.seconds is not None and self.spent >= self.seconds
        out_of_time = trainer.strategy.reduce_boolean_decision(out_of_time or self.asked_to_stop, all=False)
        if out_of_time or (self.steps is not None and step >= self.steps):
            trainer.should_stop = True

    def _share(self, module: Any, step: int) -> None:
        module.share = step / self.steps if self.steps else self.spent / (self.seconds or math.inf)

    def state_dict(self) -> dict[str, float]:
        return {"spent": self.spent}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.spent_before = state["spent"]


class Validation(StepEnd):
    """Scores the held-out text every so many steps and at the end; may stop early."""

    def __init__(self, every: Callable[[int], bool], patience: int | None) -> None:
        self.every, self.patience = every, patience
        self.best, self.waited = math.inf, 0
        self.latest: dict[str, float] = {}
        self.latest_step = -1

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if self.every(step) or trainer.should_stop:
            self.measure(trainer, module, step)

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
        self.waited = 0 if result.loss < self.best else self.waited + 1
        self.best = min(self.best, result.loss)
        if self.patience is not None and self.waited >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class Samples(StepEnd):
    """Writes what the model says now to samples.txt, and shows it."""

    def __init__(self, path: Path, every: Callable[[int], bool], show: Callable[[str], None]) -> None:
        self.path, self.every, self.show = path / SAMPLES, every, show

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if not (self.every(step) or trainer.should_stop):
            return
        text = self.sample(module)  # every process, because a sharded model takes all of them
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"--- step {step}\n{text}\n")
            self.show(f"step {step}: {text}")

    def sample(self, module: TrainingModule, tokens: int = 200) -> str:
        from glissando.generation import generate

        prompt = module.corpus.prompts(1, seed=0)[0]
        was_training = module.model.training
        module.model.eval()
        try:
            text = generate(module.model, prompt, max_tokens=tokens, temperature=0.8, top_p=0.9)[0]
        finally:
            module.model.train(was_training)
        return f"{prompt}|{text}"


class Metrics(StepEnd):
    """metrics.csv: a row every `every` steps and at every validation. Resuming drops the rows after the checkpoint.

    Also offers `latest`, the newest row, to whoever shows it.
    """

    def __init__(self, path: Path, every: int, validation: Validation, budget: Budget, tensorboard: bool) -> None:
        self.path, self.every, self.validation, self.budget = path / METRICS, every, validation, budget
        self.latest: dict[str, Any] = {}
        self.columns: list[str] = []
        self.mark = (0, 0.0)
        self.events: Any = None
        self.want_events = tensorboard

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        parts = sorted({f"grad_norm/{part}" for part in _parts(module)})
        self.columns = [*COLUMNS, *parts]
        self.mark = (trainer.global_step, time.perf_counter())
        if not trainer.is_global_zero:
            return
        rows = [row for row in read_metrics(self.path) if int(row["step"]) <= trainer.global_step]
        write_atomic(self.path, _csv([self.columns, *[[r.get(c, "") for c in self.columns] for r in rows]]))
        if self.want_events:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        due = (trainer.global_step + 1) % self.every == 0
        module.want_part_norms = due and (batch_idx + 1) % trainer.accumulate_grad_batches == 0

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        validated = self.validation.latest_step == step
        if step % self.every and not validated and not trainer.should_stop:
            return
        row = self._row(module, step) | (self.validation.latest if validated else {})
        self.latest = {**self.latest, **row}
        if trainer.is_global_zero:
            with self.path.open("ab") as file:
                file.write(_csv([[_shown(row.get(c, "")) for c in self.columns]]))
            self._send(row, step)

    def _row(self, module: TrainingModule, step: int) -> dict[str, Any]:
        loss, bits = module.read_meter()
        (last_step, last_time), now = self.mark, time.perf_counter()
        self.mark = (step, now)
        tokens = module.config.data.batch_size * module.config.data.seq_len
        return {
            "step": step,
            "tokens": step * tokens,
            "seconds": self.budget.spent,
            "train_loss": loss,
            "train_bits_per_byte": bits,
            "learning_rate": module.learning_rate,
            "grad_norm": module.grad_norm,
            "tokens_per_second": (step - last_step) * tokens / max(now - last_time, 1e-9),
            **{f"grad_norm/{part}": norm for part, norm in module.part_norms.items()},
        }

    def _send(self, row: dict[str, Any], step: int) -> None:
        if self.events is not None:
            for name, value in row.items():
                self.events.add_scalar(name, value, step)

    def on_train_end(self, trainer: Trainer, module: pl.LightningModule) -> None:
        if self.events is not None:
            self.events.close()


class Saver(StepEnd):
    """Checkpoints, and the run's own weights with them: atomically, after everything else of the step."""

    def __init__(self, run: Run, every: Callable[[int], bool], keep: int) -> None:
        self.run, self.every, self.keep = run, every, keep
        self.saved_step = -1

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if self.every(step) or trainer.should_stop:
            self.save(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Raises TrainingError, naming what still stands, if the disk does not take it."""
        target = checkpoint_path(self.run.path / "checkpoints", step)
        try:
            trainer.save_checkpoint(target)
            if trainer.is_global_zero:
                weights = Run(self.run.path, target).read_state_dict()
                self.run.write_model(weights, self.run.read_config())
                keep_newest(target.parent, self.keep)
        except (OSError, RunError) as error:
            raise TrainingError(f"could not save step {step}: {error}") from error
        self.saved_step = step


def _parts(module: TrainingModule) -> list[str]:
    return [part_of(name) for name, p in module.model.named_parameters() if p.requires_grad]


def _shown(value: Any) -> Any:
    return f"{value:.7g}" if isinstance(value, float) else value


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv; a last line cut short by a crash is left out. [] without a file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = csv.DictReader(lines)
    return [row for row in rows if None not in row.values() and row["step"].isdigit()]
