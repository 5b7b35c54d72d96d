"""How many threads compute: as many as are given, else as many as are fastest now, by a short measurement.

On a busy machine two threads can be slower than one: they wait for each other, and one of them may not be running.
While OpenMP's threads wait they spin, by default for milliseconds, on processors that others could use.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

#: what says how long OpenMP's threads spin before they sleep: the standard's, GCC's and LLVM's
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_COUNT = "OMP_NUM_THREADS"
#: seconds of a measurement, and of one of its samples: longer than a scheduler's time slice
_SECONDS, _SAMPLE = 0.2, 0.01
#: seconds behind which a measurement waits for no further round
_LONG = 0.5
#: rows beyond which a product is large in any case
_MOST_ROWS = 2048


def wait_briefly() -> None:
    """Have OpenMP's threads sleep after they have waited for microseconds, in place of milliseconds.

    It takes effect before torch is imported, and nothing that the user has set is changed. It is for whoever owns the
    process: the program calls it, the library never does by itself.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ |= {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0"}


def use_threads(requested: int | None, rows: int, width: int, before: int | None = None) -> str | None:
    """Set how many threads PyTorch and the kernels compute with; returns a line that says what was measured, if it was.

    requested    as many; None: OMP_NUM_THREADS if it is set, else `before`, else the fastest of 1, half and all
    rows, width  of the activations (rows, width) that the measured products are of
    before       how many an interrupted training used, see `threads_of`: another number may round otherwise
    """
    import torch

    if requested is not None:
        torch.set_num_threads(requested)
        os.environ[_COUNT] = str(requested)  # for processes that this one starts
        return None
    if os.environ.get(_COUNT, "").isdigit() and int(os.environ[_COUNT]):  # what is no number OpenMP ignores too
        return None
    cores = os.cpu_count() or 1
    if before is not None and before <= cores:
        torch.set_num_threads(before)
        return None
    most = torch.get_num_threads()
    note = "" if before is None else f"; the run was made with {before}, and these {cores} cores may round otherwise"
    if most == 1:
        return note.removeprefix("; ") or None
    seconds = measure(sorted({1, most // 2, most}), rows, width)
    chosen = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(chosen)
    return f"threads: {chosen} of {most} ({most} compute {seconds[1] / seconds[most]:.1f} times as fast as 1 now){note}"


def measure(counts: list[int], rows: int, width: int) -> dict[int, float]:
    """Median seconds of two matrix products of (rows, width) and what stands between them, by number of threads, in
    turn. The number of threads is left as it was."""
    import torch
    import torch.nn.functional as F

    before = torch.get_num_threads()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with torch.inference_mode():
        x = torch.full((min(rows, _MOST_ROWS), width), 0.1)
        up, down = torch.full((width, 4 * width), 0.01), torch.full((4 * width, width), 0.01)

        def sample(repeats: int) -> float:
            began = time.perf_counter()
            for _ in range(repeats):
                F.rms_norm(x + F.gelu(x @ up) @ down, (width,))
            return time.perf_counter() - began

        try:
            torch.set_num_threads(1)
            sample(1)
            repeats = max(1, round(_SAMPLE / sample(1)))
            began, rounds = time.perf_counter(), 0
            # Three rounds at least; where a busy machine makes each of them long, one says enough.
            while (spent := time.perf_counter() - began) < _SECONDS or rounds < (3 if spent < _LONG else 1):
                rounds += 1
                for count in counts:
                    torch.set_num_threads(count)
                    seconds[count].append(sample(repeats))
        finally:
            torch.set_num_threads(before)
    return {count: statistics.median(times) / repeats for count, times in seconds.items()}


def threads_of(run: str | Path) -> int | None:
    """How many threads the run at `run` was made with, by its environment.json; None where that does not say."""
    path = Path(run).expanduser() / "environment.json"
    try:
        return int(json.loads(path.read_bytes())["threads"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # provenance alone: a run resumes without it
