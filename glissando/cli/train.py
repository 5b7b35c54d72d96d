"""glissando train: a preset, a corpus and a budget into a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.cli.options import (
    Options,
    Parser,
    add_import_option,
    parse,
    parser_for,
    require_out,
    require_own_held_out,
)
from glissando.config import flat, from_dict, hints_of, merge, read_options, to_dict, unregistered
from glissando.errors import ConfigError
from glissando.imports import imported
from glissando.presets import load_preset
from glissando.training.config import BUDGETS, MACHINE, RunConfig

EXAMPLE = (
    "glissando train --preset transformer-nano --data.kind text --data.path book.txt "
    "--training.tokens 2000000 --out runs/book"
)
_USAGE = (
    "glissando train --preset NAME --out DIR [options]\n       glissando train --from RUN --out DIR [options]\n"
    "       glissando train --resume DIR"
)
#: options of a corpus's files, which may have moved before a run is resumed
_TEXTS = ("data.path", "data.valid_path")


def main(arguments: Sequence[str]) -> None:
    """Train, or with --resume go on."""
    options = parse(_parser(), arguments)
    if options.resume is not None:
        _resume(options)
        return
    config = _config(options)
    if options.print_config:
        import yaml

        print(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    require_out(options, "name the run directory to make, such as --out runs/first")
    from glissando.allocator import keep_freed_memory
    from glissando.stages import train_stages
    from glissando.training.fit import train

    keep_freed_memory()
    if config.stages:
        train_stages(config, options.out)
    else:
        train(config, options.out)


def _parser() -> Parser:
    parser = parser_for("train", "Train a model into a run directory.", EXAMPLE, _USAGE)
    parser.add_argument("--preset", help="a system with its habits of training; see glissando presets")
    parser.add_argument("--out", metavar="DIR", help="run directory to make")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line comes after it")
    parser.add_argument(
        "--from", dest="start_from", metavar="RUN", help="run whose weights, tokenizer and options to start with"
    )
    parser.add_argument(
        "--resume", metavar="RUN", help="run to go on with; beside it only options of the machine, and of moved texts"
    )
    parser.add_argument("--print_config", action="store_true", help="print the resolved options and stop")
    add_import_option(parser)
    add_sections(parser)
    return parser


def add_sections(parser: Parser) -> None:
    """The options of a run's sections."""
    for name in ("model", "data", "training"):
        parser.add_section(name, hints_of(RunConfig)[name])


def _config(options: Options) -> RunConfig:
    """The run started from, then the preset, then the file of --config, then the command line."""
    file = {} if options.config is None else dict(read_options(options.config, f"--config {options.config}"))
    preset, start = (getattr(options, name) or file.get(name) for name in ("preset", "start_from"))
    for name, value in (("preset", preset), ("start_from", start)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} must be a text, got {value!r}: name a {'preset' if name == 'preset' else 'run'}")
    if file.get("imports") and (missing := unregistered(file)):
        raise ConfigError(
            f"--config {options.config} needs {', '.join(missing)}, which nothing has registered yet; if you trust "
            f"them, add --import {' --import '.join(file['imports'])}"
        )
    before = {} if start is None else _of_run(start)
    chosen = {} if preset is None else {key: value for key, value in load_preset(preset).items() if key != "about"}
    last = {"preset": preset or before.get("preset"), "start_from": start, "imports": imported()}
    config = from_dict(RunConfig, merge(before, chosen, file, options.sections, last))
    if start is not None:
        given = [*options.given, *flat(file)]
        require_own_held_out(given, to_dict(config.data), before.get("data", {}))
    return config


def _of_run(path: str) -> dict[str, Any]:
    """The options of a run, but for what it was started from, its budget and what was special to its training."""
    from glissando.runs import Run

    config = Run.open(path).read_config()
    for name in ("start_from", "grown"):  # what growth has left is taken from the run itself
        config.pop(name, None)
    for name in (*BUDGETS, "freeze", "neutral_kl"):
        config.get("training", {}).pop(name, None)
    return config


def _resume(options: Options) -> None:
    path, machine = options.resume, [f"training.{name}" for name in MACHINE]
    if others := [name for name in options.given if name not in ("resume", "import", *machine, *_TEXTS)]:
        raise ConfigError(
            f"--resume goes on exactly as {path}/config.yaml has it and takes no other options than --"
            f"{', --'.join(machine)}, and where its texts lie now, --{' and --'.join(_TEXTS)}; "
            f"got --{' --'.join(others)}"
        )
    from glissando.allocator import keep_freed_memory
    from glissando.stages import STAGES, resume_stages
    from glissando.training.fit import resume

    keep_freed_memory()
    chosen = options.sections.get("training", {})
    moved = flat({"data": options.sections.get("data", {})})
    if (Path(path).expanduser() / STAGES).is_file():
        resume_stages(path, chosen, moved)
    else:
        resume(path, chosen, texts=moved)
