"""Named points of the design space: one YAML file each, with the model and its training habits."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from glissando.errors import unknown_name

#: what `glissando train` takes where none is named
RECOMMENDED = "spectral-delta-nano"


@cache
def preset_names(folder: str = "") -> tuple[str, ...]:
    """All presets of language models, or those in a folder, `series`, in alphabetical order."""
    files = (resources.files(__name__) / folder).iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def load_preset(name: str, folder: str = "") -> dict[str, Any]:
    """The preset's options: `model`, and training sections for `glissando train`.

    Raises UnknownNameError, naming the nearest preset.
    """
    said = ("about", "parameters", "text", "sampling")
    return {part: values for part, values in _read(name, folder).items() if part not in said}


def preset_note(name: str | None, key: str, folder: str = "") -> Any:
    """What a preset's file says of it beside its options; None for what it does not say, or another name.

    Args:
        name: The preset.
        key: `about`, a line; `parameters`, how many its model has; `text`, what it was published with, if that is a
            file of the user's; `sampling`, how its publication draws, as keywords of `glissando.generate`.
        folder: As of `preset_names`.
    """
    return _read(name, folder).get(key) if name in preset_names(folder) else None


def _read(name: str, folder: str = "") -> dict[str, Any]:
    import yaml

    if name not in preset_names(folder):
        raise unknown_name("preset", name, preset_names(folder))
    return yaml.safe_load((resources.files(__name__) / folder / f"{name}.yaml").read_text(encoding="utf-8"))
