"""From a configuration to a finished run directory, and from an interrupted one to the same place."""

from __future__ import annotations

import contextlib
import copy
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glissando.backbone import Backbone
from glissando.checkpoints import BEST, best_checkpoint, checkpoint_path, checkpoint_step, latest_checkpoint
from glissando.config import from_dict, merge
from glissando.errors import ConfigError, Stopped
from glissando.loading import with_weights_of
from glissando.metrics import read_metrics
from glissando.precision import flushed_subnormals, resolved_precision
from glissando.run_files import TEXTS, alone, fingerprints, put_texts, require_texts
from glissando.runs import CONFIG, ENVIRONMENT, METRICS, Run, config_text, resumed_environment
from glissando.training import launch
from glissando.training.config import MACHINE, OPTIMIZERS, AnyRunConfig, RunConfig
from glissando.training.loop import Hook, Loop
from glissando.training.mirroring import Mirror, place_of
from glissando.training.progress import Progress
from glissando.training.shares import Moments, read_moments, remembered
from glissando.training.start import load_start

#: of environment.json: the id of torchrun's job that made the run
JOB = "torchrun"


@flushed_subnormals()
def train(config: AnyRunConfig, out: str | Path, progress: Hook | None = None) -> Run:
    """Train as `config` says into the new run directory `out`; `progress` shows it, a bar by default.

    Where `out` is a URL, the run is made in a directory of this machine, which is returned, and copied there after
    every save.

    Raises ConfigError, DataError, RunError or TrainingError; what was saved before stands. Ctrl-C, SIGTERM, SIGHUP
    and SIGUSR1 raise Stopped, a KeyboardInterrupt, once the step in progress is saved.

    What torchrun has started before, in a job of the same id and with the same configuration, goes on from its newest
    checkpoint.
    """
    config = copy.deepcopy(config)  # what is found out about this run is not the caller's
    config.check(math.prod(launch.processes(config.training)))
    t, progress = config.training, progress or Progress()
    t.precision = resolved_precision(t.precision, t.accelerator)
    launch.seed_everything(t.seed, verbose=False)
    # All that the user may have got wrong is found before anything is made that the corrected command would meet.
    moments = Moments()
    if config.start_from is not None:
        start = Run.open(config.start_from)
        config.grown, moments = remembered(start), read_moments(start)
    elif config.grown:
        raise ConfigError("grown is what `glissando grow` left in a run: start from that with --from, or leave it out")
    task = config.task()
    path, mirror = place_of(out)
    run = Run(path)
    model = task.new_model(saved=config.start_from is not None)
    loop = Loop(config, run, task, model, [progress, *task.hooks()])
    notes = [*task.notes, *_start(loop, moments)]
    text = config_text(config.as_dict())
    # A job that is put into its queue again may come to another machine, and another node never had the directory.
    if _begun_by_this_job(run, text) or (mirror is not None and mirror.is_begun(launch.job(), text)):
        return resume(out, progress=progress)
    if mirror is not None and launch.rank() == 0:
        mirror.require_free()
    if launch.rank() > 0:
        return _fit(loop, None, mirror)
    run.require_free(anew=True)
    with alone(path) as locked:
        for note in notes:
            progress.message(note)
        notes_of_making = {TEXTS: fingerprints(config.data)} | ({JOB: job} if (job := launch.job()) else {})
        Run.create(path, notes_of_making, anew=locked).write_config(config.as_dict())
        task.write(run)
        loop.files = run.small_files()
        return _fit(loop, None, mirror)


def _start(loop: Loop, moments: Moments) -> list[str]:
    """Give the model the weights and the optimizer's state that training starts from; what a person should know."""
    config = loop.config
    if config.start_from is None:
        if isinstance(loop.model, Backbone):
            loop.model.require_started()
        return []
    before = "muon" if any("momentum_buffer" in tensors for tensors in moments.values()) else "adamw"
    now = OPTIMIZERS.kind_of(config.training.optimizer)
    notes = load_start(config.start_from, config.model, loop.model)
    if before == now or not moments:
        loop.moments = moments
        return notes
    return [f"{config.start_from} was trained with {before}; {now} starts with an empty state", *notes]


def _begun_by_this_job(run: Run, config: bytes) -> bool:
    """Whether torchrun has started this training, with this config.yaml, before and it has saved a checkpoint: a
    process was killed since, or the job was put into its queue again."""
    job = launch.job()
    if job is None or not (run.path / CONFIG).is_file() or run.read_environment().get(JOB) != job:
        return False
    return (run.path / CONFIG).read_bytes() == config and latest_checkpoint(run.path) is not None


