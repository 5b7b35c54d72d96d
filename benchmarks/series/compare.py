"""Mixers and a GRU on the tables of tasks.yaml: `python -m benchmarks.series.compare --data DIR --out DIR [TASK ...]`.

Every model has the same inputs, anchor, head, training loop and budget in seconds of one thread, the preset
`liquid-series` with its mixer replaced, and a width by which its parameters come nearest to the same number. See
benchmarks.tuned for the choice of the learning rate.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from benchmarks import tuned
from benchmarks.series import gaussian, systems
from glissando.config import merge, options
from glissando.mixers import Context, Mixer, register_mixer
from glissando.mixers.base import last_real, placement
from glissando.presets import load_preset
from glissando.series import SeriesModel, example
from glissando.series.answers import measured
from glissando.series.asking import rolling_answers
from glissando.series.forecast import SeriesRun
from glissando.training.budget import Clock

_NAMED: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text())
TASKS = {name: merge({}, _NAMED[task["like"]], task) if "like" in task else task for name, task in _NAMED.items()}
#: name -> options of the mixer
MODELS: dict[str, Any] = {
    "liquid": {"kind": "liquid", "adaptation": 0.9, "coupled": True, "steps": [0.02, 0.7], "turns": "matched"},
    "delta": {"kind": "delta", "heads": 4, "key_size": 8, "horizons": [2, 64]},
    "spectral": {"kind": "spectral"},
    "attention": {"kind": "attention", "heads": 2},
    "gru": {"kind": "gru"},
}
#: share of the groups or rows that is tested on, and the seed of its choice
_TEST, _SEED = 0.15, 1234
_PARTS = {"train": False, "test": True}


@options
class GRUConfig:
    """A GRU has no options."""


class GRU(Mixer):
    """torch.nn.GRU: time is a number that it reads. State: h (B, D)."""

    def __init__(self, hidden_size: int, config: GRUConfig | None = None) -> None:
        super().__init__()
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> Tensor:
        return torch.zeros(batch_size, self.gru.hidden_size, **placement(self, device, dtype))

    def forward(
        self, x: Tensor, state: Tensor | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, Tensor | None]:
        ctx = self.context(ctx)
        y, last = self.gru(x, None if state is None else state.unsqueeze(0).to(x.dtype))
        if state is None:
            return y, None
        return y, last[0].to(state.dtype) if ctx.mask is None else last_real(y, ctx.counts(x), state)


# ---------------------------------------------------------------------- tables


def tables(name: str, data: Path, out: Path) -> tuple[Path, dict[str, Path]]:
    """The CSV that is trained on and those that are tested on, by the name of the test, of the task's own measurements
    alone; the task's own test has no name."""
    task, train = TASKS[name], out / f"{name}-train.csv"
    names = {"": out / f"{name}-test.csv"}
    names |= {test: out / f"{name}-test-{test.replace(' %', '')}.csv" for test in task.get("tests", {})}
    if train.exists() and all(path.exists() for path in names.values()):
        return train, names
    if "system" in task:
        made = task["system"]
        for seed, (path, gap) in enumerate(
            [(train, made["gap"]), *((path, task["tests"].get(test, made)["gap"]) for test, path in names.items())]
        ):
            count = made["series"] if path == train else round(_TEST * made["series"])
            lines = systems.table(made["name"], gap, count, made["length"], seed)
            path.write_text("\n".join(lines) + "\n")
        return train, names
    source = out / f"{name}.csv" if task["file"] is None else data / task["file"]
    if task["file"] is None and not source.exists():
        source.write_text(gaussian.table() if "process" in task else example.table(31, 0))
    with source.open(newline="") as file:
        header, *rows = csv.reader(file)
    rows = [row for row in rows if _measured(task, header, row)]
    if "landmark" in task:
        header, rows = _with_outcome(task, header, rows, data)
    kept, test = _cut(task, header, rows)
    group = header.index(task["options"]["data"]["group"])
    parts = {part: [row for row, use in zip(rows, test == held, strict=True) if use] for part, held in _PARTS.items()}
    if "thinned" in task:
        parts = {part: thinned(each, group, task["thinned"]) for part, each in parts.items()}
    _write(train, header, parts["train"], kept)
    for test_name, path in names.items():
        share = task["tests"][test_name]["dropped"] if test_name else 0.0
        _write(path, header, thinned(parts["test"], group, share), kept)
    return train, names


