"""Several models under one budget: learning rates chosen, seeds trained, probes tried, everything measured.

Whatever is finished stays: the same command again does only what is missing, and goes on with what was interrupted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.compare.measure import origin, read_measured
from glissando.compare.plan import Comparison, Job
from glissando.compare.report import write_report
from glissando.compare.results import Finished, ModelResult, beyond, bits_on, choose, finished, gather, reported
from glissando.compare.speed import measure_speed
from glissando.compare.table import Table
from glissando.compare.training import train_and_measure
from glissando.errors import TrainingError
from glissando.machine import environment
from glissando.progress import minutes
from glissando.storage import write_atomic

if TYPE_CHECKING:
    from glissando.compare.cluster import Cluster

#: in a comparison's directory: the measured speed of its models
SPEED = "speed.json"
#: raised when what is measured changes: older figures are not set beside new ones
_SPEED_FORMAT = 2


def compare(
    comparison: Comparison, show_table: bool = True, cluster: Cluster | None = None
) -> tuple[Path, list[ModelResult]]:
    """Do what is missing of the comparison; returns the report's path on this machine and the results.

    The table of all models, the best first, is printed at the end if `show_table`. With a `cluster` trainings are
    tasks of Ray, side by side; else they follow each other in this process.

    Raises ConfigError, UnknownNameError, DataError or RunError before anything is trained where that can be known;
    TrainingError where no learning rate of any model works. Ctrl-C raises KeyboardInterrupt once the step in progress
    is saved.
    """
    if cluster is not None:
        cluster.check()
    comparison.check()
    _require_same(comparison)
    comparison.write_plan()
    table = Table(comparison.directory)
    if comparison.shortened:
        changed = ", ".join(f"data.{name} {str(value).lower()}" for name, value in comparison.shortened.items())
        table.print(f"for the model of the fewest positions, all models are trained with {changed}", stays=True)
    with contextlib.ExitStack() as stack:
        stack.callback(table.close, show_table)
        kinds = [comparison.budget.kind, comparison.probe_budget.kind if comparison.probes else None]
        if cluster is not None and "seconds" in kinds:
            table.print(
                "a budget in seconds is wall time: trainings on one machine share it, so that each does less in its "
                "time than it would alone",
                stays=True,
            )
        return _compare(comparison, table, cluster)


def _compare(comparison: Comparison, table: Table, cluster: Cluster | None) -> tuple[Path, list[ModelResult]]:
    for name, count in comparison.parameters().items():
        table.set(name, parameters=f"{count:,}", state="waiting")
    chosen = _chosen(comparison, table, cluster)
    runs = _finish_all(comparison, comparison.run_jobs(chosen), table, cluster)
    _show(comparison, runs, table)
    speed = _speed(comparison, runs, table)
    _finish_all(comparison, comparison.probe_jobs(chosen), table, cluster)
    table.print("writing the report")
    results = gather(comparison, chosen, speed)
    for name in comparison.names:
        table.set(name, state="done" if name in chosen else "failed")
    return write_report(comparison, results), results


def _require_same(comparison: Comparison) -> None:
    """Check every directory that may be needed before hours of training, and not after them."""
    for job in comparison.sweep_jobs():
        comparison.require_same(job)
    for chosen in _may_be_chosen(comparison):
        for job in [*comparison.run_jobs(chosen), *comparison.probe_jobs(chosen)]:
            comparison.require_same(job)


def _may_be_chosen(comparison: Comparison) -> list[dict[str, float]]:
    """model -> learning rate: the choice where it is known, else every rate for every model."""
    if not comparison.sweeps:
        return [{name: comparison.rates(name)[0] for name in comparison.names}]
    jobs = comparison.sweep_jobs()
    tried = finished(comparison, jobs)
    if len(tried) == len(jobs) and not beyond(comparison, tried):
        return [choose(tried)]
    return [dict.fromkeys(comparison.names, rate) for rate in sorted({job.learning_rate for job in jobs})]


def _chosen(comparison: Comparison, table: Table, cluster: Cluster | None) -> dict[str, float]:
    """model -> learning rate. Raises TrainingError where none works for any model."""
    if comparison.sweeps:
        tried = _finish_all(comparison, comparison.sweep_jobs(), table, cluster)
        while further := beyond(comparison, tried):
            tried += _finish_all(comparison, further, table, cluster)
        chosen = choose(tried)
    else:
        chosen = {name: comparison.rates(name)[0] for name in comparison.names}
    if not chosen:
        raise TrainingError(f"every training diverged at every learning rate {comparison.learning_rates}: lower them")
    for name, rate in chosen.items():
        table.set(name, rate=f"{rate:g}")
    return chosen


def _finish_all(comparison: Comparison, jobs: Sequence[Job], table: Table, cluster: Cluster | None) -> list[Finished]:
    """Each job trained and measured, now or before; with a `cluster` side by side."""
    done: dict[Job, dict[str, Any]] = {}
    for job in jobs:
        comparison.require_same(job)
        if (figures := read_measured(job.path(comparison.directory))) is not None:
            done[job] = figures
            _count(comparison, job, table)
    missing = [job for job in jobs if job not in done]
    results = _results(comparison, missing, table) if cluster is None else cluster.results(comparison, missing, table)
    with contextlib.closing(results):
        for job, figures in results:
            done[job] = figures
            table.print(_ended(comparison, job, figures))
            _count(comparison, job, table)
    return [Finished(job, job.path(comparison.directory), done[job]) for job in jobs]


def _results(
    comparison: Comparison, jobs: Sequence[Job], table: Table
) -> Generator[tuple[Job, dict[str, Any]], None, None]:
    """One job after the other in this process, with its figures."""
    for job in jobs:
        figures = train_and_measure(comparison.config(job), job, job.path(comparison.directory), table)
        table.set(job.model, state="waiting")
        yield job, figures


def _ended(comparison: Comparison, job: Job, figures: dict[str, Any]) -> str:
    """How a training has ended, in a line."""
    if "failed" in figures:
        return f"{job.title}: failed: {figures['failed']}"
    line = f"{job.title}: trained in {minutes(figures['spent']['seconds'])}"
    if job.kind == "run" and comparison.seeds == 1:  # the table has the figure
        return line
    return f"{line}, {bits_on(figures, slice(None)):.4f} bits/byte"


def _count(comparison: Comparison, job: Job, table: Table) -> None:
    """One more of its kind is done: as "2/3" in the model's row."""
    column = {"sweep": "sweep", "run": "runs", "probe": "probes"}[job.kind]
    total = {
        "sweep": len(comparison.learning_rates), "run": comparison.seeds,
        "probe": comparison.seeds * len(comparison.probes),
    }[job.kind]  # fmt: skip
    done = int(table.rows[job.model].get(column, "0/").partition("/")[0]) + 1
    table.set(job.model, **{column: f"{done}/{max(done, total)}"})  # a sweep may go on beyond the requested rates


