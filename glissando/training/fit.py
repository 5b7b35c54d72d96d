"""From a configuration to a finished run directory, and from an interrupted one to the same place."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import AcceleratorRegistry

from glissando.backbone import for_saved_weights
from glissando.config import from_dict, merge
from glissando.data.base import Corpus
from glissando.data.corpora import CORPORA, build_corpus
from glissando.data.tokenizers import load_tokenizer
from glissando.depth import FlowConfig
from glissando.errors import ConfigError, RunError, Stopped
from glissando.mixers import TauConfig
from glissando.mixers.tau import Tau
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import BEST, CHECKPOINTS, METRICS, TOKENIZER, Run, checkpoint_step, config_text
from glissando.storage import MANIFEST
from glissando.training import launch
from glissando.training.budget import Budget
from glissando.training.calibration import Calibration
from glissando.training.callbacks import Metrics, Samples, Saver, Validation, read_metrics
from glissando.training.checkpoint import PatientCheckpointIO, RandomState, ShardedStrategy
from glissando.training.config import MACHINE, RunConfig, TrainingConfig, fitted_vocabulary
from glissando.training.files import TEXTS, alone, fingerprints, put_texts, require_texts
from glissando.training.module import TrainingModule
from glissando.training.progress import Progress, say
from glissando.training.start import (
    keep_base,
    load_start,
    require_base,
    stage_base,
    start_moments,
    start_tokenizer,
    take_growth,
)
from glissando.training.stopping import Stopping
from glissando.training.summary import summarize, told

_ASIDES = (
    ".*does not have many workers.*",
    ".*available but not used.*",
    ".*IterableDataset.*",
    r".*treespec, LeafSpec.*",  # Lightning 2.6 calls what torch 2.13 deprecates
    ".*Dynamo detected a call to a `functools.lru_cache`.*",  # the tables cached so are constants
)

#: builds the callback that shows how training goes
ShownBy = Callable[[Budget, Validation, Metrics], Progress]


def train(config: RunConfig, out: str | Path, progress: ShownBy = Progress) -> Run:
    """Train as `config` says into the new run directory `out`; `progress` shows it.

    Raises ConfigError, DataError, RunError or TrainingError; what was saved before stands. Ctrl-C, SIGTERM and SIGHUP
    raise Stopped, a KeyboardInterrupt, once the step in progress is saved.
    """
    config = copy.deepcopy(config)  # what is found out about this run is not the caller's
    take_growth(config)
    config.check(math.prod(launch.processes(config.training)))
    pl.seed_everything(config.training.seed, verbose=False)
    corpus = build_corpus(config.data, start_tokenizer(config))
    _fit_vocabulary(config, corpus)
    require_rows(config, corpus)
    _require_room(config, corpus)
    _require_dials(config, corpus)
    _require_shardable(config)
    require_base(config, corpus.control_names)
    job = _Job.build(config, Run(Path(out).expanduser()), corpus, resuming=False, progress=progress)
    load_start(config, job.module.model)
    job.module.moments = start_moments(config)
    _require_laplacian(config, job.module.model)
    config_text(config.as_dict())
    # Nothing that the user may have got wrong is left: what was made would stand in the way of the corrected command.
    if launch.rank() == 0:
        Run.create(out, notes={TEXTS: fingerprints(config.data)}).write_config(config.as_dict())
        corpus.tokenizer.save(job.run.path / TOKENIZER)
        if config.training.neutral_kl:
            keep_base(config, job.run)
    return job.fit(resume_from=None)


def resume(
    path: str | Path,
    machine: Mapping[str, Any] | None = None,
    progress: ShownBy = Progress,
    texts: Mapping[str, str] | None = None,
) -> Run:
    """Go on from the newest complete checkpoint of the run directory `path`, to bit-identical weights.

    Only training.calibration.kind `start` sets tau anew, unless its at_restart is false.

    `machine` replaces training options that say what to train on and not how: those in MACHINE. A run may go
    on with another number of processes, where sums are rounded differently.

    `texts` says where files of the corpus lie now, {"data.text.path": "book.txt"}; the run keeps that.

    Raises RunError if there is no checkpoint to resume from, a text is not what it was, or another process trains
    there, ConfigError for another option; else as `train`.
    """
    run = Run(Path(path).expanduser())
    run.require_run()
    config = from_dict(RunConfig, run.read_config(), "config.yaml")
    put_texts(config.data, texts or {})
    config.training = replace(config.training, **machine_only(machine or {}))
    config.check(math.prod(launch.processes(config.training)))
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise RunError(f"{path} has no complete checkpoint to resume from; train again into another directory")
    if (run.path / MANIFEST).is_file() and not (run.path / TOKENIZER).is_file():
        Run.open(checkpoint)  # says what is missing and what to do
    require_texts(config.data, run.path)
    corpus = build_corpus(config.data, load_tokenizer(run.path / TOKENIZER))
    job = _Job.build(config, run, corpus, resuming=True, progress=progress)
    return job.fit(resume_from=checkpoint, texts=texts)


def machine_only(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """`options`. Raises ConfigError for one that says how to train, which resuming must not change."""
    for name in options:
        if name not in MACHINE:
            raise ConfigError(f"resume takes only {', '.join(MACHINE)} of the training options, got {name!r}")
    return options


@dataclass
class _Job:
    """A run ready to start: whatever may be wrong with a configuration has shown while this was built."""

    config: RunConfig
    run: Run
    corpus: Corpus
    module: TrainingModule
    trainer: pl.Trainer
    budget: Budget
    validation: Validation
    stopping: Stopping

    @classmethod
    def build(cls, config: RunConfig, run: Run, corpus: Corpus, resuming: bool, progress: ShownBy) -> _Job:
        model = LanguageModel(
            _followed(config.model) if resuming or config.start_from else config.model, corpus.tokenizer
        )
        if config.training.precision == "64-true":
            model.double()  # Lightning would do so after it has loaded the checkpoint into float32
        base = stage_base(config, run.path if resuming else None, model)
        module = TrainingModule(config, model, corpus, base)
        files = PatientCheckpointIO()
        budget, validation, callbacks = _callbacks(config, run, corpus, files, progress)
        stopping = Stopping(budget)
        with _quiet():
            trainer = _trainer(config, budget.steps, [*callbacks, stopping], files)
        _say_what_emulation_costs(trainer)
        return cls(config, run, corpus, module, trainer, budget, validation, stopping)

    def fit(self, resume_from: Path | None, texts: Mapping[str, str] | None = None) -> Run:
        if launch.rank() > 0:
            return self._fit(resume_from)
        with alone(self.run.path):
            if resume_from is not None:
                Run.create(self.run.path, resume=True)
            if texts:
                self.run.write_config(merge(self.run.read_config(), texts))
            return self._fit(resume_from)

    def _fit(self, resume_from: Path | None) -> Run:
        # Each process drops out other units; one that the checkpoint knows gets its own state back instead.
        pl.seed_everything(self.config.training.seed + launch.rank(), verbose=False)
        trainer, run = self.trainer, self.run
        with self.stopping, _quiet(), launch.ended_together(trainer):
            trainer.fit(self.module, ckpt_path=resume_from)
        if launch.rank() == 0:
            self._finish(nothing_done=resume_from is not None and trainer.global_step == checkpoint_step(resume_from))
        if self.budget.interrupted:
            where = f"stopped and saved at step {trainer.global_step}"
            _say(f"\n{where}; go on with: glissando train --resume {shlex.quote(str(run.path))}")
            raise Stopped(f"training was stopped at step {trainer.global_step} and saved", self.stopping.asked)
        if resume_from is not None and trainer.global_step == checkpoint_step(resume_from):
            _say(f"{run.path} is finished, at step {trainer.global_step}: nothing is left to train")
        if self.corpus.problems:
            _say(self.corpus.problems)
        _say(f"run: {run.path}   (try: {_example(run, self.corpus)})")
        return run

    def _finish(self, nothing_done: bool) -> None:
        """The summary; and the run's own weights, unless they are those that the last step has left there."""
        run, t, step = self.run, self.config.training, self.trainer.global_step
        best = run.best_checkpoint() if t.early_stopping is not None and not self.budget.interrupted else None
        checkpoint = best or (run.latest_checkpoint() if nothing_done else None)
        if checkpoint is not None:
            run.write_model(Run(run.path, checkpoint).read_state_dict(), run.read_config())
        rows = read_metrics(run.path / METRICS)
        rate = self.module.learning_rate or (float(rows[-1]["learning_rate"]) if rows else 0.0)
        summary = {
            "steps": step, "tokens": self.module.tokens, "seconds": self.budget.spent, "flops": None if math.isnan(self.module.flops) else self.module.flops,
            "finished": not self.budget.interrupted,
            "learning_rate_scale": rate / t.optimizer.learning_rate,
            "weights": "latest" if best is None else BEST,
            **summarize(rows, self.validation.best_step),
        }  # fmt: skip
        run.write_summary(summary)
        for line in told(summary, str(run.path / CHECKPOINTS / BEST)):
            _say(line)


