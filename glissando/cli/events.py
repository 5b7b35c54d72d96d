"""glissando events: models of logs, trained and measured on a CSV or Parquet file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from glissando.cli.options import (
    Options,
    Parser,
    add_import_option,
    add_threads_option,
    choose_threads,
    numbers,
    parse,
    require_out,
    whole,
)
from glissando.cli.tables import (
    SERVING,
    USUAL,
    add_serving_options,
    place_of_plots,
    require_action,
    serve_table,
    train_on_table,
    write_example,
)
from glissando.errors import ConfigError

EXAMPLE = "glissando events train --data.path log.csv --data.group id --data.time t --data.kind event --out runs/events"
_USAGE = """glissando events train --data.path FILE --data.time T --out DIR
       glissando events train --resume RUN
       glissando events evaluate RUN [--file FILE] [--plots DIR]
       glissando events predict RUN --file FILE --horizon 30d --out FILE
       glissando events sample RUN --file LOG --horizon 9d --samples 9 --out CSV
       glissando events serve RUN [--port 8000]
       glissando events example --process NAME --out FILE [--count N] [--seed N]"""
#: a run's tables, which may have moved before it is resumed
_TABLES = ("data.path", "data.valid_path", "data.static_path", "data.values_path")
#: how another table than that of the training is read
_READING = ("data.static_path", "data.values_path", "data.start", "data.end", "data.delimiter")
_COMMON = (
    "--preset", "--out", "--resume", "--threads", "--data.path", "--data.time", "--data.group", "--data.kind",
    "--data.start", "--data.end", "--model.head", "--training.epochs", "--training.learning_rate",
)  # fmt: skip
#: actions whose first argument is a run
_OF_RUN = ("evaluate", "predict", "sample", "serve")
#: action -> its plain options; the dotted ones are for training
ACTIONS = {
    "train": ("preset", "config", "out", "resume", "threads", "import"),
    "evaluate": ("file", "plots", "json", "threads", "import", *_READING),
    "predict": ("file", "horizon", "every", "quantiles", "samples", "seed", "out", "threads", "import", *_READING),
    "sample": ("file", "horizon", "samples", "seed", "out", "threads", "import", *_READING),
    "serve": SERVING,
    "example": ("process", "out", "count", "seed"),
}


def main(arguments: Sequence[str]) -> None:
    """Train or resume, measure or serve a run, say what may come, or write an example's CSV."""
    options = parse(_parser(), arguments)
    require_action(options, "events", ACTIONS, of_runs=_OF_RUN)
    actions = {
        "train": _train, "evaluate": _evaluate, "predict": _predict, "sample": _sample, "serve": _serve,
        "example": _example,
    }  # fmt: skip
    actions[options.action](options)


def _parser() -> Parser:
    from glissando.events.model import EventConfig
    from glissando.events.options import EventsData
    from glissando.training.config import TrainingConfig

    parser = Parser("events", "Train a model of a log of events, and measure it.", EXAMPLE, _USAGE)
    parser.add_argument("action", help="train, evaluate, predict, sample (simulated futures), serve, or example")
    parser.add_argument(
        "run", nargs="?", help="for all but train and example: run directory, or one of its checkpoints"
    )
    parser.add_argument("--preset", help="for train: liquid-events (default), delta-, spectral- or attention-events")
    parser.add_argument("--config", metavar="FILE", help="for train: YAML file of options")
    parser.add_argument("--out", help="for train: run directory to create; otherwise the CSV file to write")
    parser.add_argument("--resume", metavar="RUN", help="for train: run to continue")
    parser.add_argument("--file", help="for evaluate: a log to score, all of it; otherwise the log to go on from")
    parser.add_argument("--horizon", metavar="SPAN", help="how far to predict: 30d, or a number in the times' unit")
    parser.add_argument("--every", metavar="SPAN", help="for predict: also at each such step up to the horizon")
    parser.add_argument("--samples", type=whole, default=0, help="number of simulated futures of each series")
    parser.add_argument("--quantiles", type=numbers, default=[], metavar="LEVELS", help="for predict: 0.1,0.9")
    parser.add_argument("--plots", metavar="DIR", help="for evaluate: where pictures go; by default into the run")
    parser.add_argument("--json", action="store_true", help="for evaluate: print JSON")
    parser.add_argument("--process", default="hawkes5", help="for example: what `glissando corpora hawkes` lists")
    parser.add_argument("--count", type=whole, default=40, help="for example: number of series")
    parser.add_argument("--seed", type=whole, default=0, help="of an example, or of futures")
    add_serving_options(parser)
    add_threads_option(parser)
    add_import_option(parser)
    sections = {"data": EventsData, "model": EventConfig, "training": TrainingConfig}
    parser.add_sections(tuple(sections), lambda: sections)
    parser.common = _COMMON
    return parser