def thinned(rows: list[list[str]], group: int, share: float) -> list[list[str]]:
    """Rows without so many of them, drawn at random; the first two that are drawn of each group stay."""
    if not share:
        return rows
    order, seen = np.random.default_rng(_SEED).permutation(len(rows)), dict[str, int]()
    certain, others = list[int](), list[int]()
    for number in order:
        name = rows[number][group]
        seen[name] = seen.get(name, 0) + 1
        (certain if seen[name] <= 2 else others).append(int(number))
    stays = np.zeros(len(rows), bool)
    stays[certain + others[: max(0, round((1 - share) * len(rows)) - len(certain))]] = True
    return [row for row, stay in zip(rows, stays, strict=True) if stay]


def _write(path: Path, header: list[str], rows: list[list[str]], kept: list[int]) -> None:
    with path.open("w", newline="") as file:
        written = csv.writer(file)
        written.writerow([header[column] for column in kept])
        written.writerows([row[column] for column in kept] for row in rows)


def _with_outcome(
    task: dict[str, Any], header: list[str], rows: list[list[str]], data: Path
) -> tuple[list[str], list[list[str]]]:
    """The values until the first day of people who were followed longer, with whether they died until the second."""
    landmark, outcome = task["landmark"], dict[str, str]()
    with (data / landmark["people"]).open(newline="") as file:
        for row in csv.DictReader(file):
            followed, died = float(row["futime"]), row["status"] == "1"
            if followed > landmark["until"] or (died and followed > landmark["day"]):
                outcome[row["id"]] = "yes" if died and followed <= landmark["until"] else "no"
    person, day = header.index("id"), header.index("days")
    kept = [cells for cells in rows if cells[person] in outcome and float(cells[day]) <= landmark["day"]]
    return [*header, *task["score"]], [[*cells, outcome[cells[person]]] for cells in kept]


def _measured(task: dict[str, Any], header: list[str], row: list[str]) -> bool:
    """Whether a row of a long table lies within the bounds of what it measures."""
    named = task["options"]["data"]
    if "channel" not in named:
        return True
    low, high = task.get("drop", {}).get(row[header.index(named["channel"])], (-np.inf, np.inf))
    return bool(low <= float(row[header.index(named["value"])]) <= high)


def _cut(task: dict[str, Any], header: list[str], rows: list[list[str]]) -> tuple[list[int], np.ndarray]:
    """The columns that stay, and which rows are tested on."""
    columns, group = list(range(len(header))), header.index(task["options"]["data"]["group"])
    groups = np.array([row[group] for row in rows])
    if task["test"] == "groups":
        names = np.unique(groups)
        chosen = np.random.default_rng(_SEED).permutation(names)[: round(_TEST * len(names))]
        return columns, np.isin(groups, chosen)
    if task["test"] == "end":
        test = np.zeros(len(rows), bool)
        for name in np.unique(groups):
            place = np.flatnonzero(groups == name)
            test[place[round((1 - _TEST) * len(place)) :]] = True
        return columns, test
    column, _, value = task["test"].partition("=")
    part = header.index(column)
    columns.remove(part)
    return columns, np.array([row[part] == value for row in rows])


# ---------------------------------------------------------------------- trainings


def model_of(name: str, parameters: int, prepared: Any, head: dict[str, Any]) -> dict[str, Any]:
    """The options of a model of about so many parameters for a table that is read."""
    from glissando.series.task import build

    return tuned.of_the_size(parameters, MODELS[name], head, lambda options: build(options, prepared))


