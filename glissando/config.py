"""Options: dataclasses read and checked by pydantic, and sections whose `kind` picks the class that reads the rest.

A section such as `mixer: {kind: tau, heads: 8}` is a tagged union: `kind` names a registered class, the other keys are
the fields of that class's options, and an option of another kind cannot be written. A bare name, `mixer: tau`, is the
kind with its defaults. Registries stay open: a name can be added from any file.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from types import UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, cast, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError

from glissando.errors import ConfigError, nearest, unknown_name

T = TypeVar("T")

_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)


def starting(*, default: Any, of: str) -> Any:
    """A field that sets where trained numbers start, those with `of` in their names; it changes nothing of a model
    whose weights are loaded."""
    return dataclasses.field(default=default, metadata={"starts": of})


def recorded(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING) -> Any:
    """A field that growth or training writes into a configuration: no option of the command line."""
    return dataclasses.field(default=default, default_factory=default_factory, metadata={"recorded": True})


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, starting, recorded))
def options(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass whose values are checked when it is built: ConfigError for those that do not fit, and for
    unknown names."""
    made = pydantic.dataclasses.dataclass(cls, config=_CONFIG, kw_only=True)
    build = made.__init__

    @wraps(build)
    def checked(self: Any, **values: Any) -> None:
        require_known(made, values)
        try:
            build(self, **values)
        except ValidationError as error:
            raise ConfigError(_explained(error, values, "")) from error

    made.__init__ = checked  # type: ignore[method-assign]
    return made  # type: ignore[return-value]


