"""What the verbs' command lines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from glissando.errors import ConfigError, nearest


def parser_for(verb: str, about: str, example: str) -> Any:
    """A parser whose --help ends with a real example."""
    parser = ArgumentParser(
        prog=f"glissando {verb}", description=about, epilog=f"example:  {example}", exit_on_error=False
    )
    return parser


def parse(parser: Any, arguments: Sequence[str]) -> Any:
    """Parsed arguments.

    Raises ConfigError for an unknown option, naming the nearest one, and for a value of the wrong type.
    """
    from jsonargparse import ArgumentError

    known = list(parser._option_string_actions)
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and name not in known:
            close = nearest(name, known)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"unknown option {name}.{hint} See `{parser.prog} --help`.")
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys: what a parser takes as defaults."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return items


def plain(value: Any) -> Any:
    """A parsed section as a dictionary."""
    return value.as_dict() if hasattr(value, "as_dict") else value
