"""What `glissando series` and `glissando events` share: training on a table, serving a run of one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from glissando.cli.options import Options, Parser, at_least, choose_threads, numbers, require_out, whole
from glissando.cli.serve import port, size
from glissando.cli.train import resume_run
from glissando.config import hints_of, merge
from glissando.errors import ConfigError, unknown_name
from glissando.presets import load_preset
from glissando.yaml_files import read_options

#: rows and width of activations for which threads are chosen
USUAL = (1024, 64)
#: the options of training, and of serving
TRAINING = ("preset", "config", "out", "resume", "threads", "import")
SERVING = ("host", "port", "memory", "threads", "import")

#: action -> what it does, and its plain options; the dotted ones are for training
Actions = Mapping[str, tuple[Callable[[Options], None], tuple[str, ...]]]


def table_parser(parser: Parser, action: str, preset: str, samples: str, types: Mapping[str, Any]) -> Parser:
    """Add the options that both commands have: what is said of three of them, and the types of the sections."""
    add = parser.add_argument
    add("action", action)
    add("run", "for all but train and example: run directory, or one of its checkpoints", nargs="?")
    add("--preset", f"for train: {preset}")
    add("--config", "for train: YAML file of options", metavar="FILE")
    add("--out", "for train: run directory to create; otherwise the file to write")
    add("--resume", "for train: run to continue", metavar="RUN")
    add("--file", "for evaluate: a table to score, all of it; otherwise the one that ends where prediction begins")
    add("--horizon", "how far to predict: 24h, or a number in the times' unit", metavar="SPAN")
    add("--every", "for predict: also at each such step up to the horizon", metavar="SPAN")
    add("--quantiles", "for predict: 0.1,0.5,0.9", numbers, [], metavar="LEVELS")
    add("--samples", samples, whole, 0)
    add("--plots", "for evaluate: where pictures go; by default into the run", metavar="DIR")
    add("--json", "for evaluate: print JSON", action="store_true")
    add("--count", "for example: number of series", at_least(1), 40)
    add("--seed", "of an example, and of what is drawn", at_least(0), 0)
    add("--host", "for serve: address to listen on, by default this machine", default="127.0.0.1")
    add("--port", "for serve: port, 8000 by default, or a free one where that is taken; 0: a free one", port)
    add("--memory", "for serve: of the states of all series", size, "256MiB", metavar="SIZE")
    parser.add_shared("threads", "import")
    parser.sections = types
    return parser


def run_action(options: Options, command: str, actions: Actions) -> None:
    """Do what is asked for. Raise ConfigError for an action that the command has not, an option that is not the
    action's, and a run that is missing or too many."""
    if options.action not in actions:
        raise unknown_name("action", options.action, actions)
    action, taken = actions[options.action]
    for name in options.given:
        dotted = name.partition(".")[0] in ("model", "data", "training")
        if name not in taken and not (dotted and options.action == "train"):
            raise ConfigError(f"--{name} is not an option of `{command} {options.action}`: leave it out")
    if (options.run is None) == (options.action not in ("train", "example")):
        raise ConfigError(
            f"`{command} {options.action}` needs a run directory: name it"
            if options.run is None
            else f"`{command} {options.action}` takes no {options.run!r}: leave it out"
        )
    action(options)


def train_on_table(options: Options, kind: Any) -> None:
    """Train a new run, or resume one; kind: the class of its configuration."""
    from glissando.allocator import prepare_to_train
    from glissando.imports import imported
    from glissando.run_files import text_options
    from glissando.training.fit import train

    if options.resume is not None:
        data = hints_of(kind)["data"]
        tables = [name for name in text_options() if hasattr(data, name.removeprefix("data."))]
        resume_run(options, tables, USUAL, kind=kind)
        return
    prepare_to_train()
    require_out(options, f"name the run directory to make, such as --out runs/{kind.kind}")
    file = {} if options.config is None else dict(read_options(options.config, f"--config {options.config}"))
    preset = options.preset or file.get("preset") or f"liquid-{kind.kind}"
    chosen = load_preset(preset, kind.kind)
    last = {"preset": preset, "imports": imported()}
    config = kind.read(merge(kind, chosen, file, options.sections, last))
    choose_threads(options, *USUAL)
    train(config, options.out)


