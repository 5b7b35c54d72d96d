"""What the training loop itself costs: `glissando train` against the bare loop over the same batches."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from glissando.config import from_dict
from glissando.data.corpora import build_corpus
from glissando.model import LanguageModel
from glissando.training.config import RunConfig
from glissando.training.fit import train

_STEPS = 600
_CONFIG = {
    "model": {"hidden_size": 8, "mixer": {"kind": "attention", "heads": 1}, "depth": {"layers": 1}},
    "data": {"kind": "text", "seq_len": 8, "batch_size": 1, "max_valid_bytes": 64},
    "training": {"steps": _STEPS, "log_every": 50, "validate_every": 10**9, "sample_every": 10**9},
}


def added_milliseconds() -> float:
    """Time a step in `train`, less that of the bare loop: a model so small that the loop is what is timed."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        config = from_dict(RunConfig, _CONFIG)
        config.data.path = str(text)
        config.training.save_every = 10**9
        return 1000 * (_inside(config, Path(folder)) - _bare(config))


def _inside(config: RunConfig, folder: Path) -> float:
    """Seconds a step between the first and the last row of metrics.csv: without set-up and the last save."""
    from glissando.metrics import read_metrics

    with contextlib.redirect_stderr(io.StringIO()):
        run = train(config, folder / "run")
    rows = [r for r in read_metrics(run.path / "metrics.csv") if int(r["step"]) < _STEPS]
    return (float(rows[-1]["seconds"]) - float(rows[0]["seconds"])) / (int(rows[-1]["step"]) - int(rows[0]["step"]))


def _bare(config: RunConfig) -> float:
    model = LanguageModel.from_config(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = build_corpus(config.data).batches("train")
    for step in range(_STEPS):
        if step == 100:
            began = time.perf_counter()
        batch = next(batches)
        loss = F.cross_entropy(model(batch.ids)[0].flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / (_STEPS - 100)