def _train(options: Options) -> None:
    from glissando.events.task import EventsRunConfig

    train_on_table(options, EventsRunConfig, "events", "liquid-events", _TABLES)


def _evaluate(options: Options) -> None:
    from glissando.events.evaluation import evaluate

    choose_threads(options, *USUAL)
    reading = options.sections.get("data", {})
    if reading and options.file is None:
        raise ConfigError(f"--data.{next(iter(reading))} is of another table: add --file FILE, or leave it out")
    plots = options.plots or place_of_plots(options.run, options.file)
    found = evaluate(options.run, options.file, reading, plots)
    for line in found.lines:
        print(line, file=sys.stderr)
    print(json.dumps(found.score.as_dict(), indent=2) if options.json else found.score.table())
    if plots is None:
        print(f"no pictures were drawn into {options.run}: name a place for them with --plots DIR", file=sys.stderr)


def _predict(options: Options) -> None:
    """A CSV of hazards, survival and probabilities."""
    from glissando.events.forecast import predict

    _write(options, predict, "every", "quantiles")


def _sample(options: Options) -> None:
    """A CSV of simulated futures."""
    from glissando.events.forecast import sample

    if options.samples < 1:
        raise ConfigError("--samples is missing: give the number of futures of each series, such as 20")
    _write(options, sample)


def _write(options: Options, compute: Callable[..., Any], *more: str) -> None:
    """The table that is computed of a log; more: options that it takes beside."""
    from glissando.events.forecast import require_answerable
    from glissando.events.task import EventRun
    from glissando.series.forecast import require_absent, write_table
    from glissando.series.tables import counted

    if options.file is None:
        raise ConfigError("--file is missing: name the log whose future is asked for")
    require_out(options, f"name the CSV to write, such as --out {options.action}.csv")
    require_absent(options.out)
    choose_threads(options, *USUAL)
    run = EventRun.open(options.run).reading(options.sections.get("data", {}))
    asked = {"horizon": options.horizon, "samples": options.samples} | {name: getattr(options, name) for name in more}
    require_answerable(run, **asked)  # before a large table is read
    log = run.read(options.file)
    for line in log.report:
        print(line, file=sys.stderr)
    found = compute(run, log, seed=options.seed, **asked)
    write_table(found, options.out)
    print(f"{options.out}: {counted(len(found), 'row')} of {len(log.names):,} series")


def _serve(options: Options) -> None:
    """HTTP: events in, hazards out."""
    from glissando.events.task import EventRun

    serve_table(options, EventRun, "events")


def _example(options: Options) -> None:
    from glissando.events.example import table
    from glissando.events.processes import process_of

    end = process_of(options.process).end
    out = write_example(options, lambda: table(options.process, options.count, options.seed))
    print(
        f"{out}: {options.count} series of about 250 events; train on it: glissando events train "
        f"--data.path {shlex.quote(str(out))} --data.group series --data.time time --data.kind kind --data.start 0 "
        f"--data.end {end:g} --out runs/events"
    )
