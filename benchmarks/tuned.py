"""What comparisons of trainings share: every model has the same learning rates to choose from, results are kept.

Of the learning rates the one whose best validation loss is lowest, with the first seed, is taken for all seeds. One
line of JSON a training goes to OUT/results.jsonl, which is read again: what is there is not trained anew.
"""

from __future__ import annotations

import argparse
import csv
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: what names a training
KEY = ("task", "model", "seed", "rate", "seconds")


def parser_of(program: str, about: str, tasks: Iterable[str], models: Iterable[str], rates: str, seconds: float) -> Any:
    """The options of a comparison."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(tasks)}; all by default")
    parser.add_argument("--data", type=Path, required=True, help="folder that benchmarks.series.fetch wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of tables, runs and results.jsonl")
    parser.add_argument("--models", default=",".join(models), help="names, with commas between")
    parser.add_argument("--seconds", type=float, default=seconds, help="of the process's CPU, a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default=rates, help="learning rates, with commas between")
    parser.add_argument("--parameters", type=int, default=20_000)
    return parser


def options_of_width(mixer: dict[str, Any], width: int, head: dict[str, Any]) -> dict[str, Any]:
    """A model of two layers of this width around a mixer."""
    state = {"state_size": width} if mixer["kind"] == "liquid" else {}
    block, depth = {"mlp": {"hidden": width}}, {"layers": 2}
    return {"hidden_size": width, "mixer": {**mixer, **state}, "block": block, "depth": depth, **head}


def of_the_size(
    parameters: int, mixer: dict[str, Any], head: dict[str, Any], build: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The options of the model whose parameters, which rise with its width, are nearest to so many."""

    def size(width: int) -> int:
        return build(options_of_width(mixer, width, head)).num_parameters()

    widths = range(8, 97, 4)
    place = bisect_left(widths, parameters, key=size)  # the first that has so many, or more
    width = min(widths[max(0, place - 1) : place + 1], key=lambda width: abs(size(width) - parameters))
    return options_of_width(mixer, width, head)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(
    task: str, model: str, settings: argparse.Namespace, trained: Callable[..., dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The learning rate by the first seed, then the other seeds at that; `trained(task, model, rate, seed, settings)`
    makes what is not there."""
    log = settings.out / "results.jsonl"
    done = results(log)

    def result(rate: float, seed: int) -> dict[str, Any]:
        key = dict(zip(KEY, (task, model, seed, rate, settings.seconds), strict=True))
        for one in done:
            if key.items() <= one.items():
                return one
        made = {**key, **trained(task, model, rate, seed, settings)}
        with log.open("a") as file:
            file.write(json.dumps(made) + "\n")
        return made

    rates = [float(rate) for rate in settings.rates.split(",")]
    first = min((result(rate, 0) for rate in rates), key=lambda one: one["valid"])
    yield first
    for seed in range(1, settings.seeds):
        yield result(first["rate"], seed)


def write_figures(out: Path, columns: Sequence[str], rows: Iterable[tuple[dict[str, Any], Sequence[Any]]]) -> None:
    """A CSV, a figure a line: what names the training, its parameters and steps, then `columns`."""
    with out.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        named = [*KEY, "parameters", "steps"]
        lines.writerow([*named, *columns, "value"])
        for one, row in rows:
            *of, value = row
            lines.writerow([*(one[name] for name in named), *of, f"{value:.5g}"])
