"""glissando events: models of logs, trained and measured on a CSV or Parquet file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from glissando.cli.options import Options, Parser, parse
from glissando.cli.tables import (
    SERVING,
    TRAINING,
    Actions,
    evaluate_run,
    run_action,
    serve_table,
    table_parser,
    train_on_table,
    write_answers,
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
#: how another table than that of the training is read
_READING = ("data.static_path", "data.values_path", "data.start", "data.end", "data.delimiter", "data.decimal")
_COMMON = (
    "--preset", "--out", "--resume", "--threads", "--data.path", "--data.time", "--data.group", "--data.kind",
    "--data.start", "--data.end", "--model.head", "--training.epochs", "--training.learning_rate",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Train or resume, measure or serve a run, say what may come, or write an example's CSV."""
    run_action(parse(_parser(), arguments), "events", actions())


def _parser() -> Parser:
    from glissando.events.model import EventConfig
    from glissando.events.options import EventsData
    from glissando.events.processes import PROCESSES
    from glissando.training.config import TrainingConfig

    parser = table_parser(
        Parser("events", "Train a model of a log of events, and measure it.", EXAMPLE, _USAGE),
        "train, evaluate, predict, sample (simulated futures), serve, or example",
        "liquid-events (default), delta-, spectral- or attention-events",
        "number of simulated futures of each series",
        {"data": EventsData, "model": EventConfig, "training": TrainingConfig},
    )
    listed = "; ".join(f"{name}, a {process.about}" for name, process in PROCESSES.items())
    parser.add_argument("--process", f"for example: {listed}", default="hawkes5")
    parser.common = _COMMON
    return parser


def _example(options: Options) -> None:
    from glissando.events.processes import process_of, table

    end = process_of(options.process).end
    out = write_example(options, lambda: table(options.process, options.count, options.seed))
    print(
        f"{out}: {options.count} series of about 250 events; train on it: glissando events train "
        f"--data.path {shlex.quote(str(out))} --data.group series --data.time time --data.kind kind --data.start 0 "
        f"--data.end {end:g} --out runs/events"
    )


def actions() -> Actions:
    """What each action does, and its options."""
    from glissando.events.evaluation import evaluate
    from glissando.events.forecast import predict, require_answerable, sample
    from glissando.events.task import EventRun, EventsRunConfig

    def simulate(options: Options) -> None:
        if options.samples < 1:
            raise ConfigError("--samples is missing: give the number of futures of each series, such as 20")
        write_answers(options, EventRun, require_answerable, sample, "horizon", "samples")

    asked = ("horizon", "samples", "every", "quantiles")
    written = ("file", "horizon", "samples", "seed", "out", "threads", "import", *_READING)
    return {
        "train": (lambda options: train_on_table(options, EventsRunConfig), TRAINING),
        "evaluate": (
            lambda options: evaluate_run(options, evaluate),
            ("file", "plots", "json", "threads", "import", *_READING),
        ),
        "predict": (
            lambda options: write_answers(options, EventRun, require_answerable, predict, *asked), (*asked, *written),
        ),
        "sample": (simulate, written),
        "serve": (lambda options: serve_table(options, EventRun, "events"), SERVING),
        "example": (_example, ("process", "out", "count", "seed")),
    }  # fmt: skip
