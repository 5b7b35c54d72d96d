"""The text of --help: usage, an example, and options with their defaults. Options of a configuration are listed by
section, with the texts of their classes' docstrings."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from glissando.config import hints_of, is_recorded, registry_of, section_class
from glissando.errors import unknown_name

if TYPE_CHECKING:
    from glissando.cli.options import Parser

#: where an option's text begins
_COLUMN = 30
#: by the name of the function that reads an option, what stands for its value
_METAVARS = {
    "whole": "NUMBER", "number": "NUMBER", "numbers": "NUMBERS", "texts": "TEXT", "boolean": "true|false"
}  # fmt: skip


def help_text(parser: Parser, section: str | None, chosen: Any) -> str:
    """What people use (section: None), `all`, or one section; `chosen` is a preset's configuration, or None."""
    if section not in (None, "all") and parser.section_names:
        name, *path = section.split(".")
        if name not in parser.section_names:
            raise unknown_name("section", name, ["all", *parser.section_names])
        return "\n".join(described(parser.sections[name], name, getattr(chosen, name, None), path)).lstrip()
    forms: dict[Any, str] = {"?": "[{}]", "*": "[{} ...]", "+": "{0} [{0} ...]", None: "{}"}
    positional = [action for action in parser._actions if not action.option_strings]
    places = [forms[action.nargs].format(action.metavar) for action in positional]
    is_short = section is None and bool(parser.section_names)
    common = parser.common if is_short else ()
    plain = [a for a in parser._actions if a.option_strings and (not common or a.option_strings[0] in common)]
    entries = [plain_entry(action) for action in plain]
    for name in (option.removeprefix("--") for option in common if "." in option):
        head = name.partition(".")[0]
        entries.append(option_entry(parser.sections[head], name, getattr(chosen, head, None)))
    parts = [
        f"usage: {parser.usage or ' '.join([parser.prog, *places, '[options]'])}",
        parser.description,
        "\n".join(["example:", *map(command_lines, parser.example.split("\n"))]),
        "\n".join(["positional arguments:", *chain(*map(plain_entry, positional))]) if positional else None,
        "\n".join(["options:", *chain(*entries)]),
    ]
    if is_short:
        preset = "; with --preset NAME, the defaults are the preset's" if parser.preset is not None else ""
        sections = ", ".join(parser.section_names)
        parts.append(
            f"--help all      every option{preset}\n"
            f"--help SECTION  one section: {sections}, or a part of one: data.text"
        )
    elif parser.section_names:
        lines = (described(hint, name, getattr(chosen, name, None)) for name, hint in parser.sections.items())
        parts.append("\n".join(["options of the configuration, in YAML or as --SECTION.OPTION VALUE:", *chain(*lines)]))
    return "\n\n".join(part for part in parts if part is not None)


def command_lines(example: str) -> str:
    """A command line of several lines, for a shell, broken before options."""
    lines = [""]
    for part in re.split(r" (?=--)", example):
        if lines[-1] and len(lines[-1]) + len(part) > _width() - 6:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    return "  " + " \\\n    ".join(lines)


def _width() -> int:
    return min(100, max(80, shutil.get_terminal_size().columns)) - 2


def plain_entry(action: argparse.Action) -> Iterator[str]:
    """Lines for an option or a positional argument of argparse, with its default."""
    value = action.metavar or _METAVARS.get(getattr(action.type, "__name__", ""))
    value = value or ("|".join(action.choices) if action.choices else action.dest.rpartition(".")[2].upper())
    forms: dict[Any, str] = {0: "", "+": f"{value} ..."}
    option = " ".join([*action.option_strings[:1], forms.get(action.nargs, str(value))]).strip()
    shown = action.nargs != 0 and action.default not in (None, "", [], [""], argparse.SUPPRESS)
    return _entry(option, (action.help or "") + (f" (default: {_written(action.default)})" if shown else ""))


def is_section(hint: Any) -> bool:
    """Whether a field's type is a section of options."""
    return registry_of(hint) is not None or section_class(hint, {}) is not None


def listed(cls: Any) -> list[dataclasses.Field]:
    """The fields of a dataclass that are options of the command line: not those that growth or training records."""
    return [] if cls is None else [field for field in dataclasses.fields(cls) if not is_recorded(field)]


