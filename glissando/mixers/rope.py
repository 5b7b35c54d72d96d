"""The options of RoPE, which several mixers have under the same names."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from glissando.errors import ConfigError


def check_rope(mixer: str, options: Any) -> None:
    """Raise ConfigError for frequencies that cannot be, and for any `rope_...` that is set where `rope` is off."""
    if not (math.isfinite(options.rope_base) and options.rope_base > 1):
        raise ConfigError(f"{mixer}.rope_base must be above 1, got {options.rope_base}")
    for field in fields(options):
        value = getattr(options, field.name)
        if not options.rope and field.name.startswith("rope_") and value != field.default:
            raise ConfigError(f"{mixer}.{field.name} {value} needs {mixer}.rope: true; without it leave it out")