class Registry(Generic[T]):
    """Classes by name, each with the dataclass of its options.

    what     what is registered, for messages: "mixer"
    default  the kind of a section that names none
    shared   names of options that every kind has: they are kept when a configuration changes the kind
    group    of entry points of installed packages: one that has the name of a kind is imported when the kind is first
             asked for, and registers it
    named    the section that a bare text stands for
    """

    def __init__(
        self, what: str, default: str, shared: type | None = None, group: str | None = None,
        named: Callable[[str], dict[str, str]] = lambda text: {"kind": text},
    ) -> None:  # fmt: skip
        self.what, self.default, self.group, self.named = what, default, group, named
        self.shared = frozenset() if shared is None else frozenset(f.name for f in dataclasses.fields(shared))
        self._classes: dict[str, Any] = {}
        self.options: dict[str, type] = {}

    def register(self, name: str, options: type) -> Callable[[type[T]], type[T]]:
        """A decorator that registers a class under a name, so that configurations and the command line can use it.

        Args:
            name: The kind that selects the class in a configuration.
            options: Dataclass of its options. The class is built with an instance of it as its last argument.

        Raises:
            ConfigError: Another class has the name, or `options` is not a dataclass.
        """

        def add(cls: type[T]) -> type[T]:
            self.add(name, options, cls)
            return cls

        return add

    def add(self, name: str, options: type, target: Any) -> None:
        """`target` is the class, or "module:class" to import it when it is first needed."""
        if not dataclasses.is_dataclass(options):
            raise ConfigError(f"the options of {self.what} {name!r} must be a dataclass, got {options!r}")
        if "kind" in options.__dataclass_fields__:
            raise ConfigError(f"the options of {self.what} {name!r} cannot have a field `kind`: it is the name")
        before = _qualified(self._classes.get(name, target))
        if before != _qualified(target):
            raise ConfigError(f"{self.what} {name!r} is registered already, as {before}; choose another name")
        if other := next((n for n, cls in self.options.items() if cls is options and n != name), None):
            raise ConfigError(
                f"{self.what} {name!r} has the options of {self.what} {other!r}, and could not be known from it when "
                f"they are saved: give it a dataclass of its own, which may inherit from {options.__name__}"
            )
        if not hasattr(options, "__pydantic_validator__"):
            options.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
        self._classes[name], self.options[name] = target, options

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, name: str) -> type[T]:
        """The class. Raises UnknownNameError for a name that is not registered."""
        self.require(name)
        target = self._classes[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = self._classes[name] = getattr(importlib.import_module(module), attribute)
        return target

    def require(self, name: str) -> None:
        """Raise UnknownNameError, naming the nearest, unless `name` is registered or an installed package has it."""
        if self.options_of(name) is None:
            raise unknown_name(self.what, str(name), {*self._classes, *(point.name for point in self._installed())})

    def options_of(self, name: Any) -> type | None:
        """The dataclass of a kind's options; None for an unknown kind. Raises ConfigError where an installed package
        names the kind among its entry points and does not register it."""
        if not isinstance(name, str):
            return None
        for point in self._installed(name=name) if name not in self.options else ():
            point.load()
            if name not in self.options:
                raise ConfigError(
                    f"{point.value}, the entry point of {self.what} {name!r}, registers no {self.what} of that name: "
                    f'it has to import the module with @glissando.register_{self.what}("{name}", Options)'
                )
        return self.options.get(name)

    def _installed(self, **named: Any) -> Any:
        """The entry points of the group."""
        from importlib.metadata import entry_points

        return () if self.group is None else entry_points(group=self.group, **named)

    def kind_of(self, options: Any) -> str:
        """The name under which the class of these options is registered. Raises ConfigError for other options."""
        if kind := next((name for name, cls in self.options.items() if type(options) is cls), None):
            return kind
        raise ConfigError(f"expected the options of a registered {self.what}, got {options!r}")

    def kept(self, *kinds: Any) -> frozenset[str]:
        """Options that a change of kind keeps: those of all kinds, and of common bases with `kept = True`."""
        one, other = (getattr(self.options.get(str(kind)), "__mro__", ()) for kind in kinds)
        common = (cls for cls in one if cls in other and vars(cls).get("kept"))
        return self.shared.union(*(getattr(cls, "__dataclass_fields__", ()) for cls in common))

    def class_of(self, options: Any) -> type[T]:
        return self[self.kind_of(options)]

    def read(self, value: Any) -> Any:
        """Options from {"kind": name, ...}, a bare name, or options as they are."""
        if type(value) in self.options.values():
            return value
        if isinstance(value, str):
            value = self.named(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a {self.what}, such as {{kind: {next(iter(self))}}}, got {value!r}")
        kind = value.get("kind", self.default)
        self.require(kind)
        return _adapter(self.options[kind]).validate_python({k: v for k, v in value.items() if k != "kind"})

    def section(self) -> Any:
        """The type of a field that holds one of these options."""
        return Annotated[Any, PlainValidator(self.read), self]

    def sections(self) -> Any:
        """The type of a field that holds one of these options, or a list of them."""

        def read(value: Any) -> Any:
            if not isinstance(value, list | tuple):
                return self.read(value)
            if not value:
                raise ValueError(f"expected at least one {self.what}, got an empty list")
            return _adapter(list[self.section()]).validate_python(list(value))  # type: ignore[misc]

        return Annotated[Any, PlainValidator(read), self]


def _qualified(target: Any) -> str:
    return target.replace(":", ".") if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint)


# ---------------------------------------------------------------------- reading and writing


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from nested `values`; absent keys take their defaults.

    Raises ConfigError for an unknown key (with the nearest known one) or a value that does not fit; `where` begins the
    path in its message.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or cls.__name__}: expected a mapping of options, got {values!r}")
    require_known(cls, values, where)
    try:
        return _adapter(cast(Any, cls)).validate_python(dict(values))
    except ValidationError as error:
        raise ConfigError(_explained(error, values, where)) from error


