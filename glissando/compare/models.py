"""The models of a comparison by name: presets, YAML files of options as `glissando train --config` reads them, options
given in code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glissando.config import from_dict, merge
from glissando.errors import ConfigError
from glissando.presets import load_preset, preset_names
from glissando.training.config import RunConfig
from glissando.training.length import BUDGETS
from glissando.yaml_files import read_options

#: a preset's name, the path of a YAML file, or options as a YAML file holds
Given = str | Mapping[str, Any]

_SUFFIXES = (".yaml", ".yml")


def read_models(named: Sequence[str] | Mapping[str, Given]) -> dict[str, dict[str, Any]]:
    """Name -> its sections model, data and training, and `preset`.

    A file in a list has its own name, without the suffix.

    Raises ConfigError for a file that cannot be read, for an option that a comparison gives to all models, and for a
    name that is given twice or is a preset's; UnknownNameError for an unknown preset.
    """
    models: dict[str, dict[str, Any]] = {}
    for number, (name, what) in enumerate(named.items() if isinstance(named, Mapping) else map(_named, named)):
        if name in models:
            raise ConfigError(
                f"two models have the name {name!r}: {', '.join(named)}; give each once, and each file its own name"
            )
        if isinstance(what, str) and Path(what).suffix not in _SUFFIXES:
            models[name] = {"preset": what, **load_preset(what)}
            continue
        if name in preset_names():
            raise ConfigError(f"{name} is the name of a preset, which this model is not: give it another name")
        source = name if isinstance(what, Mapping) else what
        values = what if isinstance(what, Mapping) else read_options(Path(what).expanduser())
        models[name] = _over_its_preset(values, source, is_first=number == 0)
    return models


def _named(text: str) -> tuple[str, str]:
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        return text, text
    if not path.stem.strip("."):
        raise ConfigError(f"{text} gives the model no name: rename the file, for example to mine.yaml")
    return path.stem, text


def _over_its_preset(values: Mapping[str, Any], source: str, is_first: bool) -> dict[str, Any]:
    """`values` over those of the preset that they name, if they do."""
    if others := [name for name in values if name not in ("preset", "model", "data", "training")]:
        raise ConfigError(f"{source}: a comparison trains one stage from scratch; remove {', '.join(others)}")
    training = values.get("training") or {}
    if budgets := [name for name in BUDGETS if training.get(name) is not None]:
        raise ConfigError(f"{source}: training.{budgets[0]} is given by --budget, one for all models; remove it")
    if training.get("sample_every") is not None:
        raise ConfigError(f"{source}: a comparison writes its samples at the end; remove training.sample_every")
    if values.get("data") and not is_first:
        raise ConfigError(
            f"{source}: all models read the first one's data, changed by --data options; remove the section data, or "
            "name this model first"
        )
    preset = values.get("preset")
    merged = merge(RunConfig, {} if preset is None else load_preset(str(preset)), values)
    try:
        from_dict(RunConfig, merged)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return {"preset": preset, "model": {}, **merged}