def trained(task: str, model: str, rate: float, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model: its best validation loss, and its figures beside those without a network."""
    from glissando.series.evaluation import evaluate
    from glissando.series.task import SeriesRunConfig, prepare
    from glissando.training.fit import train
    from glissando.training.loop import Hook

    train_csv, tests = tables(task, settings.data, settings.out)
    preset = load_preset("liquid-series", "series")
    given = merge({}, TASKS[task]["options"], {"data": {"path": str(train_csv)}})
    if "static_path" in given["data"]:
        given["data"]["static_path"] = str(settings.data / given["data"]["static_path"])
    budget = {"seed": seed, "seconds": settings.seconds, "optimizer": {"learning_rate": rate}}
    base = merge(SeriesRunConfig, {"data": {}}, preset, given, {"training": budget})
    if (task, model) not in _CHOSEN:
        _CHOSEN[task, model] = model_of(
            model, settings.parameters, prepare(SeriesRunConfig.read({**base, "model": {}}).data, None),
            {"head": "point", **TASKS[task]["options"].get("model", {})},
        )  # fmt: skip
    config = SeriesRunConfig.read({**base, "model": _CHOSEN[task, model]})
    run = settings.out / f"{task}-{model}-{rate}-{seed}"
    shutil.rmtree(run, ignore_errors=True)  # of a comparison that was ended, or had another budget
    train(config, run, Hook())
    summary = json.loads((run / "summary.json").read_text())
    if "horizons" in TASKS[task]:
        found = dict(at_horizons(run, tests[""], TASKS[task]))
    elif "process" in TASKS[task]:
        found = {name: gaussian.scored(run, path) for name, path in tests.items()}
    else:
        found = {name: evaluate(run, str(path)).as_dict()["targets"] for name, path in tests.items()}
    size = SeriesModel.load(run).num_parameters()
    return {
        "parameters": size, "steps": summary["steps"], "best": summary["best"]["step"],
        "valid": summary["best"]["loss"], "tests": found,
    }  # fmt: skip


def at_horizons(path: Path, table: Path, task: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of forecasts each horizon ahead, from rolling origins."""
    run = SeriesRun.open(path)
    panel = run.read(str(table))
    spans = {name: run.clock().span(text) for name, text in task["horizons"].items()}
    made = rolling_answers(run.model, panel, run.steps(panel), task["origins"], run.data.window, max(spans.values()))
    for name, span in spans.items():
        kept = np.flatnonzero(np.isclose(made.horizon, span))
        yield name, measured(run.model, made.chosen(kept), run.encoding).as_dict()["targets"]


#: options of the model by task and name, for all seeds
_CHOSEN: dict[tuple[str, str], dict[str, Any]] = {}


# ---------------------------------------------------------------------- table


def error(figures: dict[str, dict[str, float]], who: str) -> float:
    """RMSE over that of the training mean, or of classes the accuracy."""
    if "accuracy" in figures[who]:
        return figures[who]["accuracy"]
    return figures[who]["rmse"] / figures["mean"]["rmse"]


def line(name: str, values: list[dict[str, Any]], test: str, channels: list[str], who: str = "model") -> str:
    """The median over seeds, a channel each."""
    cells = [median(error(one["tests"][test][channel], who) for one in values) for channel in channels]
    size = f"{values[0]['parameters']:,}" if who == "model" else ""
    return f"{name:12} {size:>8} " + " ".join(f"{cell:10.4f}" for cell in cells) + f" {mean(cells):10.4f}"


def tests_of(task: dict[str, Any]) -> list[str]:
    return list(task["horizons"]) if "horizons" in task else ["", *task.get("tests", {})]


#: figures that are written, and those of the anchor: a bootstrap interval over series of the model's RMSE less its own
_FIGURES = ("rmse", "nats", "crps", "covered_90%", "accuracy", "auroc", "average_precision", "log_loss")
_LESS = {"anchor": ("model_minus_low", "model_minus_high")}


def figures(out: Path) -> Iterator[tuple[dict[str, Any], Sequence[Any]]]:
    """Every figure of the models, and once of what needs no training, beside the first model of the task."""
    written = set[tuple[Any, ...]]()
    for one in tuned.results(out / "results.jsonl"):
        for test, targets in one["tests"].items():
            for channel, found in targets.items():
                for who, row in found.items():
                    for name in (*_FIGURES, *_LESS.get(who, ())):
                        if name not in row or (same := (one["task"], test, channel, who, name, row[name])) in written:
                            continue
                        yield one, same[1:]
                        if who != "model":
                            written.add(same)


def main(arguments: Sequence[str] | None = None, models: Mapping[str, Any] = MODELS) -> None:
    about = "Compare mixers and a GRU on tables of series."
    parser = tuned.parser_of("benchmarks.series.compare", about, TASKS, models, "3e-3,1e-2", 60.0)
    settings = parser.parse_args(arguments)
    register_mixer("gru", GRUConfig)(GRU)
    MODELS.update(models)
    torch.set_num_threads(1)
    Clock.now = staticmethod(time.process_time)  # whatever else the machine does
    settings.out.mkdir(parents=True, exist_ok=True)
    for task in settings.tasks or TASKS:
        channels, tests = TASKS[task]["score"], tests_of(TASKS[task])
        print(f"\n{task}, {settings.seconds:g} s a model; {' '.join(channels)}, mean", flush=True)
        for model in settings.models.split(","):
            values = list(tuned.compared(task, model, settings, trained))
            for test in tests:
                print(line(f"{model} {test}".strip(), values, test, channels), flush=True)
        for who in ("anchor", "last value", "one period before"):
            for test in tests:
                if all(who in values[0]["tests"][test][channel] for channel in channels):
                    print(line(f"{who} {test}".strip(), values, test, channels, who))
    tuned.write_figures(settings.out / "results.csv", ("test", "channel", "who", "figure"), figures(settings.out))


if __name__ == "__main__":
    main()
