"""What `glissando series` and `glissando events` share: training on a table, serving a run of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from glissando.cli.options import Options, Parser, choose_threads, require_out, whole
from glissando.config import flat, merge
from glissando.errors import ConfigError, RunError, nearest
from glissando.presets import load_preset
from glissando.yaml_files import read_options

#: rows and width of activations for which threads are chosen
USUAL = (1024, 64)
#: the options of serving
SERVING = ("host", "port", "memory", "threads", "import")


def require_action(
    options: Options, command: str, actions: dict[str, tuple[str, ...]], of_runs: Collection[str]
) -> None:
    """Raise ConfigError for an action that the command has not, an option that is not the action's, and a run that is
    missing or too many.

    actions  action -> its plain options; the dotted ones are for training
    of_runs  the actions that take a run
    """
    if options.action not in actions:
        close = nearest(options.action, actions)
        raise ConfigError(
            f"action {options.action!r} is none of {', '.join(actions)}"
            + (f". Did you mean {close!r}?" if close else "")
        )
    for name in options.given:
        dotted = name.partition(".")[0] in ("model", "data", "training")
        if name not in actions[options.action] and not (dotted and options.action == "train"):
            raise ConfigError(f"--{name} is not an option of `{command} {options.action}`: leave it out")
    if (options.run is None) == (options.action in of_runs):
        raise ConfigError(
            f"`{command} {options.action}` needs a run directory: name it"
            if options.run is None
            else f"`{command} {options.action}` takes no {options.run!r}: leave it out"
        )


def train_on_table(options: Options, kind: Any, folder: str, usual: str, tables: Collection[str]) -> None:
    """Train a new run, or resume one.

    Args:
        options: Of the command.
        kind: The class of the run's configuration.
        folder: Of the presets.
        usual: The preset where none is named.
        tables: Options that name the run's tables, which may have moved before it is resumed.
    """
    from glissando.allocator import prepare_to_train
    from glissando.imports import imported
    from glissando.threads import threads_of
    from glissando.training.config import MACHINE
    from glissando.training.fit import resume, train
    from glissando.training.mirroring import place_of

    prepare_to_train()
    if options.resume is not None:
        machine = [f"training.{name}" for name in MACHINE]
        taken = ("resume", "threads", "import", *tables, *machine)
        if others := [name for name in options.given if name not in taken]:
            raise ConfigError(
                f"--resume continues exactly as {options.resume} was trained, and takes only options of the machine "
                f"and the new place of its tables, --{' and --'.join(tables)}; leave --{others[0]} out"
            )
        choose_threads(options, *USUAL, before=threads_of(place_of(options.resume, resumed=True)[0]))
        moved = flat({"data": options.sections.get("data", {})})
        resume(options.resume, options.sections.get("training", {}), texts=moved, kind=kind)
        return
    require_out(options, f"name the run directory to make, such as --out runs/{folder}")
    file = {} if options.config is None else dict(read_options(options.config, f"--config {options.config}"))
    preset = options.preset or file.get("preset") or usual
    chosen = load_preset(preset, folder)
    last = {"preset": preset, "imports": imported()}
    config = kind.read(merge(kind, chosen, file, options.sections, last))
    choose_threads(options, *USUAL)
    train(config, options.out)


def place_of_plots(run: str, file: str | None) -> Path | None:
    """In the run; of another table in a folder there; None where the run is not the user's."""
    from glissando.pretrained import packaged_name
    from glissando.runs import Run

    folder = Run.open(run).path
    if packaged_name(folder) or not os.access(folder, os.W_OK):
        return None
    return folder if file is None else folder / Path(file).stem


def write_example(options: Options, table: Callable[[], str]) -> Path:
    """Write a generated table to --out, where nothing is yet; --count and --seed are checked before it is made."""
    from glissando.storage import write_atomic

    require_out(options, "name the CSV to write, such as --out example.csv")
    out = Path(options.out).expanduser()
    if out.exists():
        raise RunError(f"{out} exists; nothing is overwritten: choose another --out")
    for name, least in (("count", 1), ("seed", 0)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"--{name} is {value}: give {least} or more")
    write_atomic(out, table().encode())
    return out


def add_serving_options(parser: Parser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="for serve: address to listen on, by default this machine")
    parser.add_argument("--port", type=whole, default=8000, help="for serve: port; 0 chooses a free one")
    parser.add_argument("--memory", metavar="SIZE", default="256MiB", help="for serve: of the states of all series")


def serve_table(options: Options, run: Any, what: str) -> None:
    """HTTP: observations in, what follows out.

    Args:
        options: Of the command.
        run: The class of the run.
        what: Is sent to the server, for people.
    """
    from glissando.cli.serve import access, listen, missing, size_of

    try:
        from glissando.serving.tables import server_of
    except ModuleNotFoundError as error:
        raise missing(error) from error
    if options.port < 0:
        raise ConfigError(f"--port must be at least 0, got {options.port}")
    memory = size_of(options.memory)
    keys, hosts = access(options.host)
    choose_threads(options, *USUAL)
    name = Path(options.run).resolve().name
    server = server_of(run.open(options.run), name, memory=memory, api_key=keys, hosts=hosts)
    about = f"POST {what} to /v1/observe; GET /v1/series describes them"
    listen(server.config(host=options.host, port=options.port), server.name, server.close, about)
