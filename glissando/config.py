"""Typed configuration: dataclasses, filled from mappings with the user's mistakes named."""

from __future__ import annotations

import copy
import dataclasses
import re
import typing
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from glissando.errors import ConfigError, nearest, unknown_name

T = TypeVar("T")


def starting(default: Any, of: str, **needs: Any) -> Any:
    """A field that says where trained numbers start, those with `of` in their names, and nothing of a model that has
    them; `needs` as in `used_with`."""
    return dataclasses.field(default=default, metadata={"starts": of, "needs": needs})


def used_with(default: Any, **needs: Any) -> Any:
    """A field that does something only where its neighbours are so: `kind="plateau"`, or `kind=("periodic", "drift")`.

    A preset may have it all the same, for its owner to be switched; `require_used` looks at what was typed.
    """
    return dataclasses.field(default=default, metadata={"needs": needs})


def require_used(config: Any, name: str, told: str | None = None) -> None:
    """Raise ConfigError for an option that would do nothing beside the others: `training.schedule.plateau_cuts` with
    another kind of schedule. `told`: how it was typed."""
    above, _, last = name.rpartition(".")
    section = config
    for part in above.split(".") if above else []:
        section = getattr(section, part, None)
    if not dataclasses.is_dataclass(section):
        return
    needs: dict[str, Any] = next(
        (f.metadata.get("needs", {}) for f in dataclasses.fields(section) if f.name == last), {}
    )
    for other, wanted in needs.items():
        now, fit = getattr(section, other), wanted if isinstance(wanted, tuple) else (wanted,)
        if now not in fit:
            shown = " or ".join(map(_as_yaml, fit))
            raise ConfigError(
                f"{told or name} would do nothing: {above}.{other} is {_as_yaml(now)}. Leave it out, or give "
                f"--{above}.{other} {shown}"
            )


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def require_chosen(
    given: str, above: str, known: Collection[str], used: Collection[str], chooser: str, now: object
) -> None:
    """Raise ConfigError for an option of a section `above`.NAME that is known and not used, as `chooser` is `now`."""
    where, _, name = given.removeprefix("--").rpartition(".")[0].rpartition(".")
    if where == above and name in known and name not in used:
        raise ConfigError(f"{given} would do nothing: {chooser} is {now}. Leave it out, or choose --{chooser} {name}")


class Difference(NamedTuple):
    """A `starting` field in which two configurations differ, its dotted name, and what it starts."""

    path: str
    section: Any  # of ours, which has the field
    field: dataclasses.Field
    ours: Any
    theirs: Any

    @property
    def starts(self) -> str:
        return self.field.metadata["starts"]