def _show(comparison: Comparison, runs: list[Finished], table: Table) -> None:
    for name in comparison.names:
        mine = [run for run in runs if run.job.model == name and run.failed is None]
        if mine:
            each = [bits_on(run.figures, reported(comparison)) for run in mine]
            table.set(name, bits_byte=f"{sum(each) / len(each):.4f}")


def _speed(comparison: Comparison, runs: list[Finished], table: Table) -> dict[str, Any]:
    """The speed of each model's first run that ended well; measured again where a run or a context was added."""
    good = [run for run in runs if run.failed is None]
    first: dict[str, Path] = {}
    for run in good:
        first.setdefault(run.job.model, run.path)
    dates = {run.path: run.figures["provenance"]["date"] for run in good}
    key: dict[str, Any] = {"format": _SPEED_FORMAT, "contexts": list(comparison.contexts)}
    key["runs"] = {name: str(path.relative_to(comparison.directory)) for name, path in first.items()}
    # A directory may have been removed and trained again, with other options.
    key["dates"] = {name: dates[path] for name, path in first.items()}
    file = comparison.directory / SPEED
    if file.is_file():
        known = json.loads(file.read_bytes())
        if known["of"] == key and all("provenance" in figures for figures in known["models"].values()):
            return known["models"]
    here = origin(environment())  # it need not be where the runs were trained
    models = {
        name: figures | {"run": key["runs"][name], "provenance": here}
        for name, figures in measure_speed(first, comparison.contexts, table.status).items()
    }
    write_atomic(file, (json.dumps({"of": key, "models": models}, indent=2) + "\n").encode())
    return models
