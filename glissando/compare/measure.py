"""What is measured of one finished training, kept in its run directory as measured.json.

Held-out rows are kept one by one, so that models can be compared on the very same rows. Where learning rates are swept
the rows are dealt out: those of even number choose the rate, those of odd number are reported.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from glissando.compare.plan import MEASURED, Job
from glissando.compare.speed import device_of
from glissando.config import from_dict
from glissando.data.base import Batch, Corpus
from glissando.data.corpora import build_corpus
from glissando.errors import RunError
from glissando.evaluation.figures import require_log
from glissando.evaluation.scoring import score
from glissando.generation import generate, tokens_left
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.runs import ENVIRONMENT, Run
from glissando.storage import write_atomic
from glissando.text_row import visible
from glissando.training.config import RunConfig

_SAMPLE_TOKENS = 300

#: rows of metrics.csv with numbers for text
Rows = list[dict[str, float]]


def read_measured(path: Path) -> dict[str, Any] | None:
    """What was measured of the run at `path`; None if nothing was yet.

    Raises RunError for a file that is no JSON.
    """
    file = path / MEASURED
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file} is malformed ({error}): delete it, and it is measured again") from error


def measure(job: Job, path: Path) -> dict[str, Any]:
    """Measure the finished run at `path` and write it there; returns what was written."""
    run = Run.open(path)
    config = from_dict(RunConfig, run.read_config(), "config.yaml")
    model = load(path).to(device_of(config))
    corpus = build_corpus(config.data, model.tokenizer)
    rows = metric_rows(path)
    result = score(model, corpus.batches("valid"))
    figures: dict[str, Any] = {
        **asdict(job),
        "parameters": model.num_parameters(),
        "held_out": {
            "nats": result.nats,
            "targets": result.targets,
            "correct": result.correct,
            "bytes": result.row_bytes,
            "floor_bits": floor_by_row(config, corpus),
            "digest": _digest(corpus.batches("valid")),
        },
        "chance_accuracy": corpus.describe().get("chance_accuracy"),
        "spent": {name: rows[-1].get(name) for name in ("step", "tokens", "flops", "seconds")},
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "provenance": provenance(path),
    }
    if job.kind == "run":
        figures["sample"] = sample(model, corpus)
    return _write(path, figures)


def record_failure(job: Job, path: Path, reason: str) -> dict[str, Any]:
    """That this training diverged: the same settings would end there again, so it is not repeated."""
    return _write(path, {**asdict(job), "failed": reason, "provenance": provenance(path)})


def _write(path: Path, figures: dict[str, Any]) -> dict[str, Any]:
    write_atomic(path / MEASURED, (json.dumps(figures) + "\n").encode())
    return figures


def _digest(batches: Iterable[Batch]) -> str:
    """The digest of the ids: runs of another text cannot be compared with these."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.ids.numpy().tobytes())
    return digest.hexdigest()


def floor_by_row(config: RunConfig, corpus: Corpus) -> list[float] | None:
    """Exact bits of each held-out row, where the corpus knows them; None elsewhere."""
    if corpus.entropy_floor is None:
        return None
    alone = build_corpus(replace(config.data, batch_size=1), corpus.tokenizer)
    bits = [batch.floor_bits for batch in alone.batches("valid")]
    known = [value for value in bits if value is not None]
    return known if len(known) == len(bits) else None


def sample(model: LanguageModel, corpus: Corpus) -> dict[str, str]:
    """How the model goes on from a prompt that is the same for every model and seed."""
    prompt = corpus.prompts(1, seed=0)[0]
    assert model.tokenizer is not None
    tokens = min(_SAMPLE_TOKENS, tokens_left(model, 1 + len(model.tokenizer.encode(prompt))))
    text = generate(model, prompt, max_tokens=tokens, temperature=0.8, top_p=0.9, seed=0)[0] if tokens > 0 else ""
    return {"prompt": visible(prompt), "text": visible(text)}


def metric_rows(path: Path) -> Rows:
    """metrics.csv as numbers; what was not measured in a row is not in it.

    Raises RunError if nothing was logged.
    """
    return [{k: float(v) for k, v in row.items() if v} for row in require_log(path)]


def provenance(path: Path) -> dict[str, Any]:
    """Where a run comes from: commit, machine, date and versions, from its environment.json."""
    return origin(json.loads((path / ENVIRONMENT).read_bytes()))


def origin(environment: dict[str, Any]) -> dict[str, Any]:
    """What the report contains of an environment.json."""
    git = environment.get("git") or {}
    return {
        "commit": git.get("commit"),
        "modified": git.get("modified"),
        "machine": environment["cpu"] if environment["devices"] == ["cpu"] else ", ".join(environment["devices"]),
        "cores": environment["cores"],
        "threads": environment["threads"],
        "date": environment["date"],
        "torch": environment["versions"]["torch"],
        "resumed": len(environment.get("resumed", [])),
    }
