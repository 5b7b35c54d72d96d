"""Starting from another run: its weights, its tokenizer and, where u = 0 is tied to it, a copy of it as the base."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from glissando.backbone import for_saved_weights
from glissando.config import from_dict, starting_differences, to_dict
from glissando.data.corpora import TOKENIZERS, BytesOptions
from glissando.data.tokenizers import Tokenizer, load_tokenizer
from glissando.errors import ConfigError
from glissando.loading import BASE, load
from glissando.mixers import TauConfig
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import TOKENIZER, Run
from glissando.storage import MANIFEST
from glissando.training import launch
from glissando.training.config import RunConfig
from glissando.training.start_tau import require_same_laplacian

#: by class of a mixer's options: (ours, theirs, the run that is started from) raises ConfigError where they disagree
START_CHECKS: dict[type, Callable[[Any, Any, str], None]] = {TauConfig: require_same_laplacian}


def start_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the run that is started from: its weights know no other; None where none is started from.

    Raises RunError if that run is missing, incomplete or damaged, ConfigError for another tokenizer in `config`.
    """
    if config.start_from is None:
        return None
    run, ours = Run.open(config.start_from), config.data.tokenizer
    theirs = TOKENIZERS.read(run.read_config().get("data", {}).get("tokenizer", TOKENIZERS.default))
    if ours not in (theirs, BytesOptions()):
        raise ConfigError(
            f"data.tokenizer is {TOKENIZERS.kind_of(ours)}, and the weights of {config.start_from} know their own "
            f"alone, {TOKENIZERS.kind_of(theirs)}: leave data.tokenizer out, or train a new model without --from"
        )
    path = run.path / TOKENIZER
    return load_tokenizer(path) if path.is_file() else None


def load_start(config: RunConfig, model: LanguageModel) -> None:
    """Put the weights of `config.start_from` into `model`, where there is one. Parts that it does not have start anew,
    and are named; where trained numbers started is put into `config`, so that it stays true of them.

    Raises ConfigError for weights that `model` has no place for, of another shape or missing, and for options that
    would have them start elsewhere.
    """
    source = config.start_from
    if source is None:
        model.require_started()
        return
    theirs, ours = Run.open(source).read_state_dict(), model.state_dict()
    if lost := sorted(set(theirs) - set(ours)):
        raise ConfigError(f"the model has no place for {_some(lost)} of {source}: give both the same model options")
    for name, value in theirs.items():
        if value.shape != ours[name].shape:
            raise ConfigError(
                f"{name} is {list(value.shape)} in {source} and {list(ours[name].shape)} here: "
                "give both the same model options"
            )
    model.load_state_dict({**ours, **theirs})
    unset = [n for n, b in model.named_buffers() if b.is_floating_point() and not b.isfinite().all()]
    if unset:
        raise ConfigError(
            f"{source} has no values for {_some(unset)}, which no new layer has: give both the same layers"
        )
    before = _model_of(source)
    for mine, other in zip(config.model.mixers, before.mixers, strict=False):
        if type(mine) is type(other) and type(mine) in START_CHECKS:
            START_CHECKS[type(mine)](mine, other, source)
    new = set(ours) - set(theirs)
    notes = _keep_starts(config.model, before, source, set(theirs), new)
    if new:
        notes.append(f"not in {source}, so started anew: {_some(sorted(new))}")
    if launch.rank() == 0:
        for note in notes:
            print(note, file=sys.stderr)


def plan_starts(config: RunConfig, before: ModelConfig | None, source: str, grown: bool) -> None:
    """What `load_start` will do, before anything is trained: `before` is the model of the stage `source`, or None for
    the run that the first stage starts from; `grown`: what is started from has all parts of this model."""
    if before is None and config.start_from is not None and (Path(config.start_from) / MANIFEST).is_file():
        before, source = _model_of(config.start_from), config.start_from
    if before is None or not starting_differences(config.model, before, "model"):
        return
    ours = _names(config.model)
    theirs = ours if grown else _names(before)
    _keep_starts(config.model, before, source, theirs, ours - theirs)


def _model_of(run: str) -> ModelConfig:
    return from_dict(ModelConfig, Run.open(run).read_config().get("model", {}), "model")


def _keep_starts(model: ModelConfig, before: ModelConfig, source: str, old: set[str], new: set[str]) -> list[str]:
    """Set the options of where the numbers `old` started to what they were, and return a line for each; parts that are
    `new` keep their own. Raises ConfigError for one that was given."""
    notes = []
    for each in starting_differences(model, before, "model"):
        if any(each.starts in name for name in new) or not any(each.starts in name for name in old):
            continue
        says = f"{each.path} says where trained numbers start, and those of {source} started from {each.theirs}"
        if each.ours != each.field.default:
            raise ConfigError(
                f"{says}: leave it out (and --preset, if that has it), or give {each.theirs}; got {each.ours}"
            )
        setattr(each.section, each.field.name, each.theirs)
        notes.append(f"{says}, which is kept")
    return notes


def _names(config: ModelConfig) -> set[str]:
    """The names of the weights of a model of this kind."""
    with torch.device("meta"):
        return set(LanguageModel(for_saved_weights(config)).state_dict())


def keep_base(source: str, run: Run) -> None:
    """Copy what is started from into the run: it is needed to resume, and to measure steering against."""
    start = Run.open(source)
    base = Run.create(run.path / BASE)
    if (tokens := start.path / TOKENIZER).is_file():
        load_tokenizer(tokens).save(base.path / TOKENIZER)
    base.write_model(start.read_state_dict(), {"model": to_dict(load(source).config)})


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