@flushed_subnormals()
def resume(
    path: str | Path,
    machine: Mapping[str, Any] | None = None,
    progress: Hook | None = None,
    texts: Mapping[str, str] | None = None,
    kind: type[AnyRunConfig] = RunConfig,
) -> Run:
    """Go on from the newest complete checkpoint of the run directory `path`, to bit-identical weights.

    Only a mixer that calibrates itself at restarts does that anew.

    `machine` replaces training options that say what to train on and not how: those in MACHINE. A run may go
    on with another number of processes, where sums are rounded differently.

    `texts` says where files of the corpus lie now, {"data.path": "book.txt"}; the run keeps that.

    A run at a URL goes on in a directory of this machine; its checkpoints are fetched where that
    has none as new.

    Raises RunError if there is no checkpoint to resume from, a text is not what it was, or another process trains
    there, ConfigError for another option; else as `train`.
    """
    path, mirror = place_of(path, resumed=True)
    run = Run(path)
    run.require_run()
    run.require_inside()
    is_first = launch.rank() == 0
    with alone(run.path) if is_first else contextlib.nullcontext():
        checkpoint = run.require_checkpoint()
        opened = Run.open(checkpoint)
        config = _config(opened, kind)
        put_texts(config.data, texts or {})
        if others := [name for name in machine or {} if name not in MACHINE]:
            raise ConfigError(f"a run continues with {', '.join(MACHINE)} of training alone, got {others[0]!r}")
        config.training = replace(config.training, **(machine or {}))
        config.check(math.prod(launch.processes(config.training)))
        require_texts(config.data, opened, texts or {}, config.other_texts)
        task = config.task(opened)
        loop = Loop(config, run, task, task.new_model(saved=True), [progress or Progress(), *task.hooks()])
        if is_first:
            loop.files = files = opened.small_files()
            notes = {TEXTS: fingerprints(config.data)} if texts else {}
            files[ENVIRONMENT] = resumed_environment(files.get(ENVIRONMENT, b"{}"), notes)
            files[CONFIG] = config_text(merge(kind, opened.read_config(kind=kind.kind), texts or {}))
        return _fit(loop, checkpoint, mirror)


def trained(path: str | Path, kind: type[AnyRunConfig]) -> Any:
    """The model of a run of a task of one's own, in evaluation mode; `kind` is the task's configuration.

    Raises RunError for a run of another kind, or a damaged one.
    """
    run = Run.open(path)
    task = _config(run, kind).task(run)
    return with_weights_of(run, lambda: task.new_model(saved=True)).eval()


def _config(run: Run, kind: type[AnyRunConfig]) -> Any:
    values = run.read_config(kind=kind.kind, to_train=True)
    values.pop("kind", None)
    return from_dict(kind, values, "config.yaml")


def _fit(loop: Loop, checkpoint: Path | None, mirror: Mirror | None) -> Run:
    run, is_first, lines = loop.run, launch.rank() == 0, list[str]()
    name = str(run.path) if mirror is None else mirror.url
    if mirror is not None:
        loop.hooks.append(mirror)
        if is_first:
            loop.hooks[0].message(f"trained in {run.path}, copied to {name} after every save")
    with loop.stopping, launch.quiet(), launch.ended_together(loop.fabric):
        try:
            loop.train(checkpoint)
        finally:
            loop.close()
    nothing_done = checkpoint is not None and loop.state.step == checkpoint_step(checkpoint)
    if is_first:
        lines = _finish(loop, nothing_done, name)
        if mirror is not None:
            mirror.push()
    if is_first:
        for line in lines:
            for hook in loop.hooks:
                hook.message(line)
    if loop.stop == "asked":
        raise Stopped(f"training was stopped at step {loop.state.step} and saved", loop.stopping.asked)
    return run


def _finish(loop: Loop, nothing_done: bool, name: str) -> list[str]:
    """Write the summary and the run's own weights, if training has ended; lines for a person."""
    run, t, state, task, finished = loop.run, loop.config.training, loop.state, loop.task, loop.stop == "finished"
    keeps_best = finished and (task.keeps_best or t.early_stopping is not None)
    best = best_checkpoint(run.path) if keeps_best else None
    rows = read_metrics(run.path / METRICS)
    rate = loop.learning_rate or (float(rows[-1]["learning_rate"]) if rows else 0.0)
    summary = {
        "steps": state.step, "tokens": state.tokens, "seconds": state.seconds,
        "flops": None if math.isnan(state.flops) else state.flops,
        "finished": finished,
        "learning_rate_scale": rate / t.optimizer.learning_rate,
        "weights": "latest" if best is None else BEST,
        "valid_stride": max(1, state.valid_stride),
        **task.summary(run, state.best_step),
    }  # fmt: skip
    if finished:
        run.finish(best or checkpoint_path(run.path, state.step), summary)
    lines = task.closing(summary, run, name)
    if nothing_done and finished:
        lines.insert(-1, f"{name} is finished, at step {state.step}: nothing is left to train")
    if not finished:
        again = f"glissando {loop.config.command} --resume {shlex.quote(name)}"
        lines.append(f"\nstopped and saved at step {state.step}; continue with: {again}")
    return lines
