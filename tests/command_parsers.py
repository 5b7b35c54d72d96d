"""Where the commands find the function that reads their options, for tests that put another in its place."""

from __future__ import annotations

import sys
from types import ModuleType

from glissando.cli import function_of, options


def parsing(command: str) -> ModuleType:
    """The module whose `parse` a command calls: its own, or that of the command line, from which it is imported where
    the command runs."""
    module = sys.modules[function_of(command).__module__]
    return module if hasattr(module, "parse") else options
