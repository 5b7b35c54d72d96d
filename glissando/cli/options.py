"""What the commands share: a parser of plain options and of dotted ones, which reach into a configuration."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from glissando.cli.help import help_text, listed, options_of
from glissando.config import hints_of, merge, registry_of, section_class
from glissando.errors import ConfigError, RunError


class Options(argparse.Namespace):
    """Parsed options by name.

    sections  dotted options, nested and ready for `merge`
    given     names of all options that were given
    """

    sections: dict[str, Any]
    given: list[str]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, and which also takes `--section.option VALUE` of configurations.

    common    options that --help shows; without them, it shows all
    sections  by name, the types of a configuration's sections: dataclasses of options, or registries' sections
    preset    the configuration of a preset, whose values --help shows as defaults
    """

    common: Sequence[str] = ()
    sections: Mapping[str, Any] = MappingProxyType({})
    preset: Callable[[str], Any] | None = None

    def __init__(self, command: str, about: str, example: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"glissando {command}", usage=usage, description=about, allow_abbrev=False, add_help=False
        )
        self.example = example

    def add_argument(  # type: ignore[override]
        self, name: str, help: str, type: Any = None, default: Any = None, **settings: Any
    ) -> Any:
        """As argparse, with one name and what --help says of it, and positional arguments in capitals."""
        if not name.startswith("-"):
            settings.setdefault("metavar", name.upper())
        settings |= {} if type is None else {"type": type}
        return super().add_argument(name, help=help, **settings, **({} if default is None else {"default": default}))

    def add_shared(self, *names: str) -> None:
        """Take options that several commands have."""
        for name in names:
            self.add_argument(f"--{name}", **_SHARED[name])

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse(parser: Parser, arguments: Sequence[str]) -> Options:
    """Parsed arguments, after the files of --import have been imported: what they register are options too.

    Raises ConfigError for an unknown option, naming the nearest one, one that is repeated, and a value of the wrong
    type; the types of dotted options are checked when the configuration is read.
    """
    plain, texts, names = _split(parser, arguments)
    _show_help(parser, plain)
    options = parser.parse_args(plain, Options())
    options.given = names
    _import(getattr(options, "imports", ()))
    values = {}
    for name, text in texts.items():
        for registry in filter(None, map(registry_of, _hints(parser, name.removesuffix(".kind")))):
            registry.options_of(text)  # of an installed package: what it registers has options too
        if not (hints := _hints(parser, name)):
            raise _unknown_option(parser, f"--{name}")
        values[name] = read_value(hints, name, text)
    options.sections = merge(parser.sections, values)
    for name, value in options.sections.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"--{name}: expected a mapping of options, got {value!r}")
    return options


def _import(files: Iterable[str]) -> None:
    for file in files:
        from glissando.imports import import_file

        import_file(file)


def _show_help(parser: Parser, plain: Sequence[str]) -> None:
    """Print the help that --help, or --help SECTION, asks for, and exit; return where it is not given."""
    values = [argument.partition("=")[::2] for argument in plain]
    requested = dict(values)
    if "--help" not in requested:
        return
    _import(file for option, file in values if option == "--import")
    chosen = parser.preset(requested["--preset"]) if "--preset" in requested and parser.preset is not None else None
    print(help_text(parser, requested["--help"] or None, chosen))
    raise SystemExit(0)


