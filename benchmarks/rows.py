"""The benchmarks by name. Adding one is a function that returns a Row, and its line in `ROWS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import (
    decoding,
    delta,
    flow,
    liquid,
    scans,
    serving,
    spectral,
    speed,
    starting,
    steps,
    tau,
    threads,
    training,
)
from benchmarks.speed import Row
from glissando.errors import unknown_name

ROWS: dict[str, Callable[[int], Row]] = {
    **{
        f"hf-training-{length}-{precision}": partial(speed.training, length, precision)
        for length in (512, 2048)
        for precision in ("float32", "bf16")
    },
    **{f"training-{preset}": partial(training.training, preset) for preset in training.PRESETS},
    "decoding": speed.decoding,
    **decoding.ROWS,
    "decoding-delta-flat": decoding.flat,
    **{f"step-{preset}-{context}-{n}": partial(steps.step, preset, context, n) for preset, context, n in steps.CASES},
    **{
        f"caches-{preset}-{context}-{n}": partial(steps.caches, preset, context, n)
        for preset, context, n in steps.CACHES
    },
    **{
        f"weights-{preset}-{precision}-{n}": partial(steps.weights, preset, precision, n)
        for preset in steps.GOALS
        for precision in ("bf16", "int8")
        for n in (1, 32)
    },
    **{f"texts-{preset}": partial(steps.texts, preset) for preset in steps.TEXTS},
    **{f"two-threads-{preset}": partial(steps.threads, preset) for preset in steps.TEXTS},
    "start-up": speed.start_up,
    "starting-serve": starting.serve,
    "starting-generate": starting.generate,
    "loop-cost": speed.loop_cost,
    "spectral-training": spectral.training,
    "spectral-decoding": spectral.decoding,
    "spectral-long": spectral.long_text,
    **{f"delta-training-{preset}-{n}": partial(delta.training, preset, n) for preset, n in delta.TRAINING},
    **{f"flow-latency-{case}": partial(flow.latency, case) for case in flow.CASES},
    **{f"tau-forward-{case}": partial(tau.forward, case) for case in tau.FORWARD},
    **{f"tau-backward-{case}": partial(tau.backward, case) for case in tau.BACKWARD},
    "liquid-published": liquid.published,
    "liquid-dense": liquid.dense,
    **{f"liquid-training-{case}": partial(liquid.training, case) for case in liquid.PAIRS},
    "liquid-memory": liquid.memory,
    "liquid-cfc": liquid.cfc,
    **{f"serving-whole-{case}": partial(serving.throughput, case, 32, False) for case in serving.MODELS},
    **{f"serving-streamed-{case}": partial(serving.throughput, case, 32, True) for case in serving.MODELS},
    **{f"serving-one-{case}": partial(serving.throughput, case, 1, True) for case in serving.MODELS},
    **{
        f"serving-prefix-{case}-{n}": partial(serving.prefix, case, n)
        for case in ("transformer", "liquid")
        for n in (1024, 4096, 16384)
    },
    "serving-memory": serving.memory,
    "serving-transformers": partial(serving.against, "transformers serve"),
    "serving-llama": partial(serving.against, "llama-server"),
    **{f"threads-busy-{purpose}": partial(threads.busy, purpose) for purpose in threads.PURPOSES},
    **{f"threads-spinning-{purpose}": partial(threads.against_spinning, purpose) for purpose in threads.PURPOSES},
    **{f"threads-quiet-{purpose}": partial(threads.quiet, purpose) for purpose in threads.PURPOSES},
    **{f"scan-{case}": partial(scans.scan_row, case) for case in scans.CASES},
}


def select(names: list[str]) -> list[str]:
    """The rows so named and those whose names begin so: `scan` is every scan-...; all of them for no name.

    Raises UnknownNameError for a name that is no row and begins none.
    """
    chosen = []
    for name in names:
        found = [row for row in ROWS if row == name or row.startswith(f"{name}-")]
        if not found:
            raise unknown_name("benchmark", name, {*ROWS, *(row.partition("-")[0] for row in ROWS if "-" in row)})
        chosen += found
    return chosen or list(ROWS)
