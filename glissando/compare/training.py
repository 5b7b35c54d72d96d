"""One training of a comparison, from its options to what is measured of it, in whatever process computes it."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

from glissando.compare.at_url import push_finished
from glissando.compare.measure import measure, record_failure
from glissando.compare.plan import Job
from glissando.compare.speed import warm_up
from glissando.compare.table import Shown, Turn, TurnOver
from glissando.data.corpora import build_tokenizer
from glissando.errors import DivergenceError, Stopped
from glissando.remote import delete_begun, has_checkpoint
from glissando.runs import Run
from glissando.training.config import RunConfig, fitted_vocabulary
from glissando.training.fit import resume, train


def train_and_measure(config: RunConfig, job: Job, path: Path, table: Shown, url: str | None = None) -> dict[str, Any]:
    """Train the job to its end, from what is there; what was measured of it, or that it has failed, as it is kept.

    url  where the run at `path` is copied to after every save, and where it goes on if that is further
    """
    figures, _ = train_job(config, job, path, table, url=url)
    if figures is not None:
        return figures

    def status(text: str) -> None:
        table.status(f"{job.title}: {text}")
        if table.stop_asked():
            raise Stopped

    figures = measure(job, path, status)
    if url is not None:
        push_finished(url, path)
    return figures


def train_job(
    config: RunConfig, job: Job, path: Path, table: Shown, until: float = 1.0, url: str | None = None
) -> tuple[dict[str, Any] | None, float | None]:
    """Train the job until so much of its budget is spent; the figures of a failure, and the speed in tokens/s of the
    steps taken, each None where there is none. `url` as in `train_and_measure`."""
    shown = Turn(table, job.title, job.model if job.kind == "run" else None, until)
    table.set(job.model, state=job.task or job.kind)
    with contextlib.redirect_stderr(table.log):
        try:
            if config.training.seconds is not None:
                table.status(f"{job.title}: compiling")  # a machine does so once: no model's seconds are spent on it
                warm_up(with_vocabulary(config))
            out, work = (path, None) if url is None else (url, path)
            has_begun = path.is_dir() and not Run(path).has_only_begun()
            if has_begun or (url is not None and has_checkpoint(url)):
                resume(out, progress=shown, work=work)
            else:
                if url is not None:
                    delete_begun(url)
                train(config, out, progress=shown, work=work)
        except DivergenceError as error:
            figures = record_failure(job, path, str(error))
            if url is not None:
                push_finished(url, path)
            return figures, shown.speed
        except TurnOver:
            pass
        except Stopped:
            if shown.stopping is None or shown.stopping.asked is not None:
                raise
    if shown.speed is not None:
        table.speed(job.model, f"{job.model} {job.task}", shown.speed)
    table.set(job.model, state="waiting")
    return None, shown.speed


def with_vocabulary(config: RunConfig) -> RunConfig:
    """A copy whose model has the vocabulary of the tokenizer in the place of its own."""
    config = copy.deepcopy(config)
    tokens = build_tokenizer(config.data).vocab_size
    config.model.vocab_size = fitted_vocabulary(config.model.vocab_size, tokens)
    return config
