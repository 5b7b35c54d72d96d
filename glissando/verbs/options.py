"""What the verbs' command lines share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
import tempfile
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from glissando.config import readable, section_of
from glissando.data.corpora import TokenizerConfig
from glissando.errors import ConfigError, nearest


def parser_for(verb: str, about: str, example: str, usage: str | None = None) -> Any:
    """A parser whose --help ends with a real example."""
    return ArgumentParser(
        prog=f"glissando {verb}",
        usage=usage,
        description=about,
        epilog=f"example:  {example}",
        exit_on_error=False,
    )


def parse(parser: Any, arguments: Sequence[str]) -> Any:
    """Parsed arguments.

    Raises ConfigError for an unknown option, naming the nearest one, and for a value of the wrong type.
    """
    from jsonargparse import ArgumentError

    known = parser._option_string_actions
    given = [argument.partition("=")[0] for argument in arguments]
    for name in given:
        if name in known and given.count(name) > 1 and not name.endswith("+"):
            raise ConfigError(f'{name} is given {given.count(name)} times; give it once (a list: \'["a", "b"]\')')
        if name.startswith("--") and len(name) > 2 and name not in known:
            close = _nearest_option(name, known)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"unknown option {name}.{hint} See `{parser.prog} --help`.")
    try:
        options = parser.parse_args(_spelled_out(known, arguments))
    except ArgumentError as error:
        raise ConfigError(readable(str(error))) from error
    for name, text in _taken_for_nothing(known, arguments):
        options[name] = text
    return options


def _nearest_option(name: str, known: Mapping[str, Any]) -> str | None:
    """The option meant by `name`: one whose last part is like that of `name`, or one that is like it as a whole.

    None of a whole section, and not --help.
    """
    options = [
        option
        for option, action in known.items()
        if option.startswith("--") and option != "--help" and action.metavar != "CONFIG" and not option.endswith("+")
    ]
    lasts = {_last(option) for option in options}
    close = difflib.get_close_matches(_last(name), sorted(lasts), n=1, cutoff=0.75)
    if not close:
        return nearest(name, options)
    return difflib.get_close_matches(name, [o for o in options if _last(o) == close[0]], n=1, cutoff=0.0)[0]


def _last(option: str) -> str:
    return option.removeprefix("--").rpartition(".")[2]


def _spelled_out(known: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """`arguments` with 2e6 as 2000000 where an option takes a whole number, and a tokenizer by name or path as its
    options."""
    found, before = [], ""
    for argument in arguments:
        name, sign, value = argument.partition("=")
        inline = bool(sign) and name in known
        option, text = (name, value) if inline else (before, argument)
        if option == "--data.tokenizer" in known and not text.startswith(("{", "--")):
            section = json.dumps(asdict(TokenizerConfig(**TokenizerConfig.from_text(text))))  # type: ignore[arg-type]
            argument = f"{name}={section}" if inline else section
        hint = getattr(known.get(option), "_typehint", None)
        if hint in (int, int | None) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE]\+?\d{1,3}", text):
            number = Decimal(text)
            if number == int(number):
                argument = f"{name}={int(number)}" if inline else str(int(number))
        found.append(argument)
        before = argument
    return found


def _taken_for_nothing(known: Mapping[str, Any], arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(name, text) of options of a text or null whose text is nothing to YAML, a comment such as #1.txt, and not
    null."""
    import yaml

    found = []
    for argument, after in zip(arguments, [*arguments, ""][1:], strict=True):
        name, sign, value = argument.partition("=")
        text = value if sign else after
        if getattr(known.get(name), "_typehint", None) != (str | None) or text == "null":
            continue
        with contextlib.suppress(yaml.YAMLError):
            if yaml.safe_load(text) is None:
                found.append((known[name].dest, text))
    return found


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


def add_inference_options(parser: Any) -> None:
    """What may be changed of a trained model: how its depth is computed, and what it remembers."""
    parser.add_argument("--depth.n_steps", type=int | None, default=None, help="steps of a flow, if other than trained")
    parser.add_argument("--depth.flow.method", type=str | None, default=None, help="its solver, if other than trained")
    parser.add_argument(
        "--depth.flow.tolerance", type=float | None, default=None, help="relative error at which a token halts"
    )
    parser.add_argument("--mixers.tau.cache", type=str | None, default=None, help="exact, or binned: constant memory")
    parser.add_argument("--mixers.tau.bins", type=int | None, default=None, help="how many bins a binned cache has")


def add_checkpoint_option(parser: Any) -> None:
    parser.add_argument(
        "--checkpoint",
        type=str | None,
        default=None,
        help="best (by validation), last, or a step, of the run's checkpoints; by default the run's own weights",
    )


def take_checkpoint(options: Any) -> Any:
    """`options` with the run's checkpoint in the place of the run, where one is asked for."""
    from glissando.runs import choose_checkpoint

    if options.checkpoint is not None:
        options.run = str(choose_checkpoint(options.run, options.checkpoint))
    return options


def inference_overrides(options: Any) -> dict[str, Any]:
    """Those of `add_inference_options` that were given."""
    names = ("depth.n_steps", "depth.flow.method", "depth.flow.tolerance", "mixers.tau.cache", "mixers.tau.bins")
    return {name: options[name] for name in names if options[name] is not None}


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


def plain(value: Any) -> Any:
    """A parsed section as a dictionary."""
    return value.as_dict() if hasattr(value, "as_dict") else value


def explain(parser: Any, cls: type, prefix: str = "") -> None:
    """Give the options of the dataclass `cls` the help that its docstring holds, one `name   text` a line."""
    for name, hint in typing.get_type_hints(cls).items():
        section = section_of(hint)
        if section is not None:
            explain(parser, section, f"{prefix}{name}.")
    texts = _documented(cls)
    for action in parser._actions:
        if (action.metavar == "CONFIG" and "." in action.dest) or action.dest in ("model", "data", "training"):
            action.help = argparse.SUPPRESS
        head, _, name = action.dest.rpartition(".")
        if f"{head}." == prefix or (not head and not prefix):
            action.help = texts.get(name, action.help)
    title = f"<class '{cls.__module__}.{cls.__qualname__}'>"
    for group in parser._action_groups:
        if group.title == title:
            about = (cls.__doc__ or "").splitlines()[0].rstrip(".:")
            group.title = f"{prefix.rstrip('.')}, {about}" if prefix else about
            group.description = None


def _documented(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (cls.__doc__ or "").splitlines():
        entry = re.match(r"    (\w+(?:, \w+)*)\s{2,}(\S.*)$", line)
        if entry:
            names = entry[1].split(", ")
            texts |= dict.fromkeys(names, entry[2])
        elif names and re.match(r"\s{8,}\S", line):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        else:
            names = []
    return {name: text.replace("%", "%%") for name, text in texts.items()}
