"""The text of --help: usage, an example, and options with their defaults. Options of a configuration are listed by
section, with the texts of their classes' docstrings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Any, NamedTuple

from glissando.config import hints_of, registry_of, section_class
from glissando.errors import unknown_name

#: where an option's text begins
_COLUMN = 30
#: by the name of the function that reads an option, what stands for its value
_METAVARS = {
    "whole": "NUMBER", "number": "NUMBER", "numbers": "NUMBERS"
}  # fmt: skip


def help_text(parser: Any, section: str | None, chosen: Any) -> str:
    """What people use (section: None), `all`, or one section; `chosen` is a preset's configuration, or None."""
    types = parser.sections.items()
    options = [each for name, hint in types for each in options_of(hint, name, getattr(chosen, name, None))]
    if section not in (None, "all") and options:
        inside = [o for o in options if f"{o.section}.".startswith(f"{section}.") or section in o.sections]
        if not inside:
            raise unknown_name("section", section, ["all", *{place for o in options for place in o.sections}])
        return "\n".join(_grouped(inside)).lstrip()
    forms: dict[Any, str] = {"?": "[{}]", "*": "[{} ...]", "+": "{0} [{0} ...]", None: "{}"}
    positional = [action for action in parser._actions if not action.option_strings]
    places = [forms[action.nargs].format(action.metavar) for action in positional]
    is_short = section is None and bool(parser.sections)
    common = parser.common if is_short else ()
    plain = [a for a in parser._actions if a.option_strings and (not common or a.option_strings[0] in common)]
    entries = [plain_entry(action) for action in plain]
    # Of several kinds' options with one name, the preset's, or else the first.
    by_name = {option.name: option for option in reversed(options)}
    by_name |= {option.name: option for option in reversed(options) if option.is_chosen}
    entries += [_entry(name, by_name[name].text) for name in common if name in by_name]
    parts = [
        f"usage: {parser.usage or ' '.join([parser.prog, *places, '[options]'])}",
        parser.description,
        "\n".join(["example:", *map(command_lines, parser.example.split("\n"))]),
        "\n".join(["positional arguments:", *chain(*map(plain_entry, positional))]) if positional else None,
        "\n".join(["options:", *chain(*entries)]),
    ]
    if is_short:
        preset = "; with --preset NAME, the defaults are the preset's" if parser.preset is not None else ""
        sections = ", ".join(parser.sections)
        part = next((option.sections[1] for option in options if option.kinds), "")
        parts.append(
            f"--help all      every option{preset}\n"
            f"--help SECTION  one section: {sections};\n{'':16}or a part of one: {part}"
        )
    elif options:
        title = "options of the configuration, in YAML or as --SECTION.OPTION VALUE:"
        parts.append("\n".join([title, *_grouped(options)]))
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
    return [] if cls is None else [field for field in dataclasses.fields(cls) if "recorded" not in field.metadata]


class Option(NamedTuple):
    """One option of a configuration: its section, the kinds that have it (none: the section has no kinds, or all have
    it), what --help says of it, and whether a preset is chosen that has it."""

    section: str
    kinds: tuple[str, ...]
    title: str
    name: str
    text: str
    is_chosen: bool = False

    @property
    def sections(self) -> list[str]:
        """What --help SECTION may be for it."""
        return [self.section, *(f"{self.section}.{kind}" for kind in self.kinds)]


def options_of(hint: Any, section: str, value: Any = None) -> Iterator[Option]:
    """The options below a section of the type `hint`, those that several kinds inherit once; `value` is the chosen
    preset's section, else None."""
    registry = registry_of(hint)
    classes = {"": section_class(hint, {})} if registry is None else registry.options
    parts = [part for part in (value if isinstance(value, list) else [value]) if part is not None]
    if registry is not None:
        chosen = dict.fromkeys(map(registry.kind_of, parts)) or (registry.default,)
        name = section if "." in section else f"{section}.kind"
        yield Option(section, (), section, f"--{name}", f"{', '.join(registry)} (default: {', '.join(chosen)})")
    inner: dict[str, tuple[Any, Any]] = {}
    fields: dict[tuple[Any, str], dataclasses.Field] = {}
    kinds: dict[tuple[Any, str], list[str]] = {}
    for kind, cls in classes.items():
        for field in listed(cls):
            declares = (base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
            key = cls if registry is None else next(declares, cls), field.name
            fields.setdefault(key, field)
            kinds.setdefault(key, []).append(kind)
    for (cls, _), field in fields.items():
        name, those = f"{section}.{field.name}", kinds[cls, field.name]
        part = next((part for part in parts if isinstance(part, cls)), None)
        if is_section(hints_of(cls)[field.name]):
            inner.setdefault(name, (hints_of(cls)[field.name], getattr(part, field.name, None)))
            continue
        some = () if len(those) == len(classes) else tuple(those)
        which = f", kind{'s' * (len(some) > 1)} {', '.join(some)}" if some else ""
        text = f"{documented(cls).get(field.name, '')}{_default(field, part)}".strip()
        yield Option(section, some, f"{section}{which}: {_first_line(cls)}", f"--{name}", text, part is not None)
    for name, (type_, part) in inner.items():
        yield from options_of(type_, name, part)


def _grouped(options: Iterable[Option]) -> Iterator[str]:
    """Lines of options below the titles of their sections."""
    for title, group in groupby(options, lambda option: option.title):
        yield from ("", *textwrap.wrap(title, _width(), subsequent_indent="  ", break_on_hyphens=False))
        for option in group:
            yield from _entry(option.name, option.text)


def _entry(option: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(" ".join(text.split()), _width() - _COLUMN, break_on_hyphens=False) or [""]
    head = f"  {option}"
    if len(head) > _COLUMN - 2:
        yield head
        head = ""
    for line in lines:
        yield f"{head:{_COLUMN}}{line}".rstrip()
        head = ""


def _first_line(cls: Any) -> str:
    about: str = getattr(cls, "title", None) or (cls.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(about.split()).rstrip(".:")


def _default(field: dataclasses.Field, section: Any) -> str:
    """The field's value in the chosen preset's section, else its class's default."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    default = getattr(section, field.name, default)
    if default is None or default is dataclasses.MISSING:
        return ""
    return f" (default: {_written(default)})"


def _written(value: Any) -> str:
    """A value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


def documented(cls: type) -> dict[str, str]:
    """The text of each field in a dataclass's docstring: a line `name   text`, or `name: text` under `Attributes:`."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        names: list[str] = []
        entries = re.compile(r"    (\w+(?:, \w+)*)\s{2,}(\S.*)$")
        for line in (base.__doc__ or "").splitlines() if dataclasses.is_dataclass(base) else ():
            if line == "    Attributes:":
                entries = re.compile(r"        (\w+): (\S.*)$")
            entry = entries.match(line)
            if entry:
                names = entry[1].split(", ")
                sentences |= dict.fromkeys(names, entry[2])
            elif names and re.match(r"\s{8,}\S", line):
                sentences |= {name: f"{sentences[name]} {line.strip()}" for name in names}
            else:
                names = []
    return sentences
