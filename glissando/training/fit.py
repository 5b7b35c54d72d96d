"""From a configuration to a finished run directory, and from an interrupted one to the same place."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glissando.backbone import for_saved_weights
from glissando.checkpoints import BEST, CHECKPOINTS, saved_step
from glissando.config import from_dict, merge
from glissando.data.base import Corpus
from glissando.data.corpora import CORPORA, build_corpus
from glissando.errors import ConfigError, RunError, Stopped
from glissando.fabric import seed_everything
from glissando.loading import BASE, load
from glissando.loggers import WANDB
from glissando.metrics import read_metrics, summarize, summary_lines
from glissando.model import LanguageModel, ModelConfig
from glissando.observation.calibration_options import CALIBRATIONS
from glissando.precision import flushed_subnormals, resolved_precision
from glissando.run_files import TEXTS, alone, fingerprints, put_texts, require_texts
from glissando.runs import CONFIG, METRICS, SUMMARY, Run, config_text
from glissando.storage import MANIFEST, publishing, read_manifest, verify_manifest, write_manifest
from glissando.training import launch
from glissando.training.config import MACHINE, OPTIMIZERS, RunConfig, fitted_vocabulary
from glissando.training.hook import Hook
from glissando.training.length import BUDGETS
from glissando.training.loop import Loop
from glissando.training.mirroring import Mirroring, new_place, old_place
from glissando.training.moments import Moments, optimizer_of, read_moments
from glissando.training.observation import Observation
from glissando.training.progress import Progress
from glissando.training.shares import remembered
from glissando.training.start import keep_base, load_start, start_tokenizer
from glissando.training.state import TrainState
from glissando.urls import is_url

#: of environment.json: the id of torchrun's job that made the run
JOB = "torchrun"


@flushed_subnormals()
def train(config: RunConfig, out: str | Path, progress: Hook | None = None, work: Path | None = None) -> Run:
    """Train as `config` says into the new run directory `out`; `progress` shows it, a bar by default.

    Where `out` is a URL, the run is made in a directory of this machine, which is returned, and copied there after
    every save. `work` is that directory, if not one that is chosen by the URL.

    Raises ConfigError, DataError, RunError or TrainingError; what was saved before stands. Ctrl-C, SIGTERM, SIGHUP
    and SIGUSR1 raise Stopped, a KeyboardInterrupt, once the step in progress is saved.

    What torchrun has started before, in a job of the same id and with the same configuration, goes on from its newest
    checkpoint.
    """
    config = copy.deepcopy(config)  # what is found out about this run is not the caller's
    config.check(math.prod(launch.processes(config.training)))
    tokenizer, moments = None, Moments()
    if config.start_from is not None:
        start = Run.open(config.start_from)
        tokenizer, config.grown, moments = start_tokenizer(start, config.data), remembered(start), read_moments(start)
    elif config.grown:
        raise ConfigError("grown is what `glissando grow` left in a run: start from that with --from, or leave it out")
    config.training.precision = resolved_precision(config.training.precision, config.training.accelerator)
    seed_everything(config.training.seed, verbose=False)
    corpus, progress = build_corpus(config.data, tokenizer), progress or Progress()
    notes = fit_to_corpus(config, corpus)
    path, mirroring = new_place(out, work)
    loop = _build(config, Run(path), corpus, progress, resuming=False)
    if (before := optimizer_of(moments)) in (None, OPTIMIZERS.kind_of(config.training.optimizer)):
        loop.moments = moments
    else:
        now = OPTIMIZERS.kind_of(config.training.optimizer)
        notes.append(f"{config.start_from} was trained with {before}; {now} starts with an empty state")
    if config.start_from is None:
        loop.model.require_started()
    else:
        notes += load_start(config.start_from, config.model, loop.model)
    text = config_text(config.as_dict())
    # A job that is put into its queue again may come to another machine, and another node never had the directory.
    if _begun_by_this_job(loop.run, text) or (mirroring is not None and mirroring.mirror.is_begun(launch.job(), text)):
        return resume(out, progress=progress, work=work)
    if mirroring is not None and launch.rank() == 0:
        mirroring.mirror.require_free()
    # Nothing that the user may have got wrong is left: what was made would stand in the way of the corrected command.
    if launch.rank() > 0:
        return _fit(loop, None, mirroring)
    loop.run.require_free(anew=True)
    with alone(loop.run.path) as locked:
        for note in notes:
            progress.message(note)
        notes_of_making = {TEXTS: fingerprints(config.data)} | ({JOB: job} if (job := launch.job()) else {})
        run = Run.create(path, notes_of_making, anew=locked)
        run.write_config(config.as_dict())
        run.write_tokenizer(corpus.tokenizer)
        if config.training.neutral_kl:
            keep_base(str(config.start_from), run)
        return _fit(loop, None, mirroring)


def _begun_by_this_job(run: Run, config: bytes) -> bool:
    """Whether torchrun has started this training, with this config.yaml, before and it has saved a checkpoint: a
    process was killed since, or the job was put into its queue again."""
    job = launch.job()
    if job is None or not (run.path / CONFIG).is_file() or run.read_environment().get(JOB) != job:
        return False
    return (run.path / CONFIG).read_bytes() == config and (run.latest_checkpoint() or run.best_checkpoint()) is not None


@flushed_subnormals()
def resume(
    path: str | Path,
    machine: Mapping[str, Any] | None = None,
    progress: Hook | None = None,
    texts: Mapping[str, str] | None = None,
    work: Path | None = None,
) -> Run:
    """Go on from the newest complete checkpoint of the run directory `path`, to bit-identical weights.

    Only training.calibration.kind `start` sets tau anew, unless its at_restart is false.

    `machine` replaces training options that say what to train on and not how: those in MACHINE. A run may go
    on with another number of processes, where sums are rounded differently.

    `texts` says where files of the corpus lie now, {"data.path": "book.txt"}; the run keeps that.

    A run at a URL goes on in a directory of this machine, `work` as in `train`; its checkpoints are fetched where that
    has none as new.

    Raises RunError if there is no checkpoint to resume from, a text is not what it was, or another process trains
    there, ConfigError for another option; else as `train`.
    """
    path, mirroring = old_place(path, work)
    run = Run(path)
    run.require_run()
    run.require_inside()
    is_first = launch.rank() == 0
    with alone(run.path) if is_first else contextlib.nullcontext():
        checkpoint = run.require_checkpoint()
        opened = Run.open(checkpoint)
        config = from_dict(RunConfig, opened.read_config(to_train=True), "config.yaml")
        put_texts(config.data, texts or {})
        config.training = replace(config.training, **machine_only(machine or {}))
        config.check(math.prod(launch.processes(config.training)))
        require_texts(config.data, opened, texts or {})
        corpus = build_corpus(config.data, opened.require_tokenizer())
        loop = _build(config, run, corpus, progress or Progress(), resuming=True)
        if is_first:
            opened.restore(checkpoint)
            run.note_resumed({TEXTS: fingerprints(config.data)} if texts else {})
            if texts:
                run.write_config(merge(RunConfig, run.read_config(), texts))
        return _fit(loop, checkpoint, mirroring)


def extend(
    path: str | Path,
    out: str | Path,
    options: Mapping[str, Any],
    progress: Hook | None = None,
    texts: Mapping[str, str] | None = None,
) -> Run:
    """Train the run at `path` further, under a larger budget, into the new directory `out`; `path` stays as it is.

    `options` of training: the new budget, which counts what was spent before, and any of MACHINE and early_stopping.
    `out` begins as a copy. The schedule is that of the new budget: a cosine goes on at the share of it that is spent,
    with a higher rate than it ended at.

    Raises ConfigError for other options and where nothing is left to train, RunError where `out` exists; else as
    `resume`.
    """
    if urls := [str(given) for given in (path, out) if is_url(given)]:
        raise ConfigError(f"a run is extended from one local directory into another; got {urls[0]}")
    run, out = Run(Path(path).expanduser()), Path(out).expanduser()
    machine_only(options, beside=(*BUDGETS, "early_stopping"))
    run.require_run()
    run.require_inside()
    checkpoint = run.require_checkpoint()
    config = from_dict(RunConfig, Run.open(checkpoint).read_config(to_train=True), "config.yaml")
    put_texts(config.data, texts or {})
    require_texts(config.data, run, texts or {})
    config.training = t = replace(config.training, **{**dict.fromkeys(BUDGETS), **options})
    config.check(math.prod(launch.processes(t)))
    state = TrainState.load(checkpoint)
    done = {"steps": state.step, "tokens": state.tokens, "seconds": state.seconds, "flops": state.flops}
    if any(spent >= (getattr(t, name) or math.inf) for name, spent in done.items()) or (
        t.early_stopping is not None and state.waited >= t.early_stopping
    ):
        raise ConfigError(
            f"nothing is left to train: {path} is at step {state.step}, {state.tokens:,} tokens, {state.seconds:.0f} "
            f"s, {state.waited} validations after its best: give a larger budget or training.early_stopping"
        )

    def fill(folder: Path) -> None:
        with alone(run.path):  # one in training would be copied in the middle of a save
            # Without wandb/: its id there would send the new rows to the run that `path` belongs to.
            left_out = shutil.ignore_patterns(".*", SUMMARY, WANDB)
            shutil.copytree(run.path, folder, ignore=left_out, dirs_exist_ok=True)
            # What is copied gets a new manifest; logs have grown since the last one.
            names = {*read_manifest(run.path)} - {SUMMARY}
            verify_manifest(folder, names - {METRICS}, f"{run.path} is left as it is.")
        (folder / CONFIG).write_bytes(config_text(config.as_dict()))
        write_manifest(folder, names)

    if launch.rank() == 0:
        if out.exists():
            raise RunError(f"{out} exists; nothing is overwritten: choose another --out")
        with publishing(out) as folder:
            fill(folder)
    while not (out / MANIFEST).is_file():  # which the first process makes
        time.sleep(0.1)
    return resume(out, progress=progress)


def machine_only(options: Mapping[str, Any], beside: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """`options`. Raises ConfigError for one that says how to train, which going on must not change."""
    if others := [name for name in options if name not in (*beside, *MACHINE)]:
        raise ConfigError(f"a run continues with {', '.join((*beside, *MACHINE))} of training alone, got {others[0]!r}")
    return options


def fit_to_corpus(config: RunConfig, corpus: Corpus) -> list[str]:
    """Give the model the corpus's vocabulary; returns what a person should know of how they fit.

    Raises ConfigError or DataError for options that do not fit the corpus.
    """
    notes, model = [], config.model
    given, tokens = model.vocab_size, corpus.tokenizer.vocab_size
    # A preset's vocabulary is that of its published tokenizer; a smaller tokenizer leaves a part of it unused.
    model.vocab_size = fitted_vocabulary(given, tokens)
    if given > tokens and model.vocab_size == given:
        notes.append(
            f"the tokenizer has {tokens} tokens of the model's {given:,} (--model.vocab_size {tokens}: no more)"
        )
    elif given not in (ModelConfig.vocab_size, tokens):
        notes.append(f"model.vocab_size {given} is too small and not used: the tokenizer has {tokens} tokens")
    require_rows(config, corpus)
    length = len(corpus.tokenizer.encode(config.training.sample_prompt or ""))
    if model.max_length is not None and length >= model.max_length:
        raise ConfigError(
            f"training.sample_prompt has {length} tokens, and model.max_length {model.max_length} leaves no more: "
            "shorten it"
        )
    labels = list(corpus.control_names)
    if hasattr(model.depth, "control_trained"):
        if labels:
            model.depth.control_trained = True
        elif config.start_from is None:  # else it is as trained as it was
            model.depth.control_trained = False
    if model.controls and not labels:
        notes.append(f"the corpus has no labels: the dials {', '.join(model.controls)} are not trained")
    if model.controls and labels and model.controls != labels:
        raise ConfigError(
            f"model.depth.control is {model.controls}, and the corpus's labels are {labels}: give both the same names "
            "in the same order"
        )
    if config.training.neutral_kl and not (config.start_from and labels and model.controls):
        raise ConfigError(
            "training.neutral_kl ties the model at u = 0 to the one that training started from: it needs --from RUN "
            f"(or stages; got {config.start_from}), a model with dials (model.depth.control, got {model.controls}) and "
            f"a labelled corpus (labels: {', '.join(labels) or 'none'}); or leave it out"
        )
    return notes


def require_rows(config: RunConfig, corpus: Corpus) -> None:
    """Raises DataError if there is too little to train on, ConfigError for rows longer than learned positions."""
    width = max(batch.ids.shape[1] for batch in itertools.islice(corpus.batches("train"), 4))  # rows may vary
    limit, given = config.model.max_length, config.data.seq_len
    if limit is None:
        return
    if given > limit:
        raise ConfigError(f"data.seq_len {given} is longer than model.max_length {limit}: lower it to {limit} or less")
    if width > limit:
        fix = "--data.cut true" if hasattr(config.data, "cut") else "another corpus"
        raise ConfigError(
            f"corpus {CORPORA.kind_of(config.data)} has rows of {width} tokens, whatever data.seq_len is, and "
            f"model.max_length is {limit}: give {fix}, or --model.max_length {width}"
        )


def _build(config: RunConfig, run: Run, corpus: Corpus, progress: Hook, resuming: bool) -> Loop:
    saved = resuming or config.start_from is not None
    model = LanguageModel(for_saved_weights(config.model) if saved else config.model, corpus.tokenizer)
    if config.training.precision == "64-true":
        model.double()  # before weights are loaded into it
    base = None
    if config.training.neutral_kl:
        base = load(run.path / BASE if resuming else str(config.start_from)).requires_grad_(False)
        base.to(model.embedding.weight.dtype)
    calibration = config.training.calibration
    hooks = [progress, Observation(), CALIBRATIONS.class_of(calibration)(calibration)]
    return Loop(config, run, corpus, model, base, hooks)


def _fit(loop: Loop, checkpoint: Path | None, mirroring: Mirroring | None) -> Run:
    run, is_first, lines = loop.run, launch.rank() == 0, list[str]()
    name = str(run.path) if mirroring is None else mirroring.mirror.url
    if mirroring is not None:
        loop.hooks.append(mirroring)
        if is_first:
            loop.hooks[0].message(f"trained in {run.path}, copied to {name} after every save")
    with loop.stopping, launch.quiet(), launch.ended_together(loop.fabric):
        try:
            loop.train(checkpoint)
        finally:
            loop.close()
    nothing_done = checkpoint is not None and loop.state.step == saved_step(checkpoint)
    if is_first:
        lines = _finish(loop, nothing_done)
        if mirroring is not None:
            mirroring.mirror.push()
    where = shlex.quote(name)
    if loop.budget.interrupted:
        lines.append(f"\nstopped and saved at step {loop.state.step}; continue with: glissando train --resume {where}")
    else:
        if nothing_done:
            lines.append(f"{name} is finished, at step {loop.state.step}: nothing is left to train")
        if loop.corpus.problems:
            lines.append(loop.corpus.problems)
        prompt = loop.corpus.prompts(1)[0]
        given = f" --prompt={shlex.quote(prompt)}" if prompt.isprintable() else ""
        lines.append(f"run: {name}   (try: glissando generate {where}{given})")
    if is_first:
        for line in lines:
            for hook in loop.hooks:
                hook.message(line)
    if loop.budget.interrupted:
        raise Stopped(f"training was stopped at step {loop.state.step} and saved", loop.stopping.asked)
    return run


def _finish(loop: Loop, nothing_done: bool) -> list[str]:
    """Write the summary, and the run's own weights where they are not those of the last step; the summary in lines."""
    run, t, state = loop.run, loop.config.training, loop.state
    best = run.best_checkpoint() if t.early_stopping is not None and not loop.budget.interrupted else None
    if best is not None and saved_step(best) != state.best_step:
        best = None  # of steps that a crash undid
    checkpoint = best or (run.latest_checkpoint() if nothing_done else None)
    if checkpoint is not None:
        run.write_model(Run(run.path, checkpoint).read_state_dict(), run.read_config())
    rows = read_metrics(run.path / METRICS)
    rate = loop.learning_rate or (float(rows[-1]["learning_rate"]) if rows else 0.0)
    summary = {
        "steps": state.step, "tokens": state.tokens, "seconds": state.seconds,
        "flops": None if math.isnan(state.flops) else state.flops,
        "finished": not loop.budget.interrupted,
        "learning_rate_scale": rate / t.optimizer.learning_rate,
        "weights": "latest" if best is None else BEST,
        **summarize(rows, state.best_step),
    }  # fmt: skip
    run.write_summary(summary)
    return summary_lines(summary, str(run.path / CHECKPOINTS / BEST))