def evaluate_run(options: Options, evaluate: Callable[..., Any], inside: str = "", **more: Any) -> None:
    """Print how good a run is, with pictures in --plots, or in the folder `inside` the run."""
    choose_threads(options, *USUAL)
    reading = options.sections.get("data", {})
    if reading and options.file is None:
        raise ConfigError(f"--data.{next(iter(reading))} is of another table: add --file FILE, or leave it out")
    plots = options.plots or _place_of_plots(options.run, options.file, inside)
    score = evaluate(options.run, options.file, reading=reading, pictures=plots, **more)
    print(json.dumps(score.as_dict(), indent=2) if options.json else score.table())
    if plots is None:
        print(f"no pictures were drawn into {options.run}: name a place for them with --plots DIR", file=sys.stderr)


def _place_of_plots(run: str, file: str | None, inside: str) -> Path | None:
    """In the run; of another table in a folder there; None where the run is not the user's."""
    from glissando.pretrained import packaged_name
    from glissando.runs import Run

    folder = Run.open(run).path
    if packaged_name(folder) or not os.access(folder, os.W_OK):
        return None
    return folder / (Path(file).stem if file is not None else "") / inside


def write_answers(
    options: Options, kind: Any, require_answerable: Callable[..., None], answer: Callable[..., Any], *names: str
) -> None:
    """Write the table of what a run answers about a table.

    Args:
        options: Of the command.
        kind: The class of the run.
        require_answerable: Raises for options that it cannot serve, before a large table is read.
        answer: Makes the table.
        *names: Options that both take.
    """
    from glissando.sampling import require_seed
    from glissando.series.forecast import require_absent, write_table
    from glissando.series.tables import counted

    if options.file is None:
        raise ConfigError("--file is missing: name the table that ends where prediction begins")
    require_out(options, f"name the CSV to write, such as --out {options.action}.csv")
    require_absent(options.out)
    choose_threads(options, *USUAL)
    run = kind.open(options.run).reading(options.sections.get("data", {}))
    asked = {name: getattr(options, name) for name in names}
    require_answerable(run, **asked)
    require_seed(options.seed)
    read = run.read(options.file)
    for line in read.report:
        print(line, file=sys.stderr)
    table = answer(run, read, seed=options.seed, **asked)
    write_table(table, options.out)
    print(f"{options.out}: {counted(len(table), 'row')} of {len(read.names):,} series")


def write_example(options: Options, table: Callable[[], str]) -> Path:
    """Write a generated table to --out, where nothing is yet."""
    from glissando.series.forecast import require_absent
    from glissando.storage import write_atomic

    require_out(options, "name the CSV to write, such as --out example.csv")
    out = require_absent(options.out)
    write_atomic(out, table().encode())
    return out


def serve_table(options: Options, run: Any, what: str) -> None:
    """HTTP: observations in, what follows out.

    Args:
        options: Of the command.
        run: The class of the run.
        what: Is sent to the server, for people.
    """
    from glissando.cli.serve import access, listen, missing, port_of

    try:
        from glissando.serving.tables import server_of
    except ModuleNotFoundError as error:
        raise missing(error) from error
    keys, hosts = access(options.host)
    choose_threads(options, *USUAL)
    name = Path(options.run).resolve().name
    server = server_of(run.open(options.run), name, memory=options.memory, api_key=keys, hosts=hosts)
    about = f"POST {what} to /v1/observe; GET /v1/series describes them"
    listen(server.config(host=options.host, port=port_of(options)), server.name, server.close, about)
