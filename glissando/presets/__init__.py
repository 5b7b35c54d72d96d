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


def preset_about(name: str, folder: str = "") -> str:
    """What the preset is, in a line."""
    return _read(name, folder)["about"]


def preset_text(name: str | None) -> str | None:
    """The text that a preset was published with, in words, if it trains on a file of the user's."""
    return _read(name).get("text") if name in preset_names() else None


def preset_sampling(name: str | None) -> dict[str, Any]:
    """How the preset's publication draws text, as keywords of `glissando.generate`; nothing where it does not say."""
    return _read(name).get("sampling", {}) if name in preset_names() else {}


def preset_parameters(name: str) -> int:
    """How many parameters the preset's model has, as its file records it: no model is built for it."""
    return _read(name)["parameters"]


def _read(name: str, folder: str = "") -> dict[str, Any]:
    import yaml

    if name not in preset_names(folder):
        raise unknown_name("preset", name, preset_names(folder))
    return yaml.safe_load((resources.files(__name__) / folder / f"{name}.yaml").read_text(encoding="utf-8"))
