"""glissando series: models of numbers, trained and measured on a CSV or Parquet file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

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

EXAMPLE = "glissando series train --data.path traces.csv --data.time t --out runs/series"
_USAGE = """glissando series train --data.path FILE --out DIR [options]
       glissando series train --resume RUN
       glissando series evaluate RUN [--file FILE] [--origins 5] [--plots DIR]
       glissando series predict RUN --file FILE --horizon 24h --out FILE
       glissando series serve RUN [--port 8000]
       glissando series export RUN --out FILE.onnx
       glissando series example --out FILE [--count N] [--seed N]"""
#: a run's tables, which may have moved before it is resumed
_TABLES = ("data.path", "data.valid_path", "data.static_path")
#: how another table than that of the training is read
_READING = ("data.static_path", "data.duplicates", "data.delimiter")
#: the options that --help shows
_COMMON = (
    "--preset", "--config", "--out", "--resume", "--file", "--horizon", "--every", "--quantiles",
    "--json", "--count", "--seed", "--data.path", "--data.time",
    "--data.group", "--data.target", "--data.task", "--model.hidden_size", "--training.epochs",
    "--training.learning_rate",
)  # fmt: skip
#: actions whose first argument is a run
_OF_RUN = ("evaluate", "predict", "serve", "export")
#: action -> its plain options; the dotted ones are for training
ACTIONS = {
    "train": ("preset", "config", "out", "resume", "threads", "import"),
    "evaluate": ("file", "origins", "horizon", "out", "plots", "json", "threads", "import", *_READING),
    "predict": (
        "file", "horizon", "every", "quantiles", "samples", "future", "seed", "out", "threads", "import", *_READING,
    ),
    "serve": SERVING,
    "export": ("out", "threads", "import"),
    "example": ("out", "count", "seed"),
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Train or resume, measure a run, or write an example's CSV."""
    options = parse(_parser(), arguments)
    require_action(options, "series", ACTIONS, of_runs=_OF_RUN)
    actions = {
        "train": _train, "evaluate": _evaluate, "predict": _predict, "serve": _serve, "export": _export,
        "example": _example,
    }  # fmt: skip
    actions[options.action](options)


def _parser() -> Parser:
    from glissando.series import SeriesConfig, SeriesData
    from glissando.training.config import TrainingConfig

    parser = Parser("series", "Train a model of numbers on a CSV or Parquet file, and measure it.", EXAMPLE, _USAGE)
    parser.add_argument(
        "action", help="train, evaluate, predict, serve, export, or example, which writes oscillators at uneven times"
    )
    parser.add_argument(
        "run", nargs="?", help="for all but train and example: run directory, or one of its checkpoints"
    )
    parser.add_argument("--preset", help="for train: liquid-series (default) or attention-series")
    parser.add_argument("--config", metavar="FILE", help="for train: YAML file of options")
    parser.add_argument("--out", help="for train: run directory to create; otherwise the CSV or ONNX file to write")
    parser.add_argument("--resume", metavar="RUN", help="for train: run to continue")
    parser.add_argument("--file", help="for predict: the table; for evaluate: a table to score, all of it")
    parser.add_argument("--horizon", metavar="SPAN", help="how far to forecast: 24h, or a number in the times' unit")
    parser.add_argument("--every", metavar="SPAN", help="for predict: forecast at each such step up to the horizon")
    parser.add_argument("--quantiles", type=numbers, default=[], metavar="LEVELS", help="for predict: 0.1,0.5,0.9")
    parser.add_argument("--samples", type=whole, default=0, help="for predict: number of joint paths to draw")
    parser.add_argument("--future", metavar="FILE", help="for predict: known-future columns at the times to forecast")
    parser.add_argument("--origins", type=whole, help="for evaluate: forecasts from this many times of each series")
    parser.add_argument("--plots", metavar="DIR", help="for evaluate: where pictures go; by default into the run")
    parser.add_argument("--json", action="store_true", help="for evaluate: print JSON")
    parser.add_argument("--count", type=whole, default=31, help="for example: number of series")
    parser.add_argument("--seed", type=whole, default=0, help="for example and for predict's paths: the seed")
    add_serving_options(parser)
    add_threads_option(parser)
    add_import_option(parser)
    sections = {"data": SeriesData, "model": SeriesConfig, "training": TrainingConfig}
    parser.add_sections(tuple(sections), lambda: sections)
    parser.common = _COMMON
    return parser


def _train(options: Options) -> None:
    from glissando.series.task import SeriesRunConfig

    train_on_table(options, SeriesRunConfig, "series", "liquid-series", _TABLES)


def _evaluate(options: Options) -> None:
    from glissando.series.evaluation import evaluate

    choose_threads(options, *USUAL)
    if options.horizon is not None and options.origins is None:
        raise ConfigError("--horizon is of forecasts from rolling origins: add --origins 5, or leave it out")
    reading = options.sections.get("data", {})
    if reading and options.file is None:
        raise ConfigError(f"--data.{next(iter(reading))} is of another table: add --file FILE, or leave it out")
    plots = options.plots or place_of_plots(options.run, options.file)
    if options.plots is None and plots is not None and options.origins is not None:
        plots = Path(plots) / "origins"
    found = evaluate(options.run, options.file, options.out, plots, options.origins, options.horizon, reading)
    print(json.dumps(found.as_dict(), indent=2) if options.json else found.score.table())
    if plots is None:
        print(f"no pictures were drawn into {options.run}: name a place for them with --plots DIR", file=sys.stderr)


def _predict(options: Options) -> None:
    """A CSV of forecasts, or of what the run predicts of each step or series."""
    from glissando.series.forecast import SeriesRun, predict, require_absent, require_answerable, write_table
    from glissando.series.tables import counted

    if options.file is None:
        raise ConfigError("--file is missing: name the table that ends where the forecast begins")
    require_out(options, "name the CSV to write, such as --out forecast.csv")
    require_absent(options.out)
    choose_threads(options, *USUAL)
    run = SeriesRun.open(options.run).reading(options.sections.get("data", {}))
    asked = {"horizon": options.horizon, "quantiles": options.quantiles, "every": options.every}
    asked |= {"samples": options.samples, "future": options.future, "seed": options.seed}
    require_answerable(run, **asked)  # before a large table is read
    panel = run.read(options.file)
    for line in panel.report:
        print(line, file=sys.stderr)
    found = predict(run, panel, **asked)
    write_table(found, options.out)
    print(f"{options.out}: {counted(len(found), 'row')} of {len(panel.names):,} series")


def _serve(options: Options) -> None:
    """HTTP: observations in, forecasts out."""
    from glissando.series.forecast import SeriesRun

    serve_table(options, SeriesRun, "observations")


def _export(options: Options) -> None:
    """One step of the run as a graph: an observation in, forecasts out."""
    from glissando.export.series import export_series
    from glissando.series.forecast import SeriesRun

    require_out(options, "name the file to write, such as --out forecast.onnx")
    if Path(options.out).suffix != ".onnx":
        raise ConfigError(f"--out is {options.out}: give the name of a file that ends in .onnx")
    choose_threads(options, *USUAL)
    found = export_series(SeriesRun.open(options.run), options.out)
    print("\n".join(found.lines()))
    print(f"exported: {options.out}", file=sys.stderr)


def _example(options: Options) -> None:
    from glissando.series.example import table

    out = write_example(options, lambda: table(options.count, options.seed))
    print(
        f"{out}: {options.count} series of 700 steps; train on it: glissando series train "
        f"--data.path {shlex.quote(str(out))} --data.time t --data.group series --out runs/series"
    )