def to_dict(config: Any, hint: Any = None) -> Any:
    """Options as plain nested values, ready for YAML. `hint` is the type of a field that holds them: a section of a
    registry begins with its `kind`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        registry = registry_of(hint)
        kind = {} if registry is None else {"kind": registry.kind_of(config)}
        return kind | {name: to_dict(getattr(config, name), inner) for name, inner in hints_of(type(config)).items()}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value, hint) for value in config]
    return config


def require_known(hint: Any, values: Any, where: str = "") -> None:
    """Raise ConfigError for an option that its section, of the type `hint`, does not have."""
    for section_hint, section, path in _sections(hint, values, where, partial=False):
        if section_class(section_hint, section) is None:
            continue
        registry, hints = registry_of(section_hint), _hints(section_hint, section)
        for name in section:
            if name not in hints and (registry is None or name != "kind"):
                raise _unknown_option(registry, section, f"{path}.{name}".lstrip("."), str(name), hints)


def _unknown_option(registry: Registry | None, section: Any, path: str, name: str, known: Iterable[str]) -> ConfigError:
    close = nearest(name, known)
    hint = f" Did you mean {close!r}?" if close else ""
    kinds = [] if registry is None else [kind for kind, cls in registry.options.items() if name in hints_of(cls)]
    if registry is not None and kinds:
        kind = section.get("kind", registry.default)
        hint = f" It is one of {registry.what} {', '.join(kinds)}, and the kind is {kind}."
    return ConfigError(f"unknown option {path!r}.{hint} Known here: {', '.join(known)}.")


def _sections(
    hint: Any, values: Any, where: str = "", *, partial: bool
) -> Iterator[tuple[Any, Mapping[str, Any], str]]:
    """Each section in `values` of the type `hint`: its type, its options and its dotted path, outer ones first.

    partial  also those that change another's options, such as a stage's, whose kind is not in them
    """
    if isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _sections(hint, value, f"{where}[{number + 1}]", partial=partial)
    registry = registry_of(hint)
    if registry is not None and isinstance(values, str):
        values = registry.named(values)
    if not isinstance(values, Mapping) or (
        not partial and any(typing.get_origin(each) is dict for each in _parts(hint))
    ):
        return
    yield hint, values, where
    for name, inner in _hints(hint, values).items():
        if name in values:
            yield from _sections(inner, values[name], f"{where}.{name}".lstrip("."), partial=partial)


def _explained(error: ValidationError, values: Any, where: str) -> str:
    """The first error in one line: the option's path, what was given and what was expected. If a union has no member
    that fits, the error inside the member that fits best."""
    every = [(_path(each["loc"], values, where), each) for each in error.errors(include_url=False)]
    path, first = max((each for each in every if each[0].startswith(every[0][0])), key=lambda each: len(each[1]["loc"]))
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind in ("missing", "missing_argument"):
        last = first["loc"][-1]
        return (
            f"{path}: entry {last + 1} is missing" if isinstance(last, int) else f"{path} is missing: it has no default"
        )
    if kind == "value_error":
        cause = context["error"]
        return str(cause) if isinstance(cause, ConfigError) else f"{path}: {cause}"
    expected = _EXPECTED.get(kind, first["msg"].removeprefix("Input should be ")).format_map(context)
    hint = ""
    if kind == "literal_error":
        close = nearest(str(value), re.findall(r"'([^']*)'", context["expected"]))
        hint = f". Did you mean {close!r}?" if close else ""
    elif value is None:
        hint = "; leave it out for the default"
    elif kind == "list_type":
        hint = """; a list is written as '["a", "b"]'"""
    return f"{path}: expected {expected}, got {'null' if value is None else repr(value)}{hint}"


#: what was expected, by the kind of pydantic's error
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"), "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"), "string_type": "a text", "list_type": "a list",
    "dataclass_type": "a mapping of options", "literal_error": "{expected}",
    "greater_than": "a number greater than {gt:g}", "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number less than {lt:g}", "less_than_equal": "a number of at most {le:g}",
}  # fmt: skip


def _path(loc: tuple, values: Any, where: str) -> str:
    """The dotted path of an error's location in `values`, without the members of unions that pydantic names in it."""
    path = where
    for key in loc:
        if isinstance(values, list | tuple) and isinstance(key, int) and key < len(values):
            path, values = f"{path}[{key + 1}]", values[key]
        elif isinstance(key, str) and isinstance(values, Mapping) and (key in values or key == loc[-1]):
            path, values = f"{path}.{key}".lstrip("."), values.get(key)
        elif isinstance(values, str) and key == loc[-1] and isinstance(key, str):  # a kind by its bare name
            path = f"{path}.{key}".lstrip(".")
    return path


def section_class(hint: Any, value: Any) -> Any:
    """The dataclass that reads `value` under a type hint, or None."""
    registry = registry_of(hint)
    if registry is not None:
        kind = value.get("kind", registry.default) if isinstance(value, Mapping) else value
        return registry.options_of(kind)
    return next((part for part in _parts(hint) if isinstance(part, type) and dataclasses.is_dataclass(part)), None)


def registry_of(hint: Any) -> Registry | None:
    """The registry of a section's type, or of a list or a union of such; None for other types."""
    return next((part for part in _parts(hint) if isinstance(part, Registry)), None)


