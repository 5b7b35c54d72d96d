"""Plain values of YAML files. A file may come from anybody, so that its size and its aliases are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glissando.errors import ConfigError

#: a run's config.yaml has some 100 values, and some 5 for each parameter of a grown model
_YAML_BYTES, _YAML_NODES = 1 << 20, 50_000


def read_options(path: str | Path, shown: str | None = None) -> Mapping[str, Any]:
    """The nested options in a YAML file; `shown`: how the user named it. Raises ConfigError for what cannot be read or
    is no mapping."""
    shown = shown or str(path)
    try:
        values = read_yaml(Path(path).read_bytes())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"cannot read {shown}: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{shown} must hold a mapping of options, such as `preset: transformer-nano`")
    return values


def read_yaml(text: str | bytes) -> Any:
    """Plain values of a YAML text, whose size and aliases are bounded: a small text can stand for terabytes.

    Raises ConfigError that says what is wrong with it.
    """
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        """Number of values, those of aliases counted each time."""
        if isinstance(node, tuple):
            return sum(map(size, node))
        if id(node) not in sizes:
            sizes[id(node)] = _YAML_NODES  # inside itself, it would never end
            sizes[id(node)] = 1 + (0 if isinstance(node.value, str) else sum(map(size, node.value)))
        problem = (
            f"more than {_YAML_NODES:,} values, those of aliases counted" if sizes[id(node)] > _YAML_NODES else None
        )
        if node.tag.endswith(":int") and len(node.value) > 20:
            problem = "a whole number of more than 20 characters"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return sizes[id(node)]

    if len(text) > _YAML_BYTES:
        raise ConfigError(f"{len(text):,} bytes of YAML; at most {_YAML_BYTES:,} are read")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return None if node is None or not size(node) else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # PyYAML raises what it meets: an IndexError for `!!int ""`, a RecursionError
        raise ConfigError(f"a value that is no YAML ({error!r})") from error
