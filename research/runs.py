"""What the experiments share: their options, trainings that are gone on with, and the corpus of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import glissando
from glissando.config import from_dict, merge
from glissando.data.base import Corpus
from glissando.data.corpora import CORPORA, build_corpus
from glissando.errors import RunError
from glissando.runs import Run
from glissando.storage import write_atomic
from glissando.training.config import RunConfig
from glissando.training.fit import resume, train


def options_of(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, as it is."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
        return int(text)

    return whole


def configured(*values: Any) -> RunConfig:
    """The configuration that the values make, later ones over earlier ones."""
    return from_dict(RunConfig, merge(RunConfig, *values))


def trained(config: RunConfig, run: Path) -> glissando.LanguageModel:
    """The model of the training at `run`, which is begun, gone on with, or read."""
    resume(run) if run.exists() else train(config, run)
    return glissando.load(run).eval()


def recorded(record: Path, new: pd.DataFrame, key: list[str]) -> None:
    """Write rows of one key into a CSV, in the place of those that it has of it."""
    if record.is_file():
        old = pd.read_csv(record)
        new = pd.concat([old[(old[key] != new[key].iloc[0]).any(axis=1)], new])
    write_atomic(record, new.to_csv(index=False).encode())


def corpus_of(run: str | Path, model: glissando.LanguageModel) -> Corpus:
    """The corpus that a run was trained on, in the model's tokens."""
    return build_corpus(
        from_dict(CORPORA.section(), Run.open(run).read_config().get("data", {}), "data"), model.tokenizer
    )


def opened(run: str | None) -> glissando.LanguageModel:
    """The model of a run; for None one that was not trained. Exits with the reason where it cannot be read."""
    if run is None:
        torch.manual_seed(0)
        return glissando.LanguageModel.from_preset("transformer-nano").eval()
    try:
        return glissando.load(run).eval()
    except RunError as error:
        sys.exit(str(error))
