"""glissando train: a preset, a corpus and a budget into a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glissando.cli.options import explain, parse, parser_for, plain, require_own_held_out
from glissando.config import check_keys, flat, from_dict, merge, read_options, require_chosen, to_dict
from glissando.data.corpora import CORPORA
from glissando.errors import ConfigError
from glissando.mixers import MIXERS
from glissando.presets import load_preset
from glissando.training.config import BUDGETS, MACHINE, RunConfig, require_effect

EXAMPLE = (
    "glissando train --preset transformer-nano --data.corpus text --data.text.path book.txt "
    "--training.tokens 2000000 --out runs/book"
)


def main(arguments: Sequence[str]) -> None:
    """Train, or with --resume go on."""
    path = _named(arguments, "--config")
    file = {} if path is None else read_options(path, f"--config {path}")
    parser = _parser(_named(arguments, "--preset"), _named(arguments, "--from"), file)
    # jsonargparse gives --print_config a meaning of its own, so it is taken out before parsing.
    print_only = "--print_config" in arguments
    options = parse(parser, [a for a in arguments if a != "--print_config"])
    if options.resume:
        _resume(arguments, options)
        return
    chosen = {k: plain(options[k]) for k in ("preset", "model", "data", "training")}
    chosen["start_from"] = getattr(options, "from") or file.get("start_from")
    config = from_dict(RunConfig, {**chosen, "stages": file.get("stages") or []})
    if config.start_from is not None:
        names = [a.removeprefix("--").partition("=")[0] for a in arguments if a.startswith("--")]
        require_own_held_out([*names, *flat(file)], flat(config.as_dict()), flat(_of_run(config.start_from)))
    _require_used(arguments, file, config)
    if print_only:
        import yaml

        print(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    if options.out is None:
        raise ConfigError("--out is missing: name the run directory to make, such as --out runs/first")
    from glissando.allocator import keep_freed_memory
    from glissando.training.fit import train
    from glissando.training.stages import train_stages

    keep_freed_memory()
    if config.stages:
        train_stages(config, options.out)
    else:
        train(config, options.out)


def _require_used(arguments: Sequence[str], file: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError for an option, on the command line or in the file, of a mixer or a corpus that the run does not
    have, and for one on the command line that does nothing beside the others. A file may have more than is used where
    the command line chooses otherwise than it does."""
    if config.stages:
        return  # each names its own
    typed = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for given in typed:
        require_effect(config, given.removeprefix("--").removesuffix("+"), told=given)
    mixers = config.as_dict()["model"]["mixers"]
    for given in _sections(file, typed):
        require_chosen(given, "model.mixers", MIXERS, mixers, "model.mixer", config.model.mixer)
        require_chosen(given, "data", CORPORA, [config.data.corpus], "data.corpus", config.data.corpus)


def _sections(file: Mapping[str, Any], typed: Sequence[str]) -> list[str]:
    """The options in a file's sections of mixers and corpora, but where the command line chooses itself."""
    found = []
    for prefix, chosen in (("model.mixers", "--model.mixer"), ("data", "--data.corpus")):
        values: Any = file
        for name in prefix.split("."):
            values = values.get(name) or {}
        if chosen not in typed:
            found += [name for name in flat(values, f"{prefix}.") if name.count(".") > prefix.count(".") + 1]
    return found


def _resume(arguments: Sequence[str], options: Any) -> None:
    from glissando.training.files import text_options

    path, machine = options.resume, [f"--training.{name}" for name in MACHINE]
    texts = [f"--{name}" for name in text_options()]
    given = [name for name in (a.partition("=")[0] for a in arguments) if name.startswith("--") and name != "--resume"]
    others = [name for name in given if name not in (*machine, *texts)]
    if others:
        raise ConfigError(
            f"--resume goes on exactly as {path}/config.yaml says and takes no other options than "
            f"{', '.join(machine)}, and where its texts lie now, such as --data.text.path; got {' '.join(others)}"
        )
    from glissando.allocator import keep_freed_memory
    from glissando.training.fit import resume
    from glissando.training.stages import STAGES, resume_stages

    keep_freed_memory()
    chosen = {name.rpartition(".")[2]: options[name[2:]] for name in given if name in machine}
    moved = {name[2:]: options[name[2:]] for name in given if name in texts}
    if (Path(path).expanduser() / STAGES).is_file():
        resume_stages(path, chosen, moved)
    else:
        resume(path, chosen, texts=moved)


def _parser(preset: str | None, start: str | None, values: Mapping[str, Any]) -> Any:
    """All options of RunConfig, by default those of the run started from, then the preset's, then the file's."""
    usage = (
        "glissando train --preset NAME --out DIR [options]\n       glissando train --from RUN --out DIR [options]\n"
        "       glissando train --resume DIR"
    )
    parser = parser_for("train", "Train a model into a run directory.", EXAMPLE, usage)
    parser.add_argument("--config", help="YAML file of options; the command line comes after it")
    parser.add_argument("--out", help="run directory to make")
    parser.add_argument("--from", help="run whose weights, tokenizer and options to start with")
    parser.add_argument(
        "--resume", help="run directory to go on with; beside it only options of the machine, and of moved texts"
    )
    parser.add_argument(
        "--print_config", dest="print_only", action="store_true", help="print the resolved options and stop"
    )
    parser.add_class_arguments(RunConfig, None, skip={"start_from", "stages", "grown"})  # no place on a command line
    explain(parser, RunConfig)
    check_keys(RunConfig, values)
    preset, start = preset or values.get("preset"), start or values.get("start_from")
    for name, value in (("preset", preset), ("start_from", start)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} must be a text, got {value!r}: name a {'preset' if name == 'preset' else 'run'}")
    before = _of_run(start) if start else {}
    chosen = load_preset(preset) if preset else {}
    chosen = {key: value for key, value in chosen.items() if key != "about"}
    values = {key: value for key, value in values.items() if key not in ("start_from", "stages", "grown")}
    preset = preset or before.get("preset")
    resolved = to_dict(from_dict(RunConfig, merge(before, chosen, values, {"preset": preset})))
    del resolved["start_from"], resolved["stages"], resolved["grown"]
    parser.set_defaults(flat(resolved))
    return parser


def _of_run(path: str) -> dict[str, Any]:
    """The options of a run, but for what it was started from, its budget and what was special to its training."""
    from glissando.runs import Run

    config = Run.open(path).read_config()
    for name in ("start_from", "grown"):  # what growth has left is taken from the run itself
        config.pop(name, None)
    for name in (*BUDGETS, "freeze", "neutral_kl"):
        config.get("training", {}).pop(name, None)
    return config


def _named(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option that is needed before the parser can be built."""
    for i, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name == option:
            if sign:
                return value
            if i + 1 < len(arguments):
                return arguments[i + 1]
    return None
