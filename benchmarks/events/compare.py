"""Mixers and a GRU on the logs of tasks.yaml: `python -m benchmarks.events.compare --data DIR --out DIR [TASK ...]`.

Every model has the same inputs, head, training loop, learning rates to choose from and budget in seconds of the
process's own clock, one thread, the preset `delta-events` with its mixer replaced, and a width by which its parameters
come nearest to the same number. See benchmarks.tuned.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks import tuned
from benchmarks.series.compare import GRU, GRUConfig
from glissando.config import merge
from glissando.events.processes import table
from glissando.mixers import register_mixer
from glissando.presets import load_preset

TASKS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text())
#: name -> options of the mixer
MODELS: dict[str, dict[str, Any]] = {
    "liquid": {"kind": "liquid", "input": "impulse", "steps": [0.01, 3.0]},
    "delta": {"kind": "delta", "heads": 4, "input": "impulse", "horizons": [1.5, 100.0]},
    "spectral": {"kind": "spectral"},
    "attention": {"kind": "attention", "heads": 2},
    "gru": {"kind": "gru"},
}
#: share that is tested on, and the seed of its choice
_TEST, _SEED = 0.2, 1234


# ---------------------------------------------------------------------- logs


def rows_of(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, rows


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def logs(name: str, data: Path, out: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Options of data to train with, the table to test on, and the options that it is read by."""
    task = TASKS[name]
    train, test = out / f"{name}-train.csv", out / f"{name}-test.csv"
    if "process" in task:
        for path, count, seed in ((train, task["train"], 0), (test, task["test"], 1)):
            if not path.exists():
                path.write_text(table(task["process"], count, seed))
        return {"path": str(train)}, str(test), {}
    header, rows = rows_of(data / task["file"])
    if "kinds" in task:
        places = [header.index(each) for each in task["kinds"]]
        header, rows = [*header, "kind"], [[*row, " ".join(row[at] for at in places)] for row in rows]
    if task["cut"] == "end":
        at = header.index(task["options"]["data"]["time"])
        rows.sort(key=lambda row: row[at])
        first, last = (np.datetime64(rows[place][at].rstrip("Z")) for place in (0, -1))
        cut = str(first + (last - first) * (1 - _TEST)) + "Z"
        write(train, header, [row for row in rows if row[at] <= cut])
        return {"path": str(train)}, write(test, header, rows), {"start": cut}
    group = header.index(task["options"]["data"]["group"])
    names = np.unique([row[group] for row in rows])
    facts, people = rows_of(data / task["static"])
    of_facts = facts.index(task["options"]["data"]["group"])
    names = np.unique([*names, *(row[of_facts] for row in people)])
    chosen = set(np.random.default_rng(_SEED).permutation(names)[: round(_TEST * len(names))].tolist())
    static = [
        write(
            path.with_name(path.stem + "-static.csv"), facts,
            [row for row in people if (row[of_facts] in chosen) == held],
        )
        for path, held in ((train, False), (test, True))
    ]  # fmt: skip
    for path, held in ((train, False), (test, True)):
        write(path, header, [row for row in rows if (row[group] in chosen) == held])
    return {"path": str(train), "static_path": static[0]}, str(test), {"static_path": static[1]}


# ---------------------------------------------------------------------- trainings


def model_of(name: str, parameters: int, prepared: Any, head: dict[str, Any]) -> dict[str, Any]:
    """The options of a model of about so many parameters for a log that is read."""
    from glissando.events.task import build

    def built(options: dict[str, Any]) -> Any:
        return build(options, prepared.encoding, prepared.scales)

    return tuned.of_the_size(parameters, MODELS[name], head, built)


def use_own_clock() -> None:
    """Count the process's own seconds in the training loop, which other processes do not lengthen."""
    from glissando.training import budget, loop

    clock: Any = SimpleNamespace(**{**vars(time), "perf_counter": time.process_time})
    vars(budget)["time"] = vars(loop)["time"] = clock


