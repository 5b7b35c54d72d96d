"""The live bar: loss, bits per byte, the floor where it is known, tokens per second, time left."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, TextIO

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer

from glissando.training.budget import Budget, StepEnd
from glissando.training.callbacks import Metrics, Validation
from glissando.training.module import TrainingModule


def say(line: str, file: TextIO) -> None:
    """Print `line`. Who reads it may go away, as a pipe or a terminal that is closed: that ends no training."""
    try:
        print(line, file=file, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # what is buffered would fail again when the program ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class Progress(StepEnd):
    """A bar on a terminal, redrawn at most ten times a second; elsewhere a line at every validation."""

    def __init__(self, budget: Budget, validation: Validation, metrics: Metrics, file: TextIO | None = None) -> None:
        self.budget, self.validation, self.metrics = budget, validation, metrics
        self.file = file or sys.stderr
        self.bar: Any = None
        self.drawn, self.first_tokens, self.started = 0.0, 0, False

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, TrainingModule)
        self.first_tokens = module.tokens
        if trainer.is_global_zero and self.file.isatty():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar:24}| {postfix}"
            self.bar = tqdm(total=1000, file=self.file, bar_format=form, dynamic_ncols=True, leave=False)

    def on_train_batch_start(self, trainer: Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.started or not trainer.is_global_zero:
            return
        self.started = True
        assert isinstance(module, TrainingModule)
        model, t, first = module.model, module.config.training, batch.batch
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        shapes = [f"{k} {tuple(v.shape)}" for k, v in first._asdict().items() if hasattr(v, "shape")]
        parts = f" in {t.accumulate} parts" if t.accumulate > 1 else ""
        self.say(
            f"device {module.device}, processes {trainer.world_size}, threads {torch.get_num_threads()}, "
            f"{t.precision}; parameters {model.num_parameters():,} ({trained:,} trained); "
            f"a step: {module.config.data.batch_size} rows{parts}; a batch: {', '.join(shapes)}"
            + ("; no budget: until Ctrl-C" if self.budget.endless else "")
        )

    def after_step(self, trainer: Trainer, module: TrainingModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        if self.bar is not None and (now - self.drawn > 0.1 or trainer.should_stop):
            self.drawn = now
            self.bar.n = round(1000 * min(module.share, 1.0))
            with contextlib.suppress(OSError):  # as `say`
                self.bar.set_postfix_str(self.line(module, step), refresh=True)
        elif self.bar is None and (self.validation.latest_step == step or trainer.should_stop):
            say(self.line(module, step), self.file)

    def line(self, module: TrainingModule, step: int) -> str:
        """What the bar says."""
        rate = (module.tokens - self.first_tokens) / max(self.budget.working(), 1e-9)
        latest = self.metrics.latest
        parts = [f"step {step}"]
        if "train_loss" in latest:
            parts += [f"loss {latest['train_loss']:.3f}", f"bits/byte {latest['train_bits_per_byte']:.3f}"]
        if "valid_bits_per_byte" in latest:
            parts.append(f"held out {latest['valid_bits_per_byte']:.3f}")
        if "entropy_floor" in self.validation.latest:
            parts.append(f"floor {self.validation.latest['entropy_floor']:.3f}")
        left = "until Ctrl-C" if self.budget.endless else f"{self._left(module.share)} left"
        return ", ".join([*parts, f"{rate / 1000:.1f}k tok/s", left])

    def _left(self, share: float) -> str:
        seconds = round(self.budget.elapsed() * (1 - share) / share) if 0 < share < 1 else 0
        minutes = f"{seconds // 60}" if seconds < 3600 else f"{seconds // 3600}:{seconds // 60 % 60:02d}"
        return f"{minutes}:{seconds % 60:02d}"

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.clear()
        say(text, self.file)

    def on_exception(self, trainer: Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Trainer, module: pl.LightningModule) -> None:
        self._close()

    def _close(self) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
            self.bar = None
