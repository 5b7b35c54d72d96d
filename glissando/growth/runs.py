"""Growing a run: its model, its optimizer's state, and what each parameter's training has to remember of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from glissando.checkpoints import saved_optimizer
from glissando.config import to_dict
from glissando.errors import ConfigError
from glissando.growth import Grown, Growth, grow_by
from glissando.imports import copies
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.run_files import TEXTS
from glissando.runs import OPTIMIZER, Run
from glissando.training.shares import POWERS, Moments, Share, noted, read_moments, remembered
from glissando.widening import Grows


def grow_run(source: str | Path, out: str | Path, by: Growth) -> Run:
    """The run at `source`, or one of its checkpoints, grown into the new run `out`, for `train --from`.

    Its optimizer's state is grown along: that of its newest checkpoint, or what an earlier growth has left.

    Raises ConfigError for what cannot be grown exactly, RunError for a run that is missing or damaged or `out` that
    is not empty.
    """
    run = Run.open(source)
    if by.vocab is not None:
        raise ConfigError(
            "a run's vocabulary is its tokenizer's, which does not grow; glissando.grow(model, vocab=...) grows "
            "a model's"
        )
    checkpoint = run.checkpoint or run.own_checkpoint()
    grown = grow_by(load(checkpoint or run.path), by)
    moments = grow_moments(read_moments(run) if checkpoint is None else saved_optimizer(checkpoint), grown)
    if not moments:
        print(f"{source} has no optimizer state: the optimizer starts with an empty one", file=sys.stderr)
    before = run.read_config()
    copies(run.folder, before)  # what it lacks is found before anything is made
    config = {name: value for name, value in before.items() if name not in ("start_from", "grown")}
    config["model"] = to_dict(grown.model.config)
    if grown_shares := record(grown, remembered(run)):
        config["grown"] = grown_shares
    new = Run.create(out, {TEXTS: texts} if (texts := run.read_environment().get(TEXTS)) else None)
    if (tokenizer := run.read_tokenizer()) is not None:
        new.write_tokenizer(tokenizer)
    if moments:
        new.write_tensors(
            OPTIMIZER, {f"{n}/{key}": value for n, kept in moments.items() for key, value in kept.items()}
        )
    new.write_model(grown.model.state_dict(), config, source=run)
    return new


def record(grown: Grown, before: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """[share, copies, released] of every parameter that is not as it would be in a new model, over all growths so far,
    from those `before` this one."""
    shares: dict[str, list[float]] = {}
    for name, _ in grown.model.named_parameters():
        grows, old = grown.table.get(name), Share(*before.get(name, ()))
        share, copies = old.share, old.copies
        if isinstance(grows, Grows):
            share, copies = share * grows.share, copies * grows.copies
        if (share, copies) != (1.0, 1.0):
            shares[name] = noted(share, copies, old.released)
    return shares


def grow_moments(moments: Moments, grown: Grown) -> Moments:
    """The moments of the grown model's parameters; new parameters start without."""
    return {
        name: {
            key: grown.moment(name, value, POWERS[key]) if key in POWERS else value for key, value in tensors.items()
        }
        for name, tensors in moments.items()
    }


@torch.no_grad()
def difference(small: LanguageModel, large: LanguageModel | None = None, length: int = 64) -> float:
    """The largest difference of two models' logits on random tokens; of one from 0, its largest logit."""
    length = min(length, small.config.max_length or length)
    ids = torch.randint(0, small.config.vocab_size, (4, length), generator=torch.Generator().manual_seed(0))
    logits = small(ids)[0]
    return float((logits if large is None else large(ids)[0][..., : logits.shape[-1]] - logits).abs().max())
