"""What the commands share: a parser of plain options and of dotted ones, which reach into a configuration."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from glissando.config import Registry, hints_of, section_class
from glissando.errors import ConfigError, nearest


class Options(argparse.Namespace):
    """Parsed options; `sections` holds the dotted ones as nested texts and numbers, ready for `merge`."""

    sections: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are ConfigErrors and which also takes `--section.option value` of dataclasses."""

    def __init__(self, command: str, about: str, example: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"glissando {command}",
            usage=usage,
            description=about,
            epilog=f"example:  {example}",
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        self.dotted: dict[str, Any] = {}

    def add_section(self, name: str, hint: Any) -> None:
        """Take `--NAME.option` of the dataclass or the registry `hint`."""
        self.dotted[name] = hint

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def format_help(self) -> str:
        plain = super().format_help()
        if not self.dotted:
            return plain
        lines = [line for name, hint in self.dotted.items() for line in _described(hint, name)]
        body, _, example = plain.rpartition("\nexample:")
        return "\n".join(
            [body, "options of the configuration (--config takes them from YAML):", *lines, "", f"example:{example}"]
        )


def parser_for(command: str, about: str, example: str, usage: str | None = None) -> Parser:
    """A parser whose --help ends with a real example."""
    return Parser(command, about, example, usage)


def parse(parser: Parser, arguments: Sequence[str], context: Callable[[], Mapping[str, Any]] = dict) -> Options:
    """Parsed arguments. `context` returns the configuration that dotted options change: it tells which kind a section
    is of where the options do not.

    Raises ConfigError for an unknown option, naming the nearest one, and for a value of the wrong type.
    """
    plain, dotted = _split(parser, arguments)
    options = parser.parse_args(plain, Options())
    nested: dict[str, Any] = {}
    for name, text in dotted:
        place = nested
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--{name} reaches into --{'.'.join(path)}, which was given as a whole")
        place[last] = text
    known = context() if nested else {}
    options.sections = {
        name: _typed(parser.dotted[name], value, known.get(name), f"--{name}") for name, value in nested.items()
    }
    return options


def _split(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Arguments for argparse, and (name, text) of the dotted ones."""
    plain: list[str] = []
    dotted: list[tuple[str, str]] = []
    seen: set[str] = set()
    known = parser._option_string_actions
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, sign, value = argument.partition("=")
        if argument == "--" or not name.startswith("--"):
            plain.append(argument)
            continue
        if name in seen and not isinstance(known.get(name), argparse._AppendAction):
            raise ConfigError(f"{name} is given more than once; give it once")
        seen.add(name)
        head = name.removeprefix("--").partition(".")[0]
        if name in known:
            plain.append(argument)
            if not sign and known[name].nargs is None and rest and known[name].nargs != 0:
                plain[-1] = f"{name}={rest.pop(0)}"
        elif head in parser.dotted:
            if not sign and not rest:
                raise ConfigError(f"{name}: expected a value")
            dotted.append((name.removeprefix("--"), value if sign else rest.pop(0)))
        else:
            names = [option for option in known if option.startswith("--") and option != "--help"]
            names += [f"--{full}" for section, hint in parser.dotted.items() for full in _names(hint, section)]
            close = _nearest_option(name, names)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"unknown option {name}.{hint} See `{parser.prog} --help`.")
    return plain, dotted


def _nearest_option(name: str, names: Sequence[str]) -> str | None:
    """The option meant by `name`: one whose last part is like that of `name`, or one that is like it as a whole."""
    last = nearest(_last(name), {_last(option) for option in names})
    same = [option for option in names if last is not None and _last(option) == last]
    return nearest(name, same) or (same[0] if same else nearest(name, names))


def _last(option: str) -> str:
    return option.removeprefix("--").rpartition(".")[2]


# ---------------------------------------------------------------------- values


def whole(text: str) -> int:
    """An int from a text, also one written as 2e6."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE]\+?\d{1,3}", text) and Decimal(text) == int(Decimal(text)):
        return int(Decimal(text))
    return int(text)


def texts(text: str) -> list[str]:
    """A text, or a list of texts in YAML: ["a", "b"]."""
    import yaml

    if not text.startswith("["):
        return [text]
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return [text]
    return [str(value) for value in values] if isinstance(values, list) else [text]


whole.__name__, texts.__name__ = "whole number", "list of texts"


def _typed(hint: Any, value: Any, context: Any, where: str) -> Any:
    """A dotted option's text as its field reads it: texts stay texts, everything else is YAML."""
    if isinstance(value, dict):
        kind = value.get("kind") if isinstance(value.get("kind"), str) else None
        seen = context if isinstance(context, Mapping) else {"kind": context} if isinstance(context, str) else {}
        cls = section_class(hint, {"kind": kind} if kind else seen)
        fields = {} if cls is None else hints_of(cls)
        same = not kind or seen.get("kind") == kind
        return {
            name: text if name == "kind" else _typed(fields.get(name), text, seen.get(name) if same else None, where)
            for name, text in value.items()
        }
    if text_like(hint):
        return None if value == "null" and type(None) in typing.get_args(hint) else value
    import yaml

    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}", value):
        return int(Decimal(value)) if Decimal(value) == int(Decimal(value)) else float(value)
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {value!r} is not YAML: {' '.join(str(error).split())}") from error