def _split(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Arguments for argparse, the texts of dotted options, and the names of all options that are given."""
    plain: list[str] = []
    dotted: dict[str, str] = {}
    names: list[str] = []
    known = parser._option_string_actions
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, sign, value = argument.partition("=")
        if option in ("-h", "--help"):
            is_section = parser.sections and not sign and rest and not rest[0].startswith("-")
            plain.append(f"--help={rest.pop(0) if is_section else value}")
            continue
        if not option.startswith("--") or option == "--":
            plain.append(argument)
            continue
        name, action = option.removeprefix("--"), known.get(option)
        if action is None and name.partition(".")[0] not in parser.sections:
            raise _unknown_option(parser, option)
        if name in names and not isinstance(action, argparse._AppendAction | argparse._ExtendAction):
            raise ConfigError(f'{option} is given more than once; give it once (a list: \'["a", "b"]\')')
        if (twin := name.removesuffix(".kind") if name.endswith(".kind") else f"{name}.kind") in names:
            raise ConfigError(f"{option} is given twice, also as --{twin}; give it once")
        names.append(name)
        if action is not None and action.nargs is not None:  # a flag, or several values
            plain.append(argument)
            continue
        if not sign:
            if not rest or rest[0].partition("=")[0] in known:
                raise ConfigError(f"{option}: expected a value")
            value = rest.pop(0)
        if action is not None:
            plain.append(f"{option}={value}")  # in one piece: a value may begin with a dash
        else:
            dotted[name] = value
    return plain, dotted, names


def _unknown_option(parser: Parser, option: str) -> ConfigError:
    dotted = [each for name, hint in parser.sections.items() for each in options_of(hint, name)]

    def likeness(known: str) -> float:
        """By the whole names, and by what they end with."""
        ends = (name.removeprefix("--").rpartition(".")[2] for name in (option, known))
        whole_names, last = (difflib.SequenceMatcher(None, *names).ratio() for names in ((option, known), ends))
        return 2 * whole_names + last if last >= 0.6 else 0.0

    close = max([*parser._option_string_actions, *(each.name for each in dotted)], key=likeness, default="")
    hint = f" Did you mean {close}?" if likeness(close) else ""
    sections = {each.section for each in dotted}
    parts = option.removeprefix("--").split(".")
    inside = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    section = next((name for name in inside if name in sections), "all") if sections else ""
    return ConfigError(f"unknown option {option}.{hint} See `{f'{parser.prog} --help {section}'.strip()}`.")


# ---------------------------------------------------------------------- values of plain options


def whole(text: str) -> int:
    """A whole number, also one written as 2e6."""
    if (number := _exponential(text)) is not None and number == int(number):
        return int(number)
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """Reads whole numbers that are not less."""

    def read(text: str) -> int:
        if (value := whole(text)) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {value}")
        return value

    read.__name__ = whole.__name__  # for messages and --help
    return read


def number(text: str) -> float:
    try:
        return float(text.replace(".nan", "nan").replace(".inf", "inf"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def numbers(text: str) -> list[float]:
    """A list of numbers: [-1, 0, 1]."""
    try:
        return [float(part) for part in text.strip().removeprefix("[").removesuffix("]").split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a list of numbers, such as 0.5,1,2, got {text!r}") from None


def _exponential(text: str) -> Decimal | None:
    """The number that a text such as 2e6 is, to which YAML would need a point and a sign; else None."""
    return Decimal(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}", text) else None


# ---------------------------------------------------------------------- values of dotted options


def _hints(parser: Parser, name: str) -> list[Any]:
    """The types of a dotted option, one for each kind that has it; none for an unknown option."""
    head, _, path = name.partition(".")
    return _below(parser.sections[head], path)


def _below(hint: Any, path: str) -> list[Any]:
    """The types at a dotted path below a type, one for each kind that has it."""
    hints = [hint]
    for part in path.split(".") if path else ():
        hints = [inner for outer in hints for field, inner in _fields(outer) if field == part]
    return hints


def _fields(hint: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a section with their types, of every kind."""
    registry = registry_of(hint)
    if registry is not None:
        yield "kind", str
    for cls in [section_class(hint, {})] if registry is None else registry.options.values():
        hints = hints_of(cls)
        yield from ((field.name, hints[field.name]) for field in listed(cls))


def read_value(hints: list[Any], name: str, text: str) -> Any:
    """A dotted option's text as its field reads it: a text stays as it is, everything else is YAML."""
    if all(map(text_like, hints)):
        return None if text == "null" and any(type(None) in typing.get_args(hint) for hint in hints) else text
    if (value := _exponential(text)) is not None:
        return int(value) if value == int(value) else float(value)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{name}: {text!r} is not YAML: {' '.join(str(error).split())}") from error


def text_like(hint: Any) -> bool:
    """Whether a field's type is a text, or a text or null."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return all(isinstance(part, str) for part in parts)
    if typing.get_origin(hint) in (list, tuple, dict) or registry_of(hint) is not None:
        return False
    return hint is str or any(map(text_like, parts))


#: what may be a configuration's name in a message: data.path, and neither a file's path nor a call
_NAME = re.compile(r"(?<!--help )(?<![\w./\\'\"-])(?:block|data|depth|mixer|model|training)\.\w+(?:\.\w+)*(?![\w(/])")


def as_flags(message: str, arguments: Sequence[str]) -> str:
    """A message with its configuration names as the command line takes them: data.path becomes --data.path, and
    mixer.tau becomes --model.mixer.tau, unless the command was given options of --mixer itself."""
    if _NAME.search(message) is None:
        return message
    from glissando.events.task import EventsRunConfig
    from glissando.series.task import SeriesRunConfig
    from glissando.training.config import RunConfig

    sections = [hints_of(config) for config in (RunConfig, SeriesRunConfig, EventsRunConfig)]

    def flag(match: re.Match[str]) -> str:
        name, head = match[0], match[0].partition(".")[0]
        if head not in sections[0] and any(argument.startswith(f"--{head}.") for argument in arguments):
            return f"--{name}"
        path = name if head in sections[0] else f"model.{name}"
        top, _, rest = path.partition(".")
        return f"--{path}" if any(_below(types[top], rest) for types in sections) else name

    return _NAME.sub(flag, message)


# ---------------------------------------------------------------------- shared options


def _threads(text: str) -> int | None:
    """A number of threads; None is auto."""
    if text == "auto":
        return None
    if (count := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected auto or a number of at least 1, got {text!r}")
    return count


#: what may be changed of a trained model's depth
DEPTH = ("depth.n_steps", "depth.method")
#: options of the commands that compute with a trained model
COMPUTING = (*DEPTH, "device", "threads", "import")
_SHARED: dict[str, dict[str, Any]] = {
    "depth.n_steps": {"type": whole, "help": "steps of a flow, if not those of the training"},
    "depth.method": {"help": "solver of a flow, if not that of the training"},
    "weights": {
        "choices": ["float32", "bf16", "int8"], "default": "float32",
        "help": "round the matrices (int8 with a scale for each output); arithmetic stays in float32",
    },
    "step": {
        "choices": ["auto", "compiled", "plain"], "default": "auto",
        "help": "how tokens are computed: compiled (a kernel, in float32 on a CPU) or plain (PyTorch); auto: compiled "
        "if the model has such a step. The kernel is compiled once on a machine, in half a minute",
    },
    "caches": {
        "choices": ["float32", "bf16"], "default": "float32",
        "help": "how the compiled step keeps keys and values of attention: bf16 takes half the memory, and is faster "
        "behind long texts and for many of them",
    },
    "lookup": {
        "type": at_least(0), "default": 0, "metavar": "N",
        "help": "read up to N tokens ahead where the last three occurred earlier in the text; the text stays the same, "
        "and comes faster where it repeats itself much, slower where it does not",
    },
    "device": {
        "default": "cpu",
        "help": "cpu, cuda, cuda:1, mps, ...; auto: the accelerator that PyTorch finds, or else the CPU",
    },
    "threads": {
        "type": _threads, "default": "auto", "metavar": "N",
        "help": "number of threads; auto: OMP_NUM_THREADS if set, or else the fastest number in a short measurement",
    },
    "import": {
        "dest": "imports", "metavar": "FILE", "action": "append", "default": [],
        "help": "Python file to execute first, which registers your own mixers, depths or corpora; may be repeated",
    },
}  # fmt: skip


def choose_threads(options: argparse.Namespace, rows: int, width: int, before: int | None = None) -> None:
    """Compute with as many threads as --threads says, else as `glissando.threads.use_threads` finds; says what was
    measured. A model on an accelerator leaves the number as it is, unless --threads says it."""
    from glissando.threads import use_threads

    if options.threads is None and str(getattr(options, "device", "cpu")) != "cpu":
        return
    if line := use_threads(options.threads, rows, width, before):
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- shared checks


def require_out(options: Options, example: str) -> None:
    """Raise ConfigError where --out is missing."""
    if options.out is None:
        raise ConfigError(f"--out is missing: {example}")


def refuse_idle(options: Options, needs: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that does nothing without another one, which is not given."""
    for name, other in needs.items():
        if name in options.given and other not in options.given:
            raise ConfigError(f"--{name} has no effect without --{other}: leave it out, or give that as well")


def require_empty(out: Path, option: str = "--out") -> None:
    """Raise RunError where there is something at the place that `option` names."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise RunError(f"{out} exists and is not empty; nothing is overwritten: choose another {option}")


def require_own_held_out(named: Collection[str], requested: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise ConfigError where another text than a run's is requested, whose held-out text would stay the run's.

    named       names of options
    requested, run  sections `data`: as it would be, and the run's own
    """
    path, before, held_out = requested.get("path"), run.get("path"), run.get("valid_path")
    if requested["kind"] != run.get("kind") or None in (path, before, held_out) or "data.valid_path" in named:
        return
    if Path(str(path)).expanduser().resolve() != Path(str(before)).expanduser().resolve():
        raise ConfigError(
            f"--data.path {path} alone would leave the run's {held_out} as held-out text; give --data.valid_path too "
            f"(null: a part of {path})"
        )


def words(text: str | None) -> list[str]:
    """The words of "a, b" and of none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
