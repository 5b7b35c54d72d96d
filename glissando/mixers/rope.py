"""The options of RoPE, which several mixers have under the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from glissando.errors import ConfigError

#: the slowest rotation is about 1 over it
ROPE_BASE = 10000.0


def check_rope(mixer: str, options: Any) -> None:
    """Raise ConfigError for any `rope_...` that is set where `rope` is off."""
    for field in fields(options):
        value = getattr(options, field.name)
        if not options.rope and field.name.startswith("rope_") and value != field.default:
            raise ConfigError(f"{mixer}.{field.name} {value} needs {mixer}.rope: true; without it leave it out")