def trained(task: str, model: str, rate: float, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model."""
    from glissando.events.evaluation import evaluate
    from glissando.events.model import EventModel
    from glissando.events.task import EventsRunConfig, prepare
    from glissando.training.fit import train
    from glissando.training.loop import Hook

    read, test, reading = logs(task, settings.data, settings.out)
    preset = load_preset("delta-events", "events")
    budget = {"seed": seed, "seconds": settings.seconds, "optimizer": {"learning_rate": rate}}
    base = merge(
        EventsRunConfig, {"data": {}}, preset, TASKS[task]["options"], {"data": read}, {"training": budget}
    )  # fmt: skip
    prepared = prepare(EventsRunConfig.read({**base, "model": {}}).data)
    chosen = model_of(model, settings.parameters, prepared, TASKS[task]["options"].get("model", {}))
    config = {**base, "model": chosen}
    with tempfile.TemporaryDirectory(dir=settings.out) as folder:
        # kernels are compiled before the clock runs
        short = {name: value for name, value in base["training"].items() if name != "seconds"} | {"steps": 2}
        train(EventsRunConfig.read({**config, "training": short}), Path(folder) / "short", Hook())
        run = Path(folder) / "run"
        train(EventsRunConfig.read(config), run, Hook())
        summary = json.loads((run / "summary.json").read_text())
        score = evaluate(run, test, reading)
        size = EventModel.load(run).num_parameters()
    return {
        "parameters": size, "steps": summary["steps"], "valid": summary["best"]["valid_loss"], **score.as_dict(),
    }  # fmt: skip


# ---------------------------------------------------------------------- table


def line(values: list[dict[str, Any]]) -> str:
    """The means over seeds: what is missing to the truth, or the log-likelihood, of it time and kind, and accuracy."""
    rows = [one["figures"] for one in values]
    if "truth" in rows[0]:
        shown = [-mean(row["truth"]["model_minus"] for row in rows)]
        shown += [mean(row["truth"][name] - row["model"][name] for row in rows) for name in ("time", "kind")]
    else:
        shown = [mean(row["model"][name] for row in rows) for name in ("log_likelihood", "time", "kind")]
    accuracy = mean(row["model"].get("accuracy", 1.0) for row in rows)
    return (
        f"{values[0]['model']:12} {values[0]['rate']:8g} {values[0]['parameters']:>8,} "
        f"{mean(one['steps'] for one in values):>8,.0f} {len(values):>5} "
        + " ".join(f"{each:10.4f}" for each in shown)
        + f" {accuracy:9.1%}"
    )


def show(task: str, compared: list[list[dict[str, Any]]], seconds: float) -> None:
    """The table of a task: of each model its trainings at the rate that was chosen."""
    figures = compared[0][0]["figures"]
    what = "short of the truth" if "truth" in figures else "log-likelihood"
    print(f"\n{task}, {seconds:g} s a model: {what}, nats an event; of it time, kind; accuracy of the kind")
    for values in compared:
        print(line(values), flush=True)
    for who, row in figures.items():
        if who not in ("model", "truth"):
            print(
                f"{who:12} {'':8} {'':8} {'':8} {'':5} {row['log_likelihood']:10.4f} {row['time']:10.4f} "
                f"{row['kind']:10.4f}"
            )


def figures(out: Path) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Every figure of the models and how far each is from the truth; once a task those of what needs no training."""
    written = set()
    for one in tuned.results(out / "results.jsonl"):
        for who, row in one["figures"].items():
            if who in ("model", "truth") or (one["task"], who) not in written:
                written.add((one["task"], who))
                yield from ((one, (who, figure, row[figure])) for figure in _FIGURES if figure in row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tuned.parser_of(
        "benchmarks.events.compare",
        "Compare mixers and a GRU on logs of events.",
        TASKS,
        MODELS,
        "2.5e-3,5e-3,1e-2",
        20.0,
    )
    settings = parser.parse_args(arguments)
    register_mixer("gru", GRUConfig)(GRU)
    torch.set_num_threads(1)
    settings.out.mkdir(parents=True, exist_ok=True)
    use_own_clock()
    for task in settings.tasks or TASKS:
        models = settings.models.split(",")
        show(task, [list(tuned.compared(task, model, settings, trained)) for model in models], settings.seconds)
    tuned.write_figures(settings.out / "results.csv", ("who", "figure"), figures(settings.out))


#: figures that are written
_FIGURES = (
    "log_likelihood",
    "time",
    "kind",
    "next_time",
    "accuracy",
    "ks",
    "model_minus",
    "model_minus_low",
    "model_minus_high",
)


if __name__ == "__main__":
    main()
