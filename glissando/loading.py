"""Opening a run directory as a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from glissando.backbone import for_saved_weights
from glissando.config import flat, from_dict, merge, starting_differences
from glissando.errors import ConfigError, GlissandoError, RunError
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import CONFIG, TOKENIZER, Run

M = TypeVar("M", bound=nn.Module)
#: so many times the weights' tensors and numbers a model may register as it is built, such as a head that is tied then
_SPARE = 4

#: inside a run: a copy of the run that it was started from, where the model at u = 0 is tied to that
BASE = "base"


def load_base(path: str | Path, overrides: Mapping[str, Any] | None = None) -> LanguageModel | None:
    """The uncontrolled model that the run at `path` was steered from, None if it was not trained so; else as `load`."""
    base = Run.open(path).path / BASE
    return load(base, overrides) if base.is_dir() else None


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, trust_imports: bool = False) -> LanguageModel:
    """The model of a run, in evaluation mode, with its tokenizer. No file of the run is ever unpickled.

    Args:
        path: Run directory, one of its checkpoints, or the name of a model of the package.
        overrides: Options of the model that differ from those of the run: {"depth.n_steps": 8}, or nested. An override
            that changes the shape of a tensor is an error.
        trust_imports: Whether the Python files that the run was made with may be executed, if it needs them.

    Returns:
        The model in float32, or in float64 if its weights are (`training.precision: 64-true`).

    Raises:
        ConfigError: An override would have no effect.
        RunError: The directory is not a run, is incomplete or is damaged.
    """
    run = Run.open(path)
    options = run.read_config(trust_imports).get("model")
    if not isinstance(options, dict):
        raise RunError(f"{run.path / CONFIG} describes no model: it has no section `model`, or it is no mapping")
    changes = merge(ModelConfig, overrides or {})
    values = merge(ModelConfig, options, changes)
    config = from_dict(ModelConfig, values, "model")
    for each in starting_differences(config, from_dict(ModelConfig, options, "model"), "model"):
        if (name := each.path.removeprefix("model.")) in flat(changes):
            raise ConfigError(f"{name} sets where new numbers start, and the weights have theirs; leave it out")
    tokenizer = run.read_tokenizer()
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise RunError(
            f"{path} has a tokenizer of {tokenizer.vocab_size:,} tokens and a model of {config.vocab_size:,}: put the "
            f"{TOKENIZER} that it was trained with back"
        )
    model = with_weights_of(run, lambda: LanguageModel(for_saved_weights(config), tokenizer))
    model.config = config  # as it was given, files of its start included
    return model.eval()


def with_weights_of(run: Run, build: Callable[[], M]) -> M:
    """The model that `build` makes, with the run's weights, which set the precision.

    Raises RunError where they do not fit; of a configuration that is much larger than they are, no more is built.
    """
    weights = run.read_state_dict()
    differ, this = f"the weights in {run.path} do not fit its configuration:", threading.get_ident()
    tensors, numbers = 64 + _SPARE * len(weights), 1024 + _SPARE * sum(value.numel() for value in weights.values())

    def count(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        nonlocal tensors, numbers
        if threading.get_ident() != this or value is None:
            return
        tensors, numbers = tensors - 1, numbers - value.numel()
        if tensors < 0 or numbers < 0:
            raise RunError(f"{differ} that makes a model several times larger than their {len(weights)} tensors")

    hook = register_module_parameter_registration_hook(count)
    try:
        model = build()
    except GlissandoError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond the memory, or beyond 64 bits
        raise RunError(f"{differ} no model can be built of that: {error}") from error
    finally:
        hook.remove()
    if any(weights[name].dtype == torch.float64 for name, _ in model.named_parameters() if name in weights):
        model.double()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{differ} {error}") from error
    return model
