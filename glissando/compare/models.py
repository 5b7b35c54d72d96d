"""The models of a comparison by name: presets, and YAML files of options as `glissando train --config` reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glissando.config import check_keys, flat, from_dict, merge, read_options, require_chosen
from glissando.data.corpora import CORPORA
from glissando.errors import ConfigError
from glissando.mixers import MIXERS
from glissando.presets import load_preset, preset_names
from glissando.training.config import BUDGETS, RunConfig, require_effect

_SUFFIXES = (".yaml", ".yml")


def read_models(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> its sections model, data and training, `preset`, and `given`, the options in a file.

    A file is called by its name without the ending.

    Raises ConfigError for a file that cannot be read, for what has no place in a comparison, and for a name that is
    given twice or is a preset's; UnknownNameError for an unknown preset.
    """
    models: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(given):
        path = Path(text).expanduser()
        is_file = path.suffix in _SUFFIXES
        name = path.stem if is_file else text
        if is_file and not name.strip("."):
            raise ConfigError(f"{text} gives the model no name: call the file something like mine.yaml")
        if name in models:
            raise ConfigError(f"two models are called {name!r}: {', '.join(given)}; give each once, files by own names")
        if is_file and name in preset_names():
            raise ConfigError(f"{text} has the name of the preset {name!r}, which it is not: call it something else")
        models[name] = _of_file(path, first=number == 0) if is_file else {"preset": text, **load_preset(text)}
        models[name].pop("about", None)
    return models


def _of_file(path: Path, first: bool) -> dict[str, Any]:
    """The file's options over those of the preset that it names, if it does."""
    values = read_options(path)
    try:
        check_keys(RunConfig, values)
        config = from_dict(RunConfig, values)  # of itself: values of a wrong type are this file's mistake
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _refuse(path, values, first)
    found = merge(load_preset(config.preset) if config.preset else {}, values)
    return {"preset": config.preset, "model": {}, **found, "given": list(flat(values))}


def _refuse(path: Path, values: Mapping[str, Any], first: bool) -> None:
    """Raise ConfigError for what a comparison gives to all models, or has not."""
    allowed = ("preset", "model", "data", "training")
    if others := [name for name in values if name not in allowed]:
        raise ConfigError(f"{path}: a comparison trains one stage from the start; take {', '.join(others)} out")
    training = values.get("training") or {}
    if given := [name for name in BUDGETS if training.get(name) is not None]:
        raise ConfigError(f"{path}: training.{given[0]} is given by --budget, one for all models; take it out")
    if training.get("sample_every") is not None:
        raise ConfigError(f"{path}: a comparison writes its samples at the end; take training.sample_every out")
    if values.get("data") and not first:
        raise ConfigError(
            f"{path}: all models read the first one's data, or what --data options say; take the section data out, or "
            "name this file first"
        )


def require_chosen_sections(name: str, given: Iterable[str], config: RunConfig, asked: Collection[str]) -> None:
    """Raise ConfigError for options in a model's file of a mixer or a corpus that it does not have, but where the
    command line, whose options are `asked`, has chosen otherwise than the file."""
    mixers = config.as_dict()["model"]["mixers"]
    for option in given:
        try:
            if "model.mixer" not in asked:
                require_chosen(option, "model.mixers", MIXERS, mixers, "model.mixer", config.model.mixer)
            if "data.corpus" not in asked:
                require_chosen(option, "data", CORPORA, [config.data.corpus], "data.corpus", config.data.corpus)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def require_any_effect(configs: Sequence[RunConfig], names: Iterable[str]) -> None:
    """Raise ConfigError for an option of all models that does nothing in any of them."""
    for name in names:
        told: list[ConfigError] = []
        for config in configs:
            try:
                require_effect(config, name, f"--{name}")
            except ConfigError as error:
                told.append(error)
        if len(told) == len(configs):
            raise told[0]
