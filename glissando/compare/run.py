"""Several models under one budget: learning rates chosen, seeds trained, probes tried, everything measured.

Whatever is finished stays: the same command again does only what is missing, and goes on with what was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.compare.duration import fitted, resumed
from glissando.compare.log import STOP, Log, aligned
from glissando.compare.measure import origin, read_measured
from glissando.compare.plan import Comparison, Job
from glissando.compare.report import ranked, write_report
from glissando.compare.results import Finished, ModelResult, beyond, bits_on, choose, gather
from glissando.compare.speed import measure_speed
from glissando.compare.training import train_and_measure
from glissando.errors import ConfigError, TrainingError
from glissando.machine import environment
from glissando.progress import elapsed_and_left, minutes
from glissando.storage import write_atomic

if TYPE_CHECKING:
    from glissando.compare.cluster import Cluster

#: in a comparison's directory: the measured speed of its models
SPEED = "speed.json"


def compare(
    comparison: Comparison, cluster: Cluster | None = None, within: float | None = None
) -> tuple[Path, list[ModelResult]]:
    """Do what is missing of the comparison; returns the report's path on this machine and the results.

    The table of all models, the best first, is printed at the end. With a `cluster` trainings are tasks of Ray, side by
    side; else they follow each other in this process. Where that would take more than `within` seconds there are fewer
    models and a smaller budget.

    Raises ConfigError, UnknownNameError, DataError or RunError before anything is trained where that can be known;
    TrainingError where no learning rate of any model works. Ctrl-C raises KeyboardInterrupt once the step in progress
    is saved.
    """
    began = time.perf_counter()
    if within is not None:
        if cluster is not None or comparison.budget.kind == "flops":
            raise ConfigError(
                "--within sizes trainings that follow each other on this machine, with a budget of tokens, steps or "
                "seconds: leave it out, or --on and a budget of flops"
            )
        comparison = resumed(comparison)
    print("reading the text, and training the tokenizer where it is BPE", file=sys.stderr, flush=True)
    comparison.check()
    for name in comparison.names:  # before hours of training, and not after them
        for rate in comparison.rates(name):
            chosen = {name: rate}
            for job in [*comparison.sweep_jobs(), *comparison.run_jobs(chosen), *comparison.probe_jobs(chosen)]:
                comparison.require_same(job)
    comparison.write_plan()
    (comparison.out / STOP).unlink(missing_ok=True)  # of a command that was killed
    with contextlib.closing(Log(comparison.out)) as log:
        if cluster is not None and comparison.budget.kind == "seconds":
            log.print(
                "a budget in seconds is wall time: trainings on one machine share it, and each does less than alone"
            )
        if cluster is None:
            comparison = fitted(comparison, within, log, began)
            comparison.write_plan()
        sweep, chosen = _chosen(comparison, log, cluster)
        runs = _finish_all(comparison, comparison.run_jobs(chosen), log, cluster)
        speed = _speed(comparison, runs, log)
        probes = _finish_all(comparison, comparison.probe_jobs(chosen), log, cluster)
        log.print("writing the report")
        results = gather(comparison, sweep, runs, probes, chosen, speed)
        report = write_report(comparison, results)
        log.print("\n".join(_table(results)))
        return report, results


def _table(results: Sequence[ModelResult]) -> list[str]:
    """The models, the best first, and those of which every training has failed."""
    order = [*ranked(results), *(result for result in results if result.bits is None)]
    rows = [["model", "parameters", "rate", "runs", "bits/byte"]]
    for r in order:
        bits = "failed" if r.bits is None else f"{r.bits.value:.4f}"
        rate = "" if r.learning_rate is None else f"{r.learning_rate:g}"
        rows.append([r.model, f"{r.parameters:,}", rate, f"{len(r.good)}/{len(r.runs)}", bits])
    return aligned(rows)


def _chosen(comparison: Comparison, log: Log, cluster: Cluster | None) -> tuple[list[Finished], dict[str, float]]:
    """What was tried, and model -> learning rate. Raises TrainingError where none works for any model."""
    if not comparison.sweeps:
        return [], {name: comparison.rates(name)[0] for name in comparison.names}
    tried = _finish_all(comparison, comparison.sweep_jobs(), log, cluster)
    while further := beyond(comparison, tried):
        tried += _finish_all(comparison, further, log, cluster)
    chosen = choose(tried)
    if not chosen:
        raise TrainingError(f"every training diverged at every learning rate {comparison.learning_rates}: lower them")
    return tried, chosen


def _finish_all(comparison: Comparison, jobs: Sequence[Job], log: Log, cluster: Cluster | None) -> list[Finished]:
    """Each job trained and measured, now or before; with a `cluster` side by side."""
    began, done = time.perf_counter(), dict[Job, dict[str, Any]]()
    for job in jobs:
        comparison.require_same(job)
        if (figures := read_measured(job.path(comparison.out))) is not None:
            done[job] = figures
    missing = [job for job in jobs if job not in done]
    here = ((job, train_and_measure(comparison.config(job), job, job.path(comparison.out), log)) for job in missing)
    results = here if cluster is None else cluster.results(comparison, missing, log)
    with contextlib.closing(results):
        for number, (job, figures) in enumerate(results, 1):
            done[job] = figures
            share = number / len(missing)
            left = f"; {elapsed_and_left(time.perf_counter() - began, share)}" if share < 1 else ""
            log.print(_ended(job, figures) + left)
    return [Finished(job, job.path(comparison.out), done[job]) for job in jobs]


def _ended(job: Job, figures: dict[str, Any]) -> str:
    """How a training has ended, in a line."""
    if "failed" in figures:
        return f"{job.title}: failed: {figures['failed']}"
    trained = f"{job.title}: trained in {minutes(figures['spent']['seconds'])}"
    return f"{trained}, {bits_on(figures, slice(None)):.4f} bits/byte"


def _speed(comparison: Comparison, runs: list[Finished], log: Log) -> dict[str, Any]:
    """The speed of each model's first run that ended well; measured again where a run or a context was added."""
    first: dict[str, Finished] = {}
    for run in runs:
        if run.failed is None:
            first.setdefault(run.job.model, run)
    # A directory may have been removed and trained again, with other options.
    key: dict[str, Any] = {"contexts": list(comparison.contexts)} | {
        name: [str(run.path.relative_to(comparison.out)), run.figures["provenance"]["date"]]
        for name, run in first.items()
    }
    file = comparison.out / SPEED
    if file.is_file() and (known := json.loads(file.read_bytes()))["of"] == key:
        return known["models"]
    measured = measure_speed({name: run.path for name, run in first.items()}, comparison.contexts, log.status)
    here = origin(environment())  # it need not be where the runs were trained
    models = {name: figures | {"run": key[name][0], "provenance": here} for name, figures in measured.items()}
    write_atomic(file, (json.dumps({"of": key, "models": models}, indent=2) + "\n").encode())
    return models