def _parts(hint: Any) -> Iterator[Any]:
    """A type, and what a union, a list or an annotated type is made of."""
    yield hint
    if typing.get_origin(hint) in (Annotated, typing.Union, UnionType, list, tuple):
        for part in typing.get_args(hint):
            yield from _parts(part)


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; none for None."""
    if cls is None:
        return {}
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def merge(hint: Any, *updates: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the type `hint`, merged left to right; a dotted name such as "depth.layers" reaches inside a section.

    The types say what a section is: a name that some mixer gives to an option of its own means nothing elsewhere.
    Another `kind` takes the place of a section, but for what `Registry.kept` names. A dotted name whose section is not
    known yet stays as it is, for a later merge.

    Args:
        hint: A dataclass of options, the type of a registry's section, or a mapping of names to such types.

    Raises TypeError for options in the place of their type, which would be left out without an error.
    """
    if isinstance(hint, Mapping) and any(isinstance(part, Mapping | str) for part in hint.values()):
        raise TypeError(f"merge takes the type of the options first, such as RunConfig; got options: {sorted(hint)}")
    merged: dict[str, Any] = {}
    for update in updates:
        merged = _merged(hint, merged, update)
    return merged


def _merged(hint: Any, old: Any, new: Any) -> Any:
    registry = registry_of(hint)
    if registry is not None:
        old, new = (registry.named(value) if isinstance(value, str) else value for value in (old, new))
        if isinstance(old, list) and isinstance(new, Mapping) and "kind" not in new:
            return _over_members(registry, hint, old, new)
    if not isinstance(new, Mapping):
        return new
    merged: dict[str, Any] = dict(old) if isinstance(old, Mapping) else {}
    if registry is not None:
        kind = merged.get("kind", registry.default)
        if new.get("kind", kind) != kind:
            merged = {name: merged[name] for name in merged if name in registry.kept(kind, new["kind"])}
    hints = _hints(hint, {**merged, **new})
    for name, values in _by_option(hints, new).items():
        for value in values:
            merged[name] = _merged(hints.get(name), merged.get(name), value)
    return merged


def _hints(hint: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The types of a section's options by name; none where `hint` is no section."""
    return hint if isinstance(hint, Mapping) else hints_of(section_class(hint, values))


def _by_option(hints: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values for each option in the order in which they apply: a whole section before what is changed inside it."""
    whole: dict[str, list[Any]] = {}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        if dot and head in hints:
            inside.setdefault(head, {})[rest] = value
        elif isinstance(value, Mapping):
            inside.setdefault(key, {}).update(value)
        else:
            whole[key] = [value]
    return {name: [*whole.get(name, []), *([inside[name]] if name in inside else [])] for name in {**whole, **inside}}


def _over_members(registry: Registry, hint: Any, members: list[Any], new: Mapping[str, Any]) -> list[Any]:
    """Each option goes to those members of a list whose kind has it; to all, and is refused there, where none has."""
    has = [hints_of(section_class(hint, registry.named(each) if isinstance(each, str) else each)) for each in members]
    known = set().union(*has)
    first = {name: str(name).partition(".")[0] for name in new}
    return [
        _merged(hint, member, {k: v for k, v in new.items() if first[k] in names or first[k] not in known})
        for member, names in zip(members, has, strict=True)
    ]


def unregistered(hint: Any, values: Any) -> list[str]:
    """The kinds that `values` of the type `hint` name and no registry has, such as "mixer 'average'"."""
    kinds = [(registry_of(each), section.get("kind")) for each, section, _ in _sections(hint, values, partial=True)]
    return [f"{r.what} {kind!r}" for r, kind in kinds if r is not None and isinstance(kind, str) and kind not in r]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys: as options are named."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return items


# ---------------------------------------------------------------------- options that only a new model reads


class Difference(NamedTuple):
    """A `starting` field in which a configuration differs from a saved one, its dotted name, and what it starts."""

    path: str
    section: Any  # which has the field
    field: dataclasses.Field
    value: Any
    saved: Any

    @property
    def starts(self) -> str:
        return self.field.metadata["starts"]


def starting_differences(config: Any, saved: Any, where: str) -> list[Difference]:
    """The `starting` fields in which two instances of one dataclass differ; sections of two kinds are not compared."""
    if isinstance(config, list) and isinstance(saved, list):
        pairs = enumerate(zip(config, saved, strict=False))
        return [each for number, pair in pairs for each in starting_differences(*pair, f"{where}.{number}")]
    if type(config) is not type(saved) or not dataclasses.is_dataclass(config):
        return []
    differences: list[Difference] = []
    for field in dataclasses.fields(config):
        path, value, before = f"{where}.{field.name}", getattr(config, field.name), getattr(saved, field.name)
        differences += starting_differences(value, before, path)
        if "starts" in field.metadata and value not in (before, "saved"):  # saved: as the weights have it
            differences.append(Difference(path, config, field, value, before))
    return differences
