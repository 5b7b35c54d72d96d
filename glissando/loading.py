"""Opening a run directory as a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from glissando.backbone import for_saved_weights
from glissando.config import flat, from_dict, merge, starting_differences
from glissando.data.tokenizers import load_tokenizer
from glissando.errors import ConfigError, RunError
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import CONFIG, TOKENIZER, Run

#: inside a run: a copy of the run that it was started from, where the model at u = 0 is tied to that
BASE = "base"


def load_base(path: str | Path, overrides: Mapping[str, Any] | None = None) -> LanguageModel | None:
    """The uncontrolled model that the run at `path` was steered from, None if it was not trained so; else as `load`."""
    base = Run.open(path).path / BASE
    return load(base, overrides) if base.is_dir() else None


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, trust_imports: bool = False) -> LanguageModel:
    """The model of a run directory or of one of its checkpoints, in evaluation mode, with its tokenizer; in float32, or
    in float64 where its weights are (`training.precision: 64-true`).

    `overrides` change its configuration ({"depth.n_steps": 8}, or nested); those that change a tensor's shape do not
    load. `trust_imports` executes the Python files that the run was made with, where it needs them.

    Raises ConfigError for an override that would do nothing, RunError if the directory is no run, incomplete or
    damaged; nothing of it is ever unpickled.
    """
    run = Run.open(path)
    given = run.read_config(trust_imports).get("model")
    if not isinstance(given, dict):
        raise RunError(f"{run.path / CONFIG} describes no model: it has no section `model`, or it is no mapping")
    changes = merge(overrides or {})
    values = merge(given, changes)
    if changes.get("depth", {}).get("tolerance") and values["depth"].get("backward") == "checkpoint":
        values["depth"]["backward"] = "direct"  # the same forward, and it can halt
    config = from_dict(ModelConfig, values, "model")
    _require_effect(config, from_dict(ModelConfig, given, "model"), flat(changes))
    tokens = run.path / TOKENIZER
    model = LanguageModel(for_saved_weights(config), load_tokenizer(tokens) if tokens.is_file() else None)
    put_weights_of(run, model)
    model.config = config  # as it was given, files of its start included
    return model.eval()


def put_weights_of(run: Run, model: torch.nn.Module) -> None:
    """Load the run's weights, which set the precision. Raises RunError where they do not fit."""
    weights = run.read_state_dict()  # its RunError is a RuntimeError too, and its message has more than the one below
    if any(weights[name].dtype == torch.float64 for name, _ in model.named_parameters() if name in weights):
        model.double()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"the weights in {run.path} do not fit its configuration: {error}") from error


def _require_effect(config: ModelConfig, saved: ModelConfig, changes: Collection[str]) -> None:
    """Raise ConfigError for a change of an option that only sets where new numbers start: these are the run's own."""
    for each in starting_differences(config, saved, "model"):
        name = each.path.removeprefix("model.")
        if name in changes:
            raise ConfigError(f"{name} sets where new numbers start, and the weights have theirs; leave it out")
