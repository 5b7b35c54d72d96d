"""Starting from another run: its weights, its tokenizer and, where u = 0 is tied to it, a copy of it as the base."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from glissando.backbone import for_saved_weights
from glissando.config import from_dict, starting_differences, to_dict
from glissando.data.corpora import TOKENIZERS, BytesOptions
from glissando.data.tokenizers import Tokenizer, load_tokenizer
from glissando.errors import ConfigError
from glissando.loading import BASE, load
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import TOKENIZER, Run
from glissando.storage import MANIFEST
from glissando.training import launch
from glissando.training.config import RunConfig
from glissando.training.growing import remembered
from glissando.training.moments import Moments, read_moments


def start_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the run that is started from: its weights know no other; None where none is started from.

    Raises RunError if that run is missing, incomplete or damaged, ConfigError where another tokenizer is asked for.
    """
    if config.start_from is None:
        return None
    run, asked = Run.open(config.start_from), config.data.tokenizer
    theirs = from_dict(TOKENIZERS.section(), run.read_config().get("data", {}).get("tokenizer", {}), "data.tokenizer")
    if asked not in (theirs, BytesOptions()):
        raise ConfigError(
            f"data.tokenizer asks for {TOKENIZERS.kind_of(asked)}, and the weights of {config.start_from} know their own alone, "
            f"{TOKENIZERS.kind_of(theirs)}: leave data.tokenizer out, or train a new model without --from"
        )
    path = run.path / TOKENIZER
    return load_tokenizer(path) if path.is_file() else None


def load_start(config: RunConfig, model: LanguageModel) -> None:
    """Put the weights of `config.start_from` into `model`. Parts that it does not have start anew, and are named.

    Raises ConfigError for weights that `model` has no place for, or of another shape, and for options that would have
    them start elsewhere.
    """
    if config.start_from is None:
        return
    theirs, ours = Run.open(config.start_from).read_state_dict(), model.state_dict()
    lost = sorted(set(theirs) - set(ours))
    if lost:
        raise ConfigError(
            f"the model has no place for {_some(lost)} of {config.start_from}: give both the same model options"
        )
    for name, value in theirs.items():
        if value.shape != ours[name].shape:
            raise ConfigError(
                f"{name} is {list(value.shape)} in {config.start_from} and {list(ours[name].shape)} here: "
                "give both the same model options"
            )
    model.load_state_dict({**ours, **theirs})
    new = sorted(set(ours) - set(theirs))
    _take_starts(config, set(theirs), set(new))
    if new and launch.rank() == 0:
        print(f"not in {config.start_from}, so started anew: {_some(new)}", file=sys.stderr)


def _take_starts(config: RunConfig, old: set[str], new: set[str]) -> None:
    """Put into `config` where the numbers `old` started that were trained before, so that it stays true of them.

    Raises ConfigError where it asks for another start, and says so where it merely does not know of theirs.
    """
    assert config.start_from is not None
    for said in _take(config.model, _model_of(config.start_from), config.start_from, old, new):
        if launch.rank() == 0:
            print(said, file=sys.stderr)


def plan_starts(config: RunConfig, before: ModelConfig | None, source: str, grown: bool) -> None:
    """What `_take_starts` will do, before anything is trained: `before` is the model of the stage `source`, or None for
    the run that the first stage starts from; `grown`: what is started from has all parts of this model."""
    if before is None and config.start_from is not None and (Path(config.start_from) / MANIFEST).is_file():
        before, source = _model_of(config.start_from), config.start_from
    if before is None or not starting_differences(config.model, before, "model"):
        return
    ours = _names(config.model)
    theirs = ours if grown else _names(before)
    _take(config.model, before, source, theirs, ours - theirs)  # what there is to say is said when the stage begins


def _model_of(run: str) -> ModelConfig:
    return from_dict(RunConfig, {"model": Run.open(run).read_config().get("model", {})}).model


def _take(model: ModelConfig, before: ModelConfig, source: str, old: set[str], new: set[str]) -> list[str]:
    """Set the options that do not know where the numbers `old` started, and return what there is to say of it.

    Parts that are `new` keep their own starts.
    Raises ConfigError for one that was given.
    """
    said = []
    for each in starting_differences(model, before, "model"):
        if any(each.starts in name for name in new) or not any(each.starts in name for name in old):
            continue
        says = f"{each.path} says where trained numbers start, and those of {source} started from {each.theirs}"
        if each.ours != each.field.default:
            raise ConfigError(
                f"{says}: leave it out (and --preset, if that has it), or give {each.theirs}; got {each.ours}"
            )
        setattr(each.section, each.field.name, each.theirs)
        said.append(f"{says}, which is kept")
    return said


def _names(config: ModelConfig) -> set[str]:
    """The names of the weights of a model of this kind."""
    followed = for_saved_weights(config)
    with torch.device("meta"):
        return set(LanguageModel(followed).state_dict())


def take_growth(config: RunConfig) -> None:
    """Put into `config` what the run that is started from remembers of its growth.

    Raises ConfigError where a record is given and no run is started from.
    """
    if config.start_from is not None:
        config.grown = remembered(Run.open(config.start_from))
    elif config.grown:
        raise ConfigError("grown is what `glissando grow` left in a run: start from that with --from, or leave it out")


def start_moments(config: RunConfig) -> dict[str, Moments]:
    """The optimizer's moments that the run started from was given when it was made by growing; none in any other.

    Raises ConfigError with the strategy `fsdp`, whose shards they are not cut into.
    """
    if config.start_from is None:
        return {}
    moments = read_moments(Run.open(config.start_from))
    if moments and config.training.strategy == "fsdp":
        raise ConfigError(
            f"{config.start_from} comes with its optimizer's state, which training.strategy `fsdp` cannot take up: use "
            "`ddp` or `auto`"
        )
    return moments


def require_base(config: RunConfig, corpus_controls: tuple[str, ...]) -> None:
    """Raise ConfigError where u = 0 shall be tied to a base and there is none, or there is no u."""
    if not config.training.neutral_kl:
        return
    what = "training.neutral_kl ties the model at u = 0 to the one that training started from"
    if config.start_from is None:
        raise ConfigError(f"{what}: name that with --from RUN, or train in stages; or leave neutral_kl out")
    if not corpus_controls or not config.model.controls:
        raise ConfigError(
            f"{what}, and needs a model with dials (model.depth.control, got {config.model.controls}) and a "
            f"labelled corpus (labels: {', '.join(corpus_controls) or 'none'})"
        )


def keep_base(config: RunConfig, run: Run) -> None:
    """Copy what is started from into the run: it is needed to resume, and to measure steering against."""
    assert config.start_from is not None
    source = Run.open(config.start_from)
    base = Run.create(run.path / BASE)
    tokens = source.path / TOKENIZER
    if tokens.is_file():
        load_tokenizer(tokens).save(base.path / TOKENIZER)
    base.write_model(source.read_state_dict(), {"model": to_dict(load(config.start_from).config)})


def frozen_like(base: LanguageModel, model: LanguageModel) -> LanguageModel:
    """`base` in evaluation mode, without gradients, in the arithmetic of `model`."""
    return base.eval().requires_grad_(False).to(model.embedding.weight.dtype)


def stage_base(config: RunConfig, run: Path | None, model: LanguageModel) -> LanguageModel | None:
    """What u = 0 is tied to: the run's own copy when it is resumed, else what it starts from; None without a tie."""
    if not config.training.neutral_kl:
        return None
    source = config.start_from if run is None else run / BASE
    assert source is not None
    return frozen_like(load(source), model)


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