def starting_differences(ours: Any, theirs: Any, where: str) -> list[Difference]:
    """The `starting` fields in which two instances of one dataclass differ."""
    found: list[Difference] = []
    for field in dataclasses.fields(ours):
        path, mine, other = f"{where}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name)
        if dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(other):
            found += starting_differences(mine, other, path)
        elif "starts" in field.metadata and mine != other:
            found.append(Difference(path, ours, field, mine, other))
    return found


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain nested dictionaries, ready for YAML."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from nested `values`; absent keys take their defaults.

    Raises ConfigError for an unknown key (with the nearest known one) or a value of the wrong type.
    """
    check_keys(cls, values, where)
    return _filled(cls, values, where or cls.__name__)


def _filled(cls: type[T], values: Mapping[str, Any], where: str, above: str = "") -> T:
    """Value by value, sections by themselves: a parser for the whole of a configuration would look at all its hundred
    defaults whatever is given."""
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for name, value in values.items():
        hint, path = hints[name], f"{above}{name}"
        section = section_of(hint)
        if section is not None and isinstance(value, str) and hasattr(section, "from_text"):
            value = section.from_text(value)
        if section is not None and isinstance(value, Mapping):
            given[name] = _filled(section, value, where, f"{path}.")
        else:
            given[name] = _value(hint, value, where, path)
    try:
        return cls(**given)
    except TypeError as error:
        required = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in given]  # type: ignore[arg-type]
        if not required:
            raise
        missing = ", ".join(above + name for name in required)
        raise ConfigError(f"{where}: the following arguments are required: {missing}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is field.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, where: str, path: str) -> Any:
    """What `value` is as a `hint`: "8" is the int 8."""
    from jsonargparse import ArgumentError

    try:
        parser: Any = _parser(hint)
        # A copy: the parser writes into the lists and mappings that it is given.
        made = parser.instantiate(parser.parse_object({"value": copy.deepcopy(value)}))["value"]
    except (ArgumentError, TypeError) as error:
        told = readable(str(error)).replace('"value', f'"{path}', 1)  # the option's name, which comes first
        raise ConfigError(f"{where}: {told}") from error
    # A text that YAML would read as nothing (#1.txt, ~) is a text all the same: the parser has made it None.
    return value if made is None and isinstance(value, str) else made


@lru_cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@lru_cache
def _parser(hint: Any) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def readable(message: str) -> str:
    """jsonargparse's message in one line, in a user's words and not in those of its type system."""
    line = " ".join(message.split())
    line = re.sub(
        r"Does not validate against any of the Union subtypes Subtypes: \[(.*)\] Errors: .* Given value type: "
        r"<class '(\w+)'> Given value: (.*)$",
        lambda found: f"expected {_kinds(found[1])}, got {repr(found[3]) if found[2] == 'str' else found[3]}",
        line,
    )
    line = re.sub(
        r"Expected a (typing\.Literal\[.*?\])\. Got value: ", lambda found: f"expected {_kinds(found[1])}, got ", line
    )
    line = re.sub(
        r"Expected a <class 'list'>\. Got value: (\S+)", r"""expected a list, such as '["\1"]', got \1""", line
    )
    line = re.sub(r"Expected a <class '(\w+)'>\. Got value: ", r"expected \1, got ", line)
    return line.replace("Parser key ", "option ")


def _kinds(types: str) -> str:
    """ "[<class 'int'>, <class 'NoneType'>]" as "int or null"."""
    shown = re.sub(r"typing\.Literal\[(.*?)\]", lambda found: f"one of {found[1]}", types)
    shown = re.sub(r", (?=<class|list|one of)", " or ", shown)
    shown = re.sub(r"list\[\w+\]", "a list", shown)
    return re.sub(r"<class '(\w+)'>", r"\1", shown).replace("NoneType", "null")


def check_keys(cls: type, values: Any, where: str = "") -> None:
    """Raise ConfigError for the first key of nested `values` that `cls` does not have, naming the nearest, and for a
    null where there can be none."""
    if isinstance(values, str) and hasattr(cls, "from_text"):
        return
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or cls.__name__}: expected a mapping of options, got {values!r}")
    known = _hints(cls)
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = nearest(str(key), known)
            hint = f" Did you mean {close!r}?" if close else ""
            raise ConfigError(f"unknown option {path!r}.{hint} Known here: {', '.join(known)}.")
        if value is None and not _optional(known[key]):
            raise ConfigError(f"{path}: expected {_expected(known[key])}, got null; leave it out for the default")
        nested = section_of(known[key])
        if nested is None or value is None:
            continue
        if typing.get_origin(known[key]) is list:
            if not isinstance(value, list):
                raise ConfigError(f"{path}: expected a list, got {value!r}")
            for number, item in enumerate(value, 1):
                check_keys(nested, item, f"{path}[{number}]")
        else:
            check_keys(nested, value, path)


def check_choices(config: Any, where: str) -> None:
    """Raise UnknownNameError for a field of the dataclass, or of a section of it, that is none of its Literal's values.

    `from_dict` finds such a value by itself; in a dataclass that Python built, nothing else looks.
    """
    for name, known in _choices(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if value not in known:
            raise unknown_name(f"{where}.{name}", str(value), [choice for choice in known if choice is not None])
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if dataclasses.is_dataclass(section):
            check_choices(section, f"{where}.{field.name}")


@lru_cache
def _choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """What each field of the dataclass may be whose type is a Literal, or a Literal or None."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        options = [hint, *typing.get_args(hint)]
        known = [value for o in options if typing.get_origin(o) is typing.Literal for value in typing.get_args(o)]
        if known:
            found[name] = (*known, *[None for o in options if o is type(None)])
    return found


def _optional(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint) or typing.get_origin(hint) is list


def _expected(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a mapping of options"
    return hint.__name__ if isinstance(hint, type) else _kinds(str(hint)).replace(" | ", " or ")


def section_of(hint: Any) -> type | None:
    """The dataclass behind a type hint such as `Section` or `Section | None`."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and isinstance(candidate, type):
            return candidate
    return None


def merge(*updates: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged left to right; a dotted key such as "depth.layers" reaches inside."""
    merged: dict[str, Any] = {}
    for update in updates:
        for key, value in update.items():
            head, _, rest = key.partition(".")
            if rest:
                value = {rest: value}
            if isinstance(value, Mapping):
                inside = merged.get(head)
                merged[head] = merge(inside if isinstance(inside, Mapping) else {}, value)
            else:
                merged[head] = value
    return merged


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys: as options are named."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return items


def read_options(path: str | Path, told: str | None = None) -> Mapping[str, Any]:
    """The nested options in a YAML file; `told`: how it was given. Raises ConfigError for what cannot be read or is no
    mapping."""
    import yaml

    told = told or str(path)
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {told}: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{told} must hold a mapping of options, such as `preset: transformer-nano`")
    return values
