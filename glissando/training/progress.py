"""The live bar: loss, bits per byte, the floor where it is known, tokens per second, time left."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, TextIO

import torch

from glissando.progress import QUIET_SECONDS, minutes
from glissando.training.loop import Hook, Loop


def print_line(line: str, file: TextIO) -> None:
    """Print `line`. Its reader may go away, as a pipe or a terminal that is closed: that ends no training."""
    try:
        print(line, file=file, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # what is buffered would fail again when the program ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class Progress(Hook):
    """A bar on a terminal, redrawn at most ten times a second; elsewhere a line at every validation, and where that is
    long ago, after QUIET_SECONDS or a twentieth of the time."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.bar: Any = None
        self.drawn, self.first_tokens, self.started = 0.0, 0, False

    def before_step(self, loop: Loop, batches: list[Any]) -> None:
        if self.started or not loop.fabric.is_global_zero:
            return
        self.started, self.first_tokens = True, loop.state.tokens
        if not self.file.isatty():
            self.drawn = time.perf_counter()  # the next line comes later; a bar is drawn at once
        else:
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar:8}| {desc}"
            self.bar = tqdm(total=1000, file=self.file, bar_format=form, dynamic_ncols=True, leave=False)
        model, t = loop.model, loop.config.training
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.message(
            f"device {loop.fabric.device}, processes {loop.fabric.world_size}, threads {torch.get_num_threads()}, "
            f"{t.precision}; parameters {sum(p.numel() for p in model.parameters()):,} ({trained:,} trained); "
            f"{loop.task.describe(batches[0])}; out {loop.run.path}"
            + ("" if loop.budget.limits else "; no budget: until Ctrl-C")
        )

    def validating(self, loop: Loop) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.set_description_str(f"validating, {self.line(loop)}", refresh=True)

    def logged(self, loop: Loop) -> None:
        if not loop.fabric.is_global_zero:
            return
        now = time.perf_counter()
        if self.bar is not None and (now - self.drawn > 0.1 or loop.stop is not None):
            self.drawn = now
            self.bar.n = round(1000 * loop.budget.share)
            with contextlib.suppress(OSError):  # as `print_line`
                self.bar.set_description_str(self.line(loop), refresh=True)
        elif self.bar is None and (
            loop.validated_step == loop.state.step
            or loop.stop is not None
            or now - self.drawn > max(QUIET_SECONDS, loop.clock.elapsed() / 20)
        ):
            self.drawn = now
            print_line(self.line(loop), self.file)

    def line(self, loop: Loop) -> str:
        """The text of the bar: what matters most stands first, because a narrow terminal cuts the end off."""
        rate = (loop.state.tokens - self.first_tokens) / max(loop.clock.working(), 1e-9)
        latest = loop.metrics.latest if loop.metrics else {}
        share = loop.budget.share
        seconds = loop.clock.elapsed() * (1 - share) / share if 0 < share < 1 else 0.0
        left = f"{minutes(seconds)} left" if loop.budget.limits else "until Ctrl-C"
        parts = [f"step {loop.state.step}", left]
        in_bits = "train_bits_per_byte" in latest
        measure, unit = ("bits_per_byte", " bits/byte") if in_bits else ("loss", "")
        figures = [
            f"{name} {values[key]:.3f}"
            for name, values, key in (
                ("train", latest, f"train_{measure}"),
                ("held out", latest, f"valid_{measure}"),
            )
            if values.get(key) is not None
        ]
        if figures:
            figures[-1] += unit
        if "entropy_floor" in loop.validation:
            figures.append(f"floor {loop.validation['entropy_floor']:.3f}")
        return ", ".join([*parts, *figures, f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s"])

    def message(self, line: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.clear()
        print_line(line, self.file)

    def close(self) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
            self.bar = None
