"""glissando train: a preset, a corpus and a budget into a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glissando.config import check_keys, from_dict, merge, to_dict
from glissando.errors import ConfigError
from glissando.presets import load_preset
from glissando.training.config import MACHINE, RunConfig
from glissando.verbs.options import explain, flat, parse, parser_for, plain

EXAMPLE = (
    "glissando train --preset transformer-nano --data.corpus text --data.text.path book.txt "
    "--training.tokens 2000000 --out runs/book"
)


def main(arguments: Sequence[str]) -> None:
    """Train, or with --resume go on."""
    parser = _parser(_named(arguments, "--preset"), _named(arguments, "--config"))
    # jsonargparse gives --print_config a meaning of its own, so it is taken out before parsing.
    print_only = "--print_config" in arguments
    options = parse(parser, [a for a in arguments if a != "--print_config"])
    if options.resume:
        _resume(arguments, options)
        return
    config = from_dict(RunConfig, {k: plain(options[k]) for k in ("preset", "model", "data", "training")})
    if print_only:
        import yaml

        print(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    if options.out is None:
        raise ConfigError("--out is missing: name the run directory to make, such as --out runs/first")
    from glissando.allocator import keep_freed_memory
    from glissando.training.fit import train

    keep_freed_memory()
    train(config, options.out)


def _resume(arguments: Sequence[str], options: Any) -> None:
    path, machine = options.resume, [f"--training.{name}" for name in MACHINE]
    given = [name for name in (a.partition("=")[0] for a in arguments) if name.startswith("--") and name != "--resume"]
    others = [name for name in given if name not in machine]
    if others:
        raise ConfigError(
            f"--resume goes on exactly as {path}/config.yaml says and takes no other options than "
            f"{', '.join(machine)}; got {' '.join(others)}"
        )
    from glissando.allocator import keep_freed_memory
    from glissando.training.fit import resume

    keep_freed_memory()
    chosen = {name.rpartition(".")[2]: options[name[2:]] for name in given}
    resume(path, chosen)


def _parser(preset: str | None, config_file: str | None) -> Any:
    """All options of RunConfig; their defaults are the preset's, then the file's."""
    usage = "glissando train --preset NAME --out DIR [options]\n       glissando train --resume DIR"
    parser = parser_for("train", "Train a model into a run directory.", EXAMPLE, usage)
    parser.add_argument("--config", help="YAML file of options; the command line comes after it")
    parser.add_argument("--out", help="run directory to make")
    parser.add_argument("--resume", help="run directory to go on with, and nothing else but the machine's options")
    parser.add_argument(
        "--print_config", dest="print_only", action="store_true", help="print the resolved options and stop"
    )
    parser.add_class_arguments(RunConfig, None)
    explain(parser, RunConfig)
    values = _read_yaml(config_file)
    check_keys(RunConfig, values)
    preset = preset or values.get("preset")
    start = load_preset(preset) if preset else {}
    start = {key: value for key, value in start.items() if key != "about"} | {"preset": preset}
    resolved = to_dict(from_dict(RunConfig, merge(start, values, {"preset": preset})))
    parser.set_defaults(flat(resolved))
    return parser


def _read_yaml(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"--config {path} must hold a mapping of options, such as `preset: transformer-nano`")
    return values


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
