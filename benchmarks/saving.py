"""What saving adds to a step of training.

    python -m benchmarks saving tauformer --batch_size 8 --seq_len 512 --rounds 2

trains with a save after every second step. One save in two is waited for before training goes on, as if it were
synchronous; the other is written beside the next two steps. Printed in seconds, the median over rounds: a step; what a
synchronous save adds; what one in the background adds, which is the copy that training waits for; the processor time of
writing it, which training loses where it uses all cores; and by how much the two steps beside it took longer than the
two before, which on a busy machine is mostly noise.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from glissando.config import from_dict, merge
from glissando.data.base import Batch
from glissando.errors import Stopped
from glissando.presets import load_preset
from glissando.training.config import RunConfig
from glissando.training.fit import train
from glissando.training.progress import Progress


class Timing(Progress):
    """Times of two steps to get going, then of rounds of four: two steps, a save in the background, two more, and a
    save that is waited for."""

    def __init__(self, rounds: int) -> None:
        super().__init__(io.StringIO())
        self.last = 2 + 4 * rounds
        self.steps: list[float] = []  # seconds of step 1, 2, ...
        self.between: list[float] = []  # seconds before step 2, 3, ...
        self.writing: list[float] = []  # processor seconds of each save
        self.mark = time.perf_counter()

    def before_step(self, loop: Any, batches: list[Batch]) -> None:
        if loop.state.step % 4 == 2:
            loop.saving.wait()
        now = time.perf_counter()
        if self.steps:
            self.between.append(now - self.mark)
        self.mark = now

    def after_step(self, loop: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self.mark)
        self.mark = now
        if len(self.steps) > self.last:
            loop.stopping.asked = signal.SIGTERM

    def saved(self, loop: Any) -> None:
        self.writing.append(time.thread_time())


def measured(preset: str, batch_size: int, seq_len: int, rounds: int) -> dict[str, float]:
    section = load_preset(preset)
    never = 10**9
    training = {"steps": never, "save_every": 2, "validate_every": never, "sample_every": never, "accumulate": 1}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(bytes(97 + i * i % 23 for i in range(20 * batch_size * seq_len)))
        data = {"kind": "text", "path": str(text), "seq_len": seq_len, "batch_size": batch_size, "max_valid_bytes": 64}
        timing = Timing(rounds)
        with contextlib.suppress(Stopped):
            train(
                from_dict(RunConfig, merge(RunConfig, section, {"data": data, "training": training})),
                f"{folder}/run",
                timing,
            )
    firsts = range(2, timing.last, 4)  # places in `steps` of the first of each round; in `between`, of what follows it
    plain = median(timing.between[i] for i in firsts)
    return {
        "step": median(timing.steps[j] for i in firsts for j in (i, i + 1)),
        "synchronous": median(timing.between[i + 3] for i in firsts) - plain,
        "copy": median(timing.between[i + 1] for i in firsts) - plain,
        "writing": median(timing.writing),
        "longer": median(sum(timing.steps[i + 2 : i + 4]) - sum(timing.steps[i : i + 2]) for i in firsts),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks saving", description="What saving adds to a step.")
    parser.add_argument("preset", nargs="?", default="tauformer", help="name of a preset")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a step")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=2, help="of four steps and two saves; medians count")
    options = parser.parse_args(arguments)
    for name in ("batch_size", "seq_len", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    found = measured(options.preset, options.batch_size, options.seq_len, options.rounds)
    step = found["step"]
    print(f"{options.preset}, {options.batch_size} x {options.seq_len} tokens, {options.rounds} round(s)")
    for label, seconds in (
        ("a step", step),
        ("a synchronous save adds", found["synchronous"]),
        ("a save in the background adds", found["copy"]),
        ("  and where all cores are busy", found["copy"] + found["writing"]),
        ("the two steps beside it took longer by", found["longer"]),
    ):
        print(f"{label:40} {seconds:9.3f} s {seconds / step:8.1%} of a step")
    return 0
