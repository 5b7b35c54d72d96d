"""One training of a comparison, from its options to what is measured of it, in whatever process computes it."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

from glissando.compare.log import JobProgress, Log
from glissando.compare.measure import measure, record_failure
from glissando.compare.plan import Job
from glissando.compare.speed import cost_of
from glissando.data.corpora import build_tokenizer
from glissando.errors import DivergenceError
from glissando.runs import Run
from glissando.training.config import RunConfig, fitted_vocabulary
from glissando.training.fit import resume, train


def train_and_measure(config: RunConfig, job: Job, path: Path, log: Log) -> dict[str, Any]:
    """Train the job to its end, from what is there; what was measured of it, or that it has failed, as it is kept."""
    shown = JobProgress(log, job.title)
    with contextlib.redirect_stderr(log.kept):
        try:
            if config.training.seconds is not None:
                log.status(f"{job.title}: compiling")  # a machine does so once: no model's seconds are spent on it
                cost_of(with_vocabulary(config))
            if path.is_dir() and not Run(path).has_only_begun():
                resume(path, progress=shown)
            else:
                train(config, path, progress=shown)
        except DivergenceError as error:
            return record_failure(job, path, str(error))
    log.status(f"{job.title}: measuring")
    return measure(job, path)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """A copy whose model has the vocabulary of the tokenizer in the place of its own."""
    config = copy.deepcopy(config)
    tokens = build_tokenizer(config.data).vocab_size
    config.model.vocab_size = fitted_vocabulary(config.model.vocab_size, tokens)
    return config
