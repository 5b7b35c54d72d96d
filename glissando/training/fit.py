"""From a configuration to a finished run directory, and from an interrupted one to the same place."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from glissando.config import from_dict
from glissando.data.base import Corpus
from glissando.data.corpora import build_corpus
from glissando.data.tokenizers import load_tokenizer
from glissando.errors import ConfigError, RunError
from glissando.model import LanguageModel
from glissando.runs import TOKENIZER, Run
from glissando.training.callbacks import Budget, Metrics, Samples, Saver, Validation
from glissando.training.checkpoint import RandomState, SafeCheckpointIO, ShardedStrategy
from glissando.training.config import RunConfig
from glissando.training.module import TrainingModule
from glissando.training.progress import Progress

_LIGHTNING_ASIDES = (
    ".*does not have many workers.*",
    ".*available but not used.*",
    ".*IterableDataset.*",
    r".*treespec, LeafSpec.*",  # Lightning 2.6 calls what torch 2.13 deprecates
)


def train(config: RunConfig, out: str | Path) -> Run:
    """Train as `config` says into the new run directory `out`.

    Raises ConfigError, DataError, RunError or TrainingError; what was saved before stands.
    """
    config.training.check()
    pl.seed_everything(config.training.seed, verbose=False)
    corpus = build_corpus(config.data)
    _fit_vocabulary(config, corpus)
    model = LanguageModel(config.model, corpus.tokenizer)
    if _is_first_process():
        run = Run.create(out)
        run.write_config(config.as_dict())
        corpus.tokenizer.save(run.path / TOKENIZER)
    run = Run(Path(out))
    return _run(config, run, model, corpus, resume_from=None)


def resume(path: str | Path) -> Run:
    """Go on from the newest complete checkpoint of the run directory `path`, to bit-identical weights.

    Raises RunError if there is no checkpoint to resume from.
    """
    run = Run(Path(path))
    config = from_dict(RunConfig, run.read_config(), "config.yaml")
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise RunError(f"{path} has no complete checkpoint to resume from; train again into another directory")
    if _is_first_process():
        run = Run.create(path, resume=True)
    corpus = build_corpus(config.data, load_tokenizer(run.path / TOKENIZER))
    model = LanguageModel(config.model, corpus.tokenizer)
    return _run(config, run, model, corpus, resume_from=checkpoint)


def _run(config: RunConfig, run: Run, model: LanguageModel, corpus: Corpus, resume_from: Path | None) -> Run:
    module = TrainingModule(config, model, corpus)
    budget, callbacks = _callbacks(config, run)
    with _interruptible(budget), _quiet():
        trainer = _trainer(config, callbacks)
        trainer.fit(module, ckpt_path=resume_from)
    if budget.asked_to_stop and trainer.is_global_zero:
        print(f"\nstopped and saved at step {trainer.global_step}; go on with: glissando train --resume {run.path}")
    return run


def _callbacks(config: RunConfig, run: Run) -> tuple[Budget, list[pl.Callback]]:
    t, steps = config.training, config.total_steps()
    budget = Budget(steps, t.seconds)
    validation = Validation(_every(t.validate_every, budget), t.early_stopping)
    metrics = Metrics(run.path, t.log_every, validation, budget, t.tensorboard)
    progress = Progress(budget, validation, metrics)
    samples = Samples(run.path, _every(t.sample_every, budget), progress.say)
    saver = Saver(run, _every(t.save_every, budget), t.keep_checkpoints)
    # The order is the order within a step: what is saved must know of what was validated.
    return budget, [RandomState(), budget, validation, metrics, progress, samples, saver]


def _every(steps: int | None, budget: Budget) -> Callable[[int], bool]:
    """Whether something is due after a step: every `steps`, or ten times over the budget."""
    if steps is not None:
        return lambda step: step % steps == 0
    if budget.steps is not None:
        tenth = max(1, budget.steps // 10)
        return lambda step: step % tenth == 0
    seen = [0]

    def due(_: int) -> bool:
        tenths = int(10 * budget.spent / (budget.seconds or 1.0))
        passed, seen[0] = tenths > seen[0], tenths
        return passed

    return due


def _trainer(config: RunConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    t = config.training
    return pl.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=_strategy(config),
        precision=t.precision,
        max_steps=config.total_steps() or -1,
        max_epochs=-1,
        accumulate_grad_batches=t.accumulate,
        callbacks=callbacks,
        plugins=[SafeCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )


def _strategy(config: RunConfig) -> Any:
    t = config.training
    if t.strategy == "fsdp":
        return ShardedStrategy()
    if t.strategy == "ddp" or t.devices * t.num_nodes > 1:
        return "ddp"
    return "auto"


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """A preset's vocabulary is that of its published tokenizer; the corpus's tokenizer decides."""
    config.model.vocab_size = corpus.tokenizer.vocab_size
    limit = config.model.max_length
    if config.model.positions == "learned" and limit is not None and config.data.seq_len > limit:
        raise ConfigError(f"data.seq_len {config.data.seq_len} is longer than model.max_length {limit}")


def _is_first_process() -> bool:
    from lightning.pytorch.utilities import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


@contextlib.contextmanager
def _interruptible(budget: Budget) -> Iterator[None]:
    """The first Ctrl-C ends training after the step in progress, with everything saved; the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        budget.asked_to_stop = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's banners and its advice about loaders of its own kind say nothing to our users."""
    loggers = [logging.getLogger(n) for n in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _LIGHTNING_ASIDES:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
