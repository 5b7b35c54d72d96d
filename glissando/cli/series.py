"""glissando series: models of numbers, trained and measured on a CSV or Parquet file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from glissando.cli.options import Options, Parser, choose_threads, parse, require_out, whole
from glissando.cli.tables import (
    SERVING,
    TRAINING,
    USUAL,
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

EXAMPLE = "glissando series train --data.path traces.csv --data.time t --out runs/series"
_USAGE = """glissando series train --data.path FILE --out DIR [options]
       glissando series train --resume RUN
       glissando series evaluate RUN [--file FILE] [--origins 5] [--plots DIR]
       glissando series predict RUN --file FILE --horizon 24h --out FILE
       glissando series serve RUN [--port 8000]
       glissando series export RUN --out FILE.onnx
       glissando series example --out FILE [--count N] [--seed N]"""
#: how another table than that of the training is read
_READING = ("data.static_path", "data.duplicates", "data.delimiter", "data.decimal")
#: the options that --help shows
_COMMON = (
    "--preset", "--config", "--out", "--resume", "--file", "--horizon", "--every", "--quantiles",
    "--json", "--count", "--seed", "--data.path", "--data.time",
    "--data.group", "--data.target", "--data.task", "--model.hidden_size", "--training.epochs",
    "--training.learning_rate",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Train or resume, measure a run, or write an example's CSV."""
    run_action(parse(_parser(), arguments), "series", actions())


def _parser() -> Parser:
    from glissando.series import SeriesConfig, SeriesData
    from glissando.training.config import TrainingConfig

    parser = table_parser(
        Parser("series", "Train a model of numbers on a CSV or Parquet file, and measure it.", EXAMPLE, _USAGE),
        "train, evaluate, predict, serve, export, or example, which writes oscillators at uneven times",
        "liquid-series (default) or attention-series",
        "for predict: number of joint paths to draw",
        {"data": SeriesData, "model": SeriesConfig, "training": TrainingConfig},
    )
    future = "for predict: known-future columns at the times to forecast"
    parser.add_argument("--future", future, metavar="FILE")
    parser.add_argument("--origins", "for evaluate: forecasts from this many times of each series", whole)
    parser.set_defaults(count=31)
    parser.common = _COMMON
    return parser


def _export(options: Options) -> None:
    """One step of the run as a graph: an observation in, forecasts out."""
    from glissando.export import PHASES
    from glissando.export.series import export_series
    from glissando.progress import phases
    from glissando.series.forecast import SeriesRun

    require_out(options, "name the file to write, such as --out forecast.onnx")
    if Path(options.out).suffix != ".onnx":
        raise ConfigError(f"--out is {options.out}: give the name of a file that ends in .onnx")
    choose_threads(options, *USUAL)
    with phases(PHASES["onnx"]) as begin:
        exported = export_series(SeriesRun.open(options.run), options.out, begin)
    print("\n".join(exported.lines()))
    print(f"exported: {options.out}", file=sys.stderr)


def _example(options: Options) -> None:
    from glissando.series.example import table

    out = write_example(options, lambda: table(options.count, options.seed))
    print(
        f"{out}: {options.count} series of 700 steps; train on it: glissando series train "
        f"--data.path {shlex.quote(str(out))} --data.time t --data.group series --out runs/series"
    )


def actions() -> Actions:
    """What each action does, and its options."""
    from glissando.series.evaluation import evaluate
    from glissando.series.forecast import SeriesRun, predict, require_answerable
    from glissando.series.task import SeriesRunConfig

    def measure(options: Options) -> None:
        if options.horizon is not None and options.origins is None:
            raise ConfigError("--horizon is of forecasts from rolling origins: add --origins 5, or leave it out")
        inside = "" if options.origins is None else "origins"
        more = {name: getattr(options, name) for name in ("out", "origins", "horizon")}
        evaluate_run(options, evaluate, inside, **more)

    asked = ("horizon", "quantiles", "every", "samples", "future")
    return {
        "train": (lambda options: train_on_table(options, SeriesRunConfig), TRAINING),
        "evaluate": (measure, ("file", "origins", "horizon", "out", "plots", "json", "threads", "import", *_READING)),
        "predict": (
            lambda options: write_answers(options, SeriesRun, require_answerable, predict, *asked),
            (*asked, "file", "seed", "out", "threads", "import", *_READING),
        ),
        "serve": (lambda options: serve_table(options, SeriesRun, "observations"), SERVING),
        "export": (_export, ("out", "threads", "import")),
        "example": (_example, ("out", "count", "seed")),
    }
