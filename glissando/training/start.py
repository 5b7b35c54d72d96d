"""Starting from another run: its weights and its tokenizer."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

from glissando.backbone import for_saved_weights
from glissando.checkpoints import is_checkpoint
from glissando.config import from_dict, starting_differences
from glissando.data.corpora import TOKENIZERS, BytesOptions
from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import Run
from glissando.storage import MANIFEST


def start_tokenizer(run: Run, data: Any) -> Tokenizer | None:
    """The tokenizer of the run that is started from: its weights know no other; None if it has none.

    Raises ConfigError for another tokenizer in `data`.
    """
    saved = TOKENIZERS.read(run.read_config().get("data", {}).get("tokenizer", TOKENIZERS.default))
    if data.tokenizer not in (saved, BytesOptions()):
        raise ConfigError(
            f"data.tokenizer is {TOKENIZERS.kind_of(data.tokenizer)}, and the weights of {run.path} know their own "
            f"alone, {TOKENIZERS.kind_of(saved)}: leave data.tokenizer out, or train a new model without --from"
        )
    return run.read_tokenizer()


def load_start(source: str, config: ModelConfig, model: LanguageModel) -> list[str]:
    """Put the weights of the run `source` into `model`; parts that it does not have start anew. Where trained numbers
    started is put into `config`, so that it stays true of them. Returns what a person should know of both.

    Raises ConfigError for weights that `model` has no place for, of another shape or missing, and for options that
    would have them start elsewhere.
    """
    run = Run.open(source)
    saved, initial = run.read_state_dict(), model.state_dict()
    try:
        model.load_state_dict({**initial, **saved})
    except RuntimeError as error:
        what = textwrap.shorten(str(error), 400)
        raise ConfigError(f"{source} does not fit: give both the same model options. {what}") from error
    if unset := [n for n, b in model.named_buffers() if b.is_floating_point() and not b.isfinite().all()]:
        raise ConfigError(
            f"{source} has no values for {_some(unset)}, which no new layer has: give both the same layers"
        )
    new = set(initial) - set(saved)
    notes = _keep_starts(config, _model_of(source), source, set(saved), new)
    if not is_checkpoint(Path(source)) and not run.has_ended:
        notes.append(f"{source} has not ended its training: this one starts from the weights that it has saved so far")
    return [*notes, f"not in {source}, so they start with new values: {_some(sorted(new))}"] if new else notes


def plan_starts(config: ModelConfig, start_from: str | None, before: ModelConfig | None, grown: bool) -> None:
    """What `load_start` will do, before anything is trained: `before` is the model of the stage before, or None for
    the run that the first stage starts from; `grown`: what is started from has all parts of this model."""
    if before is None and start_from is not None and (Path(start_from) / MANIFEST).is_file():
        before = _model_of(start_from)
    if before is not None and starting_differences(config, before, "model"):
        with torch.device("meta"):
            names, old = (set(LanguageModel(for_saved_weights(c)).state_dict()) for c in (config, before))
        old = names if grown else old
        _keep_starts(config, before, str(start_from), old, names - old)


def _model_of(run: str) -> ModelConfig:
    return from_dict(ModelConfig, Run.open(run).read_config().get("model", {}), "model")


def _keep_starts(model: ModelConfig, before: ModelConfig, source: str, old: set[str], new: set[str]) -> list[str]:
    """Set the options of where the numbers `old` started to what they were, and return a line for each; parts that are
    `new` keep their own. Raises ConfigError for one that was given."""
    notes = []
    for each in starting_differences(model, before, "model"):
        if any(each.starts in name for name in new) or not any(each.starts in name for name in old):
            continue
        says = f"{each.path} says where trained numbers start, and those of {source} started from {each.saved}"
        if each.value != each.field.default:
            raise ConfigError(
                f"{says}: leave it out (and --preset, if that has it), or give {each.saved}; got {each.value}"
            )
        setattr(each.section, each.field.name, each.saved)
        notes.append(f"{says}, which is kept")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
