"""Reads a corpus all over and trains on it; prints what that took as one JSON line.

past_memory.py OPTIONS, which are JSON: {"data": {...}, "small": {...}, "starts": [...], "out": DIR}

small   options of `data` that differ for a small text;  starts  numbers of batches
"""

from __future__ import annotations

import json
import re
import sys
import time
from itertools import islice
from pathlib import Path

from glissando.config import from_dict
from glissando.data.corpora import CORPORA, build_corpus
from glissando.training.config import RunConfig
from glissando.training.fit import train

MODEL = {"hidden_size": 32, "depth": {"layers": 1}, "mixer": {"kind": "attention", "heads": 2}}


def peak_bytes() -> int:
    """The process's largest resident set since it was last counted anew."""
    result = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert result is not None
    return int(result[1]) << 10


def clocks() -> tuple[float, float]:
    """Seconds on the wall and of the processor."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    arguments = json.loads(sys.argv[1])
    # What training imports late is counted to the imports, as are the buffers of PyTorch's first steps.
    train(config({**arguments["data"], **arguments["small"]}), Path(arguments["out"]) / "small")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
    imports, times = peak_bytes(), [clocks()]
    corpus = build_corpus(from_dict(CORPORA.section(), arguments["data"], "data"))
    times.append(clocks())
    rows = 0
    for start in arguments["starts"]:
        for batch in islice(corpus.batches("train", start=start), 4):
            rows += len(batch.ids)
    times.append(clocks())
    train(config(arguments["data"]), Path(arguments["out"]) / "large")
    times.append(clocks())
    names = ("opening", "drawing", "training")
    spent = zip(names, times, times[1:], strict=False)
    seconds = {name: [after - before for before, after in zip(*pair, strict=True)] for name, *pair in spent}
    print(json.dumps({"peak": peak_bytes() - imports, "imports": imports, "rows": rows, "seconds": seconds}))


def config(data: dict[str, object]) -> RunConfig:
    training = {"steps": 3, "schedule": {"kind": "constant"}}
    return from_dict(RunConfig, {"model": MODEL, "data": data, "training": training}, "test")


if __name__ == "__main__":
    main()