def _say_what_emulation_costs(trainer: pl.Trainer) -> None:
    """Measured for the nano presets on a processor with AVX2 alone: 450 tokens/s in bf16-mixed, 3,400 in 32-true."""
    processor = torch.cpu.get_capabilities()
    emulated = processor.get("architecture") == "x86_64" and not processor.get("avx512_bf16")
    if trainer.precision == "bf16-mixed" and trainer.strategy.root_device.type == "cpu" and emulated:
        _say("this processor has no bfloat16 arithmetic: bf16-mixed is emulated, several times slower than 32-true")


def _say(line: str) -> None:
    if launch.rank() == 0:
        say(line, sys.stderr)


def _example(run: Run, corpus: Corpus) -> str:
    """A command line, for a shell, that continues the corpus's own first prompt."""
    prompt = corpus.prompts(1)[0]
    sign = "=" if prompt.startswith("-") else " "  # argparse would take it for an option
    return f"glissando generate {shlex.quote(str(run.path))} --prompt{sign}{quoted(prompt)}"


def quoted(text: str) -> str:
    """`text` as one word of a shell's command line, control characters by their escapes."""
    if all(character.isprintable() for character in text):
        return shlex.quote(text)
    named = {"\t": "\\t", "\n": "\\n", "\\": "\\\\", "'": "\\'"}
    escaped = (named.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
    return f"$'{''.join(escaped)}'"


def _callbacks(
    config: RunConfig, run: Run, corpus: Corpus, files: PatientCheckpointIO, shown_by: ShownBy
) -> tuple[Budget, Validation, list[pl.Callback]]:
    t = config.training
    budget = Budget(_steps(config, corpus), t.tokens, t.seconds, t.flops)
    calibration = Calibration(t.calibration, budget)
    validation = Validation(budget, t.validate_every, t.early_stopping)
    metrics = Metrics(run.path, t.log_every, validation, budget, t.tensorboard, calibration)
    progress = shown_by(budget, validation, metrics)
    samples = Samples(run.path, budget, t.sample_every, progress.say, t.sample_prompt)
    saver = Saver(run, budget, t.save_every, t.keep_checkpoints, files, validation)
    # The order is the order within a step: what is saved must know of what was validated.
    callbacks = [RandomState(), budget, calibration, validation, metrics, progress, samples, saver]
    return budget, validation, callbacks


def _steps(config: RunConfig, corpus: Corpus) -> int | None:
    """The budget in steps, where it is one of steps or epochs."""
    epochs = config.training.epochs
    if epochs is None:
        return config.training.steps
    if corpus.epoch_rows is None:
        raise ConfigError(
            f"training.epochs counts passes over a text or over pairs, and corpus {CORPORA.kind_of(config.data)} has no known "
            "end: give training.steps or another budget"
        )
    return max(1, math.ceil(epochs * corpus.epoch_rows / config.data.batch_size))


def _trainer(
    config: RunConfig, steps: int | None, callbacks: list[pl.Callback], files: PatientCheckpointIO
) -> pl.Trainer:
    t = config.training
    devices, nodes = launch.processes(t)
    build = functools.partial(
        pl.Trainer,
        accelerator=t.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=_strategy(t, devices * nodes),
        precision=t.precision,
        max_steps=steps or -1,
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
    try:
        return build()
    except (MisconfigurationException, ImportError, ValueError) as error:
        here = sorted(name for name, entry in AcceleratorRegistry.items() if entry["accelerator"].is_available())
        raise ConfigError(
            f"training.accelerator {t.accelerator!r} with {devices} device(s), strategy {t.strategy}, precision "
            f"{t.precision} does not work here: {' '.join(str(error).split())} "
            f"Available here: {', '.join(['auto', *here])}."
        ) from error


def _strategy(training: TrainingConfig, processes: int) -> Any:
    if training.strategy == "fsdp":
        # Lightning's own choice is tensor parallelism within a node, which would shard no weight at all here.
        return ShardedStrategy(data_parallel_size=processes, tensor_parallel_size=1)
    return "ddp" if training.strategy == "ddp" or processes > 1 else "auto"


def _require_dials(config: RunConfig, corpus: Corpus) -> None:
    """Labels train the dials of the same names; without labels a flow is trained without its control."""
    names, labels = config.model.controls, list(corpus.control_names)
    if names and not labels:
        _say(f"the corpus has no labels: the dials {', '.join(names)} are not trained")
    if names and labels and names != labels:
        raise ConfigError(
            f"model.depth.control is {names}, and the corpus's labels are {labels}: give both the same names in the "
            "same order"
        )


def _followed(config: ModelConfig) -> ModelConfig:
    """Of a model whose weights are loaded next: what only a new one reads, such as a Laplacian's file, may be gone."""
    return for_saved_weights(config)


def _require_laplacian(config: RunConfig, model: LanguageModel) -> None:
    """Raises ConfigError where a tau mixer has no Laplacian, or would not have the one that is asked for."""
    lacking = [name for name, m in model.named_modules() if isinstance(m, Tau) and not m.laplacian.isfinite().all()]
    asked = next((m.laplacian for m in config.model.mixers if isinstance(m, TauConfig)), None)
    if lacking and config.start_from is None:
        raise ConfigError(
            f"model.mixers.tau.laplacian is {asked!r}, but a new model has no weights to take it from: give `chain`, "
            "or a file of `glissando laplacian build`; or start with --from a run that has one"
        )
    if lacking:
        raise ConfigError(f"{config.start_from} has no Laplacian for {', '.join(lacking)}: give both the same layers")
    if config.start_from is None or not any(isinstance(m, Tau) for m in model.modules()):
        return
    theirs = asked
    if asked not in (theirs, "saved"):
        raise ConfigError(
            f"model.mixers.tau.laplacian is {asked!r}, but the weights of {config.start_from} come with their own, "
            f"{theirs!r}: leave the option out, or train a new model"
        )


def _require_shardable(config: RunConfig) -> None:
    if config.training.strategy == "fsdp" and isinstance(config.model.depth, FlowConfig):
        raise ConfigError(
            "training.strategy `fsdp` cannot shard a flow, whose field is evaluated by parts and again in the backward "
            "pass; use `ddp`"
        )


def _require_room(config: RunConfig, corpus: Corpus) -> None:
    limit, prompt = config.model.max_length, config.training.sample_prompt
    if config.model.positions != "learned" or limit is None or prompt is None:
        return
    if (tokens := len(corpus.tokenizer.encode(prompt))) >= limit:
        raise ConfigError(
            f"training.sample_prompt has {tokens} tokens, and model.max_length {limit} leaves no more: shorten it"
        )


def _fit_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """A preset's vocabulary is that of its published tokenizer; a smaller tokenizer leaves a part of it unused."""
    given, tokens = config.model.vocab_size, corpus.tokenizer.vocab_size
    config.model.vocab_size = fitted_vocabulary(given, tokens)
    if given > tokens and config.model.vocab_size == given:
        _say(f"the tokenizer has {tokens} tokens of the model's {given:,} (--model.vocab_size {tokens}: no more)")
    elif given not in (ModelConfig.vocab_size, tokens):
        _say(f"model.vocab_size {given} is too small and not used: the tokenizer has {tokens} tokens (data.tokenizer)")


def require_rows(config: RunConfig, corpus: Corpus) -> None:
    """Raises DataError if there is too little to train on, ConfigError for rows longer than learned positions."""
    width = max(batch.ids.shape[1] for batch in itertools.islice(corpus.batches("train"), 4))  # rows may vary
    limit, given = config.model.max_length, config.data.seq_len
    if config.model.positions != "learned" or limit is None:
        return
    if given > limit:
        raise ConfigError(f"data.seq_len {given} is longer than model.max_length {limit}: lower it to {limit} or less")
    if width > limit:
        fix = "--data.cut true" if CORPORA.kind_of(config.data) == "stories" else "another corpus"
        raise ConfigError(
            f"corpus {CORPORA.kind_of(config.data)} has rows of {width} tokens, whatever data.seq_len is, and model.max_length "
            f"is {limit}: give {fix}, or --model.max_length {width}"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's banners and its advice about loaders of its own kind say nothing to our users."""
    names = ("pytorch", "pytorch.utilities.rank_zero", "fabric", "fabric.utilities.distributed")
    wanted = {f"lightning.{name}": logging.WARNING for name in names}
    wanted["torch._dynamo"] = logging.ERROR  # that a model is compiled in pieces
    loggers = [logging.getLogger(name) for name in wanted]
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, wanted.values(), strict=True):
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            for message in _ASIDES:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
