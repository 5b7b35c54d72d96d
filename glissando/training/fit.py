"""From a configuration to a finished run directory, and from an interrupted one to the same place."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from glissando.training import launch
from glissando.training.budget import Budget
from glissando.training.callbacks import Metrics, Samples, Saver, Validation
from glissando.training.checkpoint import PatientCheckpointIO, RandomState, ShardedStrategy
from glissando.training.config import MACHINE, RunConfig, TrainingConfig
from glissando.training.module import TrainingModule
from glissando.training.progress import Progress

_ASIDES = (
    ".*does not have many workers.*",
    ".*available but not used.*",
    ".*IterableDataset.*",
    r".*treespec, LeafSpec.*",  # Lightning 2.6 calls what torch 2.13 deprecates
    ".*Dynamo detected a call to a `functools.lru_cache`.*",  # the tables cached so are constants
)


def train(config: RunConfig, out: str | Path) -> Run:
    """Train as `config` says into the new run directory `out`.

    Raises ConfigError, DataError, RunError or TrainingError; what was saved before stands. Ctrl-C raises
    KeyboardInterrupt once the step in progress is saved.
    """
    config.check(math.prod(launch.processes(config.training)))
    pl.seed_everything(config.training.seed, verbose=False)
    corpus = build_corpus(config.data)
    _fit_vocabulary(config, corpus)
    model = LanguageModel(config.model, corpus.tokenizer)
    if launch.rank() == 0:
        run = Run.create(out)
        run.write_config(config.as_dict())
        corpus.tokenizer.save(run.path / TOKENIZER)
    return _run(config, Run(Path(out)), model, corpus, resume_from=None)


def resume(path: str | Path, machine: Mapping[str, Any] | None = None) -> Run:
    """Go on from the newest complete checkpoint of the run directory `path`, to bit-identical weights.

    `machine` replaces training options that say what to train on and not how: those in MACHINE. A run may go
    on with another number of processes, where sums are rounded differently.

    Raises RunError if there is no checkpoint to resume from, ConfigError for another option; else as `train`.
    """
    run = Run(Path(path))
    config = from_dict(RunConfig, run.read_config(), "config.yaml")
    config.training = replace(config.training, **_machine_only(machine or {}))
    config.check(math.prod(launch.processes(config.training)))
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise RunError(f"{path} has no complete checkpoint to resume from; train again into another directory")
    if launch.rank() == 0:
        Run.create(path, resume=True)
    corpus = build_corpus(config.data, load_tokenizer(run.path / TOKENIZER))
    model = LanguageModel(config.model, corpus.tokenizer)
    return _run(config, run, model, corpus, resume_from=checkpoint)


def _machine_only(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name not in MACHINE:
            raise ConfigError(f"resume takes only {', '.join(MACHINE)} of the training options, got {name!r}")
    return options


def _run(config: RunConfig, run: Run, model: LanguageModel, corpus: Corpus, resume_from: Path | None) -> Run:
    # Each process drops out other units; one that the checkpoint knows gets its own state back instead.
    pl.seed_everything(config.training.seed + launch.rank(), verbose=False)
    if config.training.precision == "64-true":
        model.double()  # Lightning would do so after it has loaded the checkpoint into float32
    module = TrainingModule(config, model, corpus)
    files = PatientCheckpointIO()
    budget, callbacks = _callbacks(config, run, files)
    with _interruptible(budget), _quiet():
        trainer = _trainer(config, callbacks, files)
        with launch.ended_together(trainer):
            trainer.fit(module, ckpt_path=resume_from)
    if budget.interrupted:
        if launch.rank() == 0:
            where = f"stopped and saved at step {trainer.global_step}"
            print(f"\n{where}; go on with: glissando train --resume {run.path}", file=sys.stderr)
        raise KeyboardInterrupt(f"training was stopped at step {trainer.global_step} and saved")
    return run


def _callbacks(config: RunConfig, run: Run, files: PatientCheckpointIO) -> tuple[Budget, list[pl.Callback]]:
    t = config.training
    budget = Budget(t.steps, t.tokens, t.seconds)
    validation = Validation(budget, t.validate_every, t.early_stopping)
    metrics = Metrics(run.path, t.log_every, validation, budget, t.tensorboard)
    progress = Progress(budget, validation, metrics)
    samples = Samples(run.path, budget, t.sample_every, progress.say)
    saver = Saver(run, budget, t.save_every, t.keep_checkpoints, files)
    # The order is the order within a step: what is saved must know of what was validated.
    return budget, [RandomState(), budget, validation, metrics, progress, samples, saver]


def _trainer(config: RunConfig, callbacks: list[pl.Callback], files: PatientCheckpointIO) -> pl.Trainer:
    t = config.training
    devices, nodes = launch.processes(t)
    return pl.Trainer(
        accelerator=t.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=_strategy(t, devices * nodes),
        precision=t.precision,
        max_steps=t.steps or -1,
        max_epochs=-1,
        accumulate_grad_batches=t.accumulate,
        callbacks=callbacks,
        plugins=[files],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )


def _strategy(training: TrainingConfig, processes: int) -> Any:
    if training.strategy == "fsdp":
        # Lightning's own choice is tensor parallelism within a node, which would shard no weight at all here.
        return ShardedStrategy(data_parallel_size=processes, tensor_parallel_size=1)
    return "ddp" if training.strategy == "ddp" or processes > 1 else "auto"


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """A preset's vocabulary is that of its published tokenizer; the corpus's tokenizer decides."""
    config.model.vocab_size = corpus.tokenizer.vocab_size
    limit = config.model.max_length
    if config.model.positions == "learned" and limit is not None and config.data.seq_len > limit:
        raise ConfigError(f"data.seq_len {config.data.seq_len} is longer than model.max_length {limit}")


@contextlib.contextmanager
def _interruptible(budget: Budget) -> Iterator[None]:
    """The first Ctrl-C ends training after the step in progress, with everything saved; the second at once."""
    before = signal.getsignal(signal.SIGINT)
    # Who starts us with Ctrl-C ignored, as nohup and a shell's background jobs do, wants it ignored.
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return

    def ask(*_: Any) -> None:
        budget.asked_to_stop = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's banners and its advice about loaders of its own kind say nothing to our users."""
    names = ("pytorch", "pytorch.utilities.rank_zero", "fabric", "fabric.utilities.distributed")
    loggers = [logging.getLogger(f"lightning.{name}") for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _ASIDES:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
