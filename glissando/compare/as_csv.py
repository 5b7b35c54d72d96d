"""The figures of a comparison as CSV: a line a measure, and the runs, seeds, commit and machine behind it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from glissando.compare.results import Estimate, Finished, ModelResult, Runs, accuracy, bits_on

_COLUMNS = (
    "section", "model", "measure", "value", "low", "high", "unit", "seed", "learning_rate", "run", "commit", "modified",
    "machine", "date",
)  # fmt: skip


def as_csv(results: Sequence[ModelResult], runs: Runs) -> str:
    """A line a measure: of models over their runs, and of every run by itself."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in results:
        for line in _model_lines(result):
            writer.writerow(line | _origin(result.good, runs) | {"section": "model", "model": result.model})
        for line in _speed_lines(result):
            writer.writerow(line | _speed_origin(result, runs) | {"section": "model", "model": result.model})
        for task, mine in result.probes.items():
            line = _estimated("accuracy", accuracy(mine), "share")
            good = [run for run in mine if run.failed is None]
            writer.writerow(line | _origin(good, runs) | {"section": f"probe {task}", "model": result.model})
    for run in runs.all:
        for line in _run_lines(run):
            section = f"one {run.job.kind} {run.job.task}".strip()
            writer.writerow(line | _origin([run], runs) | {"section": section, "model": run.job.model})
    return text.getvalue()


def _estimated(measure: str, estimate: Estimate | None, unit: str) -> dict[str, Any]:
    if estimate is None:
        return {"measure": measure, "unit": unit}
    return {"measure": measure, "value": estimate.value, "low": estimate.low, "high": estimate.high, "unit": unit}


def _model_lines(result: ModelResult) -> Iterator[dict[str, Any]]:
    yield {"measure": "parameters", "value": result.parameters, "unit": "numbers"}
    yield _estimated("bits_per_byte", result.bits, "bits/byte")
    yield _estimated("bits_per_byte_against_first", result.against_first, "bits/byte")
    yield {"measure": "entropy_floor", "value": result.floor, "unit": "bits/byte"}
    yield {"measure": "epiplexity", "value": result.mean("epiplexity", "bits"), "unit": "bits"}
    yield {"measure": "tokens_per_second", "value": result.mean("tokens_per_second"), "unit": "tokens/s"}


def _speed_lines(result: ModelResult) -> Iterator[dict[str, Any]]:
    if not result.speed:
        return
    yield _timed("tokens_per_second_in_turn", result.speed["train"], "tokens/s")
    yield {"measure": "peak_memory", "value": result.speed["memory_mib"], "unit": "MiB"}
    for context, figure in result.speed["decode"].items():
        yield _timed(f"decode_at_{context}", figure, "ms/token")
        yield {"measure": f"state_at_{context}", "value": result.speed["state"][context], "unit": "bytes"}


def _timed(measure: str, figure: dict[str, float], unit: str) -> dict[str, Any]:
    return {"measure": measure, "value": figure["median"], "low": figure["low"], "high": figure["high"], "unit": unit}


def _run_lines(run: Finished) -> Iterator[dict[str, Any]]:
    if run.failed is not None:
        yield {"measure": "failed", "value": run.failed}
        return
    yield {"measure": "bits_per_byte", "value": bits_on(run.figures, slice(None)), "unit": "bits/byte"}
    rows = run.figures["held_out"]
    yield {"measure": "accuracy", "value": sum(rows["correct"]) / sum(rows["targets"]), "unit": "share"}
    yield {"measure": "epiplexity", "value": run.figures["epiplexity"]["bits"], "unit": "bits"}
    yield {"measure": "tokens_per_second", "value": run.figures["tokens_per_second"], "unit": "tokens/s"}
    for name, value in run.figures["spent"].items():
        if value is not None:
            yield {"measure": name, "value": value, "unit": {"seconds": "s", "step": "steps"}.get(name, name)}


def _speed_origin(result: ModelResult, runs: Runs) -> dict[str, Any]:
    """The run whose model was timed, with the machine and the commit that timed it."""
    if not result.speed:
        return {}
    timed = [run for run in result.runs if runs.place(run) == result.speed["run"]]
    measured = {name: result.speed["provenance"][name] for name in ("commit", "modified", "machine", "date")}
    return _origin(timed, runs) | measured


def _origin(mine: Sequence[Finished], runs: Runs) -> dict[str, Any]:
    """Where a figure comes from; several values of several runs with spaces between, each once."""
    origins = [run.figures["provenance"] for run in mine]
    columns = {name: [origin[name] for origin in origins] for name in ("commit", "modified", "machine", "date")}
    columns |= {"run": [runs.place(run) for run in mine], "seed": [runs.seed(run) for run in mine]}
    columns |= {"learning_rate": [run.job.learning_rate for run in mine]}
    return {name: "; ".join(dict.fromkeys(str(value) for value in values)) for name, values in columns.items()}
