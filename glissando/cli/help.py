"""The text of --help: plain options by argparse; those of a configuration by section, from its classes' docstrings."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from glissando.config import hints_of, registry_of, section_class

#: where an option's text begins
_COLUMN = 30
#: by the name of the function that reads an option, what stands for its value
_METAVARS = {
    "whole": "NUMBER", "number": "NUMBER", "numbers": "NUMBERS", "texts": "TEXT", "boolean": "true|false"
}  # fmt: skip


class Formatter(argparse.HelpFormatter):
    """Between 80 and 100 columns, with the defaults that there are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_COLUMN, width=_width())

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.nargs != 0 and action.default not in (None, "", [], [""], argparse.SUPPRESS)
        return (action.help or "") + (f" (default: {_written(action.default)})" if shown else "")

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(getattr(action.type, "__name__", ""), action.dest.rpartition(".")[2].upper())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def command_lines(example: str) -> str:
    """A command line of several lines, for a shell, broken before options."""
    lines = [""]
    for part in re.split(r" (?=--)", example):
        if lines[-1] and len(lines[-1]) + len(part) > _width() - 6:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return "  " + " \\\n    ".join(lines) + "\n"


def _width() -> int:
    return min(100, max(80, shutil.get_terminal_size().columns)) - 2


def is_section(hint: Any) -> bool:
    """Whether a field's type is a section of options."""
    return registry_of(hint) is not None or section_class(hint, {}) is not None


def described(hint: Any, prefix: str) -> Iterator[str]:
    """Lines of help: a section's title, its options with their defaults, then the sections inside it."""
    registry = registry_of(hint)
    if registry is None:
        cls = section_class(hint, {})
        yield from _listed(f"{prefix}: {_first_line(cls)}", cls, prefix, ())
        return
    yield from ("", *_filled(f"{prefix}.kind: {', '.join(registry)} (default: {registry.default})", ""))
    shared = registry.shared
    if shared:
        first = next(iter(registry.options.values()))
        yield from _listed(None, next(cls for cls in first.__mro__ if _own_fields(cls) == shared), prefix, ())
    for kind, cls in registry.options.items():
        if len(dataclasses.fields(cls)) > len(shared):
            yield from _listed(f"{prefix}, kind {kind}: {_first_line(cls)}", cls, prefix, shared)


def _listed(title: str | None, cls: Any, prefix: str, left_out: Collection[str]) -> Iterator[str]:
    if title is not None:
        yield from ("", *_filled(title, ""))
    texts, inner = documented(cls), []
    for field in dataclasses.fields(cls):
        hint = hints_of(cls)[field.name]
        if field.name in left_out:
            continue
        if is_section(hint):
            inner.append((hint, f"{prefix}.{field.name}"))
        else:
            yield from _entry(f"--{prefix}.{field.name}", f"{texts.get(field.name, '')}{_default(field)}".strip())
    for hint, name in inner:
        yield from described(hint, name)


def _entry(option: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, _width() - _COLUMN, break_on_hyphens=False) or [""]
    head = f"  {option}"
    if len(head) > _COLUMN - 2:
        yield head
        head = ""
    for line in lines:
        yield f"{head:{_COLUMN}}{line}".rstrip()
        head = ""


def _filled(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def _first_line(cls: Any) -> str:
    about: str = getattr(cls, "title", None) or (cls.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(about.split()).rstrip(".:")


def _own_fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _default(field: dataclasses.Field) -> str:
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    if default is None or default is dataclasses.MISSING:
        return ""
    return f" (default: {_written(default)})"


def _written(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


def documented(cls: type) -> dict[str, str]:
    """The text of each field in a dataclass's docstring: a line `name   text`, or `name: text` under `Attributes:`."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        names: list[str] = []
        entries = re.compile(r"    (\w+(?:, \w+)*)\s{2,}(\S.*)$")
        for line in (base.__doc__ or "").splitlines() if dataclasses.is_dataclass(base) else ():
            if line == "    Attributes:":
                entries = re.compile(r"        (\w+): (\S.*)$")
            entry = entries.match(line)
            if entry:
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            elif names and re.match(r"\s{8,}\S", line):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return found