def text_like(hint: Any) -> bool:
    """Whether a field's type is a text, or a text or null."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return all(isinstance(part, str) for part in parts)
    return hint is str or (
        bool(parts) and any(text_like(part) for part in parts) and typing.get_origin(hint) not in (list, tuple, dict)
    )


# ---------------------------------------------------------------------- help


def _names(hint: Any, prefix: str) -> Iterator[str]:
    """The dotted names of all options below a section, of every kind."""
    registry = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Registry)), None)
    if registry is not None:
        yield f"{prefix}.kind"
    for cls in [section_class(hint, {})] if registry is None else registry.options.values():
        for name, inner in ({} if cls is None else hints_of(cls)).items():
            if _is_section(inner):
                yield from _names(inner, f"{prefix}.{name}")
            elif not name.startswith("byte_"):
                yield f"{prefix}.{name}"


def _is_section(hint: Any) -> bool:
    return (
        any(isinstance(m, Registry) for m in getattr(hint, "__metadata__", ())) or section_class(hint, {}) is not None
    )


def _described(hint: Any, prefix: str) -> Iterator[str]:
    """Lines of help: a section's title, then its options with their defaults."""
    registry = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Registry)), None)
    kinds = {"": section_class(hint, {})} if registry is None else registry.options
    if registry is not None:
        yield f"\n{prefix}.kind: {', '.join(registry)}"
    for kind, cls in kinds.items():
        if cls is None:
            continue
        about = (cls.__doc__ or "").strip().splitlines()[0]
        yield f"\n{prefix}{f' (kind: {kind})' if kind else ''}: {about}"
        told, inner = documented(cls), []
        for field in dataclasses.fields(cls):
            own = hints_of(cls)[field.name]
            if _is_section(own):
                inner.append((own, f"{prefix}.{field.name}"))
            else:
                default = "" if field.default is dataclasses.MISSING else f" (default: {_shown(field.default)})"
                yield f"  --{prefix}.{field.name:24} {told.get(field.name, '')}{default}"
        for own, name in inner:
            if not kind or name.count(".") < 2:
                yield from _described(own, name)


def _shown(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, int | float) or isinstance(value, bool)
        else str(value)
    )


def documented(cls: type) -> dict[str, str]:
    """What a dataclass's docstring says of each field, one `name   text` a line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        names: list[str] = []
        for line in (base.__doc__ or "").splitlines() if dataclasses.is_dataclass(base) else ():
            entry = re.match(r"    (\w+(?:, \w+)*)\s{2,}(\S.*)$", line)
            if entry:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            elif names and re.match(r"\s{8,}\S", line):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return found


# ---------------------------------------------------------------------- shared options


def add_inference_options(parser: Parser) -> None:
    """What may be changed of a trained model: how its depth is computed, and what it remembers."""
    from glissando.backbone import BackboneConfig

    hints = hints_of(BackboneConfig)
    for name in ("depth", "mixer"):
        parser.add_section(name, hints[name])


def quoted(texts: list[str]) -> str:
    """Texts as a YAML list on one line that reads back as they were.

    Raises ConfigError for bytes that were no UTF-8.
    """
    import yaml

    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{texts!r} is not UTF-8 text; write it in UTF-8, under a locale of UTF-8") from error
    return yaml.safe_dump(texts, default_style='"', default_flow_style=True, allow_unicode=False, width=2**62).strip()


def require_writable(option: str, folder: Path) -> None:
    """Make `folder`, which `option` names, before time is spent on what shall lie in it.

    Raises ConfigError where it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}: its folder {folder} cannot be made or written to: {error.strerror}; name another"
        ) from error


def require_own_held_out(given: Collection[str], asked: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise ConfigError where another text than a run's is asked for, and the run's held-out text would stay with it.

    given       names of options
    asked, run  options of data, flat: as they would be, and the run's own
    """
    for corpus in ("text", "jsonl"):
        path, held_out = f"data.{corpus}.path", f"data.{corpus}.valid_path"
        if None in (run.get(path), run.get(held_out), asked.get(path)):
            continue
        moved = Path(asked[path]).expanduser().resolve() != Path(run[path]).expanduser().resolve()
        if moved and held_out not in given:
            raise ConfigError(
                f"--{path} {asked[path]} alone would leave the run's {run[held_out]} as held-out text; give "
                f"--{held_out} too (null: a part of {asked[path]})"
            )


def named_values(text: str) -> dict[str, float]:
    """ "mood=0.7,speech=-1" as a mapping.

    Raises ConfigError for what is not of this form.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if name.strip() in values:
            raise ConfigError(f"--control gives {name.strip()} more than once: {text!r}; give each dial one value")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise ConfigError(f"--control is NAME=VALUE with commas between, such as mood=0.7,speech=-1; got {text!r}")
    return values


def add_checkpoint_option(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        help="best (by validation), last, or a step, of the run's checkpoints; by default the run's own weights",
    )


def take_checkpoint(options: Options) -> Options:
    """`options` with the run's checkpoint in the place of the run, where one is asked for."""
    from glissando.runs import choose_checkpoint

    if options.checkpoint is not None:
        options.run = str(choose_checkpoint(options.run, options.checkpoint))
    return options
