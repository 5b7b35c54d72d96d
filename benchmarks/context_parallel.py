"""Peak memory and time of training on long rows, whole in one process and cut over several.

    python -m benchmarks context_parallel --tokens 65536 --processes 2 liquid-ssm-nano delta-nano

prints, for each preset, the largest resident set of a process above what its imports take, with one process and with
several (training.context_parallel), and the seconds of a step, each with the ratio of the two: three steps, the first
of which is not timed, on a row of bytes and a validation, in float32 on the CPU, one thread each. The times mean
something on a machine with an idle core for each process.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from glissando.errors import TrainingError

PRESETS = ("liquid-ssm-nano", "continuous-transformer-nano", "delta-nano")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks context_parallel", description="Peak memory of a process, and seconds of a step."
    )
    parser.add_argument("presets", nargs="*", default=PRESETS, help="names of presets")
    parser.add_argument("--tokens", type=int, default=65536, help="of a row")
    parser.add_argument("--processes", type=int, default=2, help="that share a row")
    options = parser.parse_args(arguments)
    several = f"{options.processes} processes"
    print(f"rows of {options.tokens} tokens")
    print(f"{'':30} {'':26} {'one process':>12} {several:>12}  ratio")
    for preset in options.presets:
        results = [figures(preset, options.tokens, number) for number in (1, options.processes)]
        for what, (whole, cut) in zip(
            ("MiB a process above imports", "seconds a step"), zip(*results, strict=True), strict=True
        ):
            print(f"{preset:30} {what:26} {whole:12,.1f} {cut:12,.1f} {cut / whole:6.3f}", flush=True)
    return 0


def figures(preset: str, tokens: int, processes: int) -> tuple[float, float]:
    """MiB above its imports of the process that takes the most, and seconds of a step.

    Raises TrainingError if the training fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.context_parallel", preset, str(tokens), str(processes), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.findall(r"^imports (\d+) peak (\d+) step (\S+)$", done.stdout, re.MULTILINE)
        if done.returncode or len(found) != processes:
            raise TrainingError(f"{preset} on {processes} process(es) ended with an error: {done.stderr[-2000:]}")
        memory = max(int(most) - int(imports) for imports, most, _ in found) / 1024
        return memory, max(float(seconds) for _, _, seconds in found)


def measured(preset: str, tokens: int, processes: int, folder: Path) -> None:
    """One process: trains, and prints what it held in KiB after its imports and at most, and the seconds of a step."""
    from glissando.config import from_dict, merge
    from glissando.presets import load_preset
    from glissando.process import prepare_to_train
    from glissando.runs import METRICS
    from glissando.training.config import RunConfig
    from glissando.training.fit import train

    prepare_to_train()  # as the command does
    text, rank = folder / "text", int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        text.write_bytes(bytes(97 + i * i % 23 for i in range(2 * tokens)))
    section = {name: value for name, value in load_preset(preset).items() if name != "about"}
    data = {"kind": "text", "path": str(text), "seq_len": tokens, "batch_size": 1, "max_valid_bytes": 1000}
    training = {
        "steps": 3, "precision": "32-true", "accelerator": "cpu", "devices": processes, "context_parallel": processes,
        "sample_every": 10**6, "validate_every": 10**6, "save_every": 10**6, "log_every": 1,
    }  # fmt: skip
    config = from_dict(RunConfig, merge(RunConfig, section, {"data": data, "training": training}))
    imports = held("VmRSS")
    run = train(config, folder / "run")
    with (run.path / METRICS).open(newline="") as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    print(f"\nimports {imports} peak {held('VmHWM')} step {(seconds[2] - seconds[0]) / 2:.3f}", flush=True)


def held(name: str) -> int:
    """KiB, of this process alone: what ru_maxrss says begins with the size of the process that started it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    measured(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