def option_entry(hint: Any, name: str, value: Any) -> Iterator[str]:
    """Lines for the option `name` below a section of the type `hint`; `value` is the preset's section, or None."""
    *path, last = name.split(".")[1:]
    for part in path:
        hint, value = _inner(hint, part, value)
    inner, chosen = _inner(hint, last, value)
    if (registry := registry_of(inner)) is not None:
        return _entry(f"--{name}", f"{', '.join(registry)} (default: {_kinds(registry, chosen)})")
    kinds = [*(type(part) for part in _parts(value)), *classes_of(hint)]
    cls = next(cls for cls in kinds if last in getattr(cls, "__dataclass_fields__", ()))
    return _entry(f"--{name}", f"{documented(cls)[last]}{_default(cls.__dataclass_fields__[last], value)}")


def described(hint: Any, prefix: str, value: Any = None, path: Collection[str] = ()) -> Iterator[str]:
    """Lines of help: a section's title, its options with their defaults, then the sections inside it.

    Args:
        hint: The section's type.
        prefix: Its name.
        value: The chosen preset's options of it; None: the defaults are those of its classes.
        path: Names of the section inside it that is shown alone; the last may be a kind.

    Raises:
        UnknownNameError: There is no such section.
    """
    registry = registry_of(hint)
    if path:
        name, *rest = path
        inner, part = _inner(hint, name, value)
        if registry is not None and name in registry and not rest:
            yield from _kind(registry, name, prefix, value)
        elif inner is not None and name != "kind" and is_section(inner):
            yield from described(inner, f"{prefix}.{name}", part, rest)
        else:
            sections = [
                field for cls in classes_of(hint) for field, type_ in hints_of(cls).items() if is_section(type_)
            ]
            raise unknown_name(f"section of {prefix}", name, [*(registry or ()), *sections])
        return
    if registry is None:
        cls = section_class(hint, {})
        yield from _section(f"{prefix}: {_first_line(cls)}", cls, prefix, (), value)
        return
    yield from ("", *_filled(f"{prefix}.kind: {', '.join(registry)} (default: {_kinds(registry, value)})", ""))
    if shared := registry.shared:
        first = next(iter(registry.options.values()))
        yield from _section(None, next(c for c in first.__mro__ if _own_fields(c) == shared), prefix, (), value)
    for kind, cls in registry.options.items():
        if len(listed(cls)) > len(shared):
            yield from _kind(registry, kind, prefix, value)


def _kind(registry: Any, kind: str, prefix: str, value: Any) -> Iterator[str]:
    cls = registry.options[kind]
    part = next((part for part in _parts(value) if type(part) is cls), None)
    yield from _section(f"{prefix}, kind {kind}: {_first_line(cls)}", cls, prefix, registry.shared, part)


def _parts(value: Any) -> list[Any]:
    """The options of a section, of which a list holds several."""
    return value if isinstance(value, list) else [value]


def _kinds(registry: Any, value: Any) -> str:
    """The kinds of a chosen section, else the default one."""
    kinds = [registry.kind_of(part) for part in _parts(value) if part is not None]
    return ", ".join(dict.fromkeys(kinds)) or registry.default


def classes_of(hint: Any) -> list[Any]:
    """The classes of a section's options: one for each kind."""
    registry = registry_of(hint)
    return [section_class(hint, {})] if registry is None else list(registry.options.values())


def _inner(hint: Any, name: str, value: Any) -> tuple[Any, Any]:
    """The type and the value of a section's field, of the first kind that has it; `kind` is the section itself."""
    if name == "kind":
        return hint, value
    found = (hints_of(cls)[name] for cls in classes_of(hint) if name in hints_of(cls))
    return next(found, None), getattr(_parts(value)[0], name, None)


def _section(title: str | None, cls: Any, prefix: str, left_out: Collection[str], value: Any) -> Iterator[str]:
    if title is not None:
        yield from ("", *_filled(title, ""))
    texts, inner = documented(cls), []
    for field in listed(cls):
        hint = hints_of(cls)[field.name]
        if field.name in left_out:
            continue
        if is_section(hint):
            inner.append((hint, f"{prefix}.{field.name}", getattr(value, field.name, None)))
        else:
            text = f"{texts.get(field.name, '')}{_default(field, value)}"
            yield from _entry(f"--{prefix}.{field.name}", text.strip())
    for section in inner:
        yield from described(*section)


def _entry(option: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(" ".join(text.split()), _width() - _COLUMN, break_on_hyphens=False) or [""]
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


def _default(field: dataclasses.Field, section: Any) -> str:
    """The field's value in the chosen preset's section, else its class's default."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    default = getattr(_parts(section)[0], field.name, default)
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
