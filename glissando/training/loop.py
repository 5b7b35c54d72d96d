"""The training loop, in the order in which things happen: see `Loop.train`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.checkpoints import SHARDS, checkpoint_path, point_to
from glissando.data.base import Shard
from glissando.errors import ConfigError, DivergenceError, NotFiniteError, TrainingError
from glissando.kernels.precise import widest_float
from glissando.metrics import Metrics, append, part_norms, part_of, require_there
from glissando.runs import METRICS, Run
from glissando.sharding import all_gathered, copied, is_sharded, local, local_norms, put_weights
from glissando.storage import record
from glissando.training.budget import Budget, Clock
from glissando.training.config import AnyRunConfig
from glissando.training.lanes import Lanes, fresh_rows, restored
from glissando.training.launch import build_fabric, connect, seed_everything
from glissando.training.optimizer import (
    build_optimizer,
    freeze,
    inner_part,
    optimizer_state,
    put_optimizer_state,
    set_rates,
)
from glissando.training.saving import Saving
from glissando.training.schedules import SCHEDULES
from glissando.training.shares import shares
from glissando.training.state import TrainState, over_processes, read_shards, restore_rng, rng_state
from glissando.training.stopping import Stopping
from glissando.training.task import Objective, Sums, Task

SAMPLES = "samples.txt"
#: seconds after which a training without a budget saves in any case
ENDLESS_SECONDS = 600.0


class Loop:
    """A model, its task and how to train it; `train` alone writes into the run.

    stop  why training stops after the step in progress: `finished`, its budget is spent or its patience over; `asked`,
          a signal or a hook asked to, and it can be resumed; None: it goes on. What is due after the step is done all
          the same, for resuming begins with the next one

    Raises ConfigError for what cannot be trained so.
    """

    def __init__(self, config: AnyRunConfig, run: Run, task: Task, model: Any, hooks: list[Hook]) -> None:
        t = config.training
        self.config, self.run, self.task, self.model, self.hooks = config, run, task, model, hooks
        if task.carries:
            model.require_constant_state("training.carry")
        freeze(model, t.freeze)
        if t.gradient_checkpointing:
            _recompute_blocks(model)
        self.fabric, self.stopping = build_fabric(t), Stopping()
        self.objective, self.schedule = Objective(model, task), SCHEDULES.class_of(t.schedule)(t.schedule)
        self.budget, self.clock = Budget(t, task.epoch_rows, config.data.batch_size), Clock()
        self.state = TrainState()
        self.lanes: list[Lanes | None] = []  # of each part of the batch, where rows continue from the row before
        self.stop: Literal["finished", "asked"] | None = None
        self.moments: dict[str, dict[str, Tensor]] = {}  # of the optimizer, where training starts from a grown run
        self.norms: dict[str, float] = {}  # of each parameter's gradient in the last step, before clipping
        self.shares = shares(model, config.grown)
        self.grad_norm = self.learning_rate = 0.0
        self.validation: dict[str, float] = {}  # the latest
        self.files: dict[str, bytes] = {}  # the run's small files, of which each checkpoint has copies
        self.validated_step, self.validation_cost = -1, 0.0
        self.metrics: Metrics | None = None  # of the first process
        self.mark = (0, 0.0)  # tokens and working seconds at the last row of metrics.csv
        self.saved_at, self.began_at = 0.0, 0  # seconds of the run; the step that this process began with
        self.saving, self.writers = Saving(), None  # of a sharded training: the group of processes that write shards

    def train(self, checkpoint: Path | None = None) -> None:
        """Train until the budget is spent or a signal asks to stop, from `checkpoint` on if one is given.

        Once it returns all is saved. Raises TrainingError, on every process, where training cannot go on; what was
        saved before stands.
        """
        forward, optimizer = self._set_up(checkpoint)
        t, fabric, state = self.config.training, self.fabric, self.state
        sharded, parts = is_sharded(self.model), t.accumulate
        shards = [Shard(fabric.global_rank * parts + part, fabric.world_size * parts) for part in range(parts)]
        steps = self.task.steps(state.step, shards)
        turns = self.task.turns
        self.lanes = [*restored(state.lanes, self.model, shards, turns)] if self.task.carries else [None] * parts
        state.lanes = []
        if self.task.scores_start and checkpoint is None:
            with self.clock.aside():
                self._score_start()
        while self.stop is None:
            batches = next(steps)
            for hook in self.hooks:
                hook.before_step(self, batches)

            # forward, backward and accumulation; gradients are averaged over processes with the last part
            is_logged = (state.step + 1) % t.log_every == 0
            for part, (batch, lanes, shard) in enumerate(zip(batches, self.lanes, shards, strict=True), 1):
                fresh = None if lanes is None else fresh_rows(batch, t, state.step, shard)
                with fabric.no_backward_sync(forward, enabled=part < len(batches) and not sharded):
                    fabric.backward(forward(batch, is_logged, lanes, fresh))

            # gradients of a sum made those of the mean over the step's targets, and clipped
            gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
            sums = self._measure(gradients)
            scale = self.task.nominal / max(sums.targets, 1)
            scale *= min(1.0, (t.clip or math.inf) / (self.grad_norm or 1.0))
            if scale != 1:
                torch._foreach_mul_([local(gradient) for gradient in gradients.values()], scale)

            # schedule and step: the rate may depend on the norm before clipping
            factor = self.schedule.factor(state.step, self.budget.share, self.grad_norm)
            self.learning_rate = t.optimizer.learning_rate * factor
            set_rates(self.optimizer, t.optimizer, state.step, self.learning_rate)
            optimizer.step()
            optimizer.zero_grad()
            del gradients

            # what is spent, and whether that was the last step
            state.step += 1
            state.tokens += sums.targets
            state.flops += sums.flops
            state.unlogged.add(sums)
            self._agree()
            self.budget.spend(state)
            self._stop_if_finished()
            for hook in self.hooks:
                hook.after_step(self)

            # validate, log, sample and save
            with self.clock.aside():
                if self._due(t.validate_every) and self._affords_validation():
                    self.validate()
            if is_logged or self.validated_step == state.step or self.stop == "finished":
                self.log()
            for hook in self.hooks:
                hook.logged(self)
            with self.clock.aside():
                if self._due(t.sample_every):
                    self.sample()
                best = state.best_step == state.step
                long_unsaved = not self.budget.limits and state.seconds - self.saved_at >= ENDLESS_SECONDS
                latest = self.stop is not None or self._due(t.save_every) or (long_unsaved and not best)
                if best or latest:
                    self.save()
        self.saving.wait()

    def ask_to_stop(self) -> None:
        """Stop after the step in progress, with everything saved; called on every process alike."""
        self.stop = self.stop or "asked"

    def _stop_if_finished(self) -> None:
        patience = self.config.training.early_stopping
        if self.budget.share >= 1 or (patience is not None and self.state.waited >= patience):
            self.stop = "finished"

    def _due(self, every: int | None) -> bool:
        return self.stop == "finished" or self.budget.due(every, self.state.step)

    def _set_up(self, checkpoint: Path | None) -> tuple[Any, Any]:
        """Start the processes, put model and optimizer on their device, and take up the checkpoint."""
        t, fabric = self.config.training, self.fabric
        connect(fabric)
        self.objective.scale = fabric.world_size / self.task.nominal
        forward = fabric.setup_module(self.objective.train())
        self.optimizer = build_optimizer(self.model, t.optimizer, self.config.grown, t.precision)
        put_optimizer_state(self.optimizer, self.moments)
        self.saving.world_size = fabric.world_size
        if is_sharded(self.model):  # what its processes agree on while they write is beside the training's group
            from glissando import shards  # noqa: F401  importing it takes seconds, which are not to be the first save's

            self.writers = torch.distributed.new_group(backend="gloo")
        # Each process drops out other units; one that the checkpoint knows gets its own state back instead.
        seed_everything(t.seed + fabric.global_rank, verbose=False)
        if checkpoint is not None:
            by_shards = self.writers is not None and (checkpoint / SHARDS).is_dir()
            state = TrainState.load(checkpoint, tensors=not by_shards)
            if by_shards:
                read_shards(checkpoint, self.objective, self.optimizer)
            else:
                put_weights(self.objective, state.model)
                put_optimizer_state(self.optimizer, state.optimizer)
            self.schedule.load_state_dict(state.schedule)
            for hook in self.hooks:
                if (name := type(hook).__name__) in state.hooks:
                    hook.load_state_dict(state.hooks[name])
            restore_rng(state.random, fabric.global_rank)
            if fabric.is_global_zero:
                self.run.require_log(state.logged)
            self.state = dataclasses.replace(state, model={}, optimizer={}, random=[])
        steps = all_gathered(self.state.step, fabric.world_size)
        if len(set(steps)) > 1:
            raise TrainingError(
                f"the processes begin at different steps, {', '.join(map(str, sorted(set(steps))))}: not all see "
                "the same checkpoints. Use a run directory that every node has access to."
            )
        self.clock = Clock(self.state.seconds)
        self.budget.spend(self.state)
        self._stop_if_finished()
        self.mark, self.saved_at, self.began_at = (self.state.tokens, 0.0), self.state.seconds, self.state.step
        if fabric.is_global_zero:
            parts = sorted({part_of(name) for name, p in self.model.named_parameters() if p.requires_grad})
            columns = [*self.task.columns]
            columns += [name for hook in self.hooks for name in hook.columns(self)]
            columns += [f"grad_norm/{part}" for part in parts]
            self.metrics = Metrics(self.run.path / METRICS, columns, self.state.step)
            samples = self.run.path / SAMPLES
            if samples.is_file() and samples.stat().st_size > self.state.samples:
                os.truncate(samples, self.state.samples)  # written after the checkpoint
        return forward, fabric.setup_optimizers(self.optimizer)

    def close(self) -> None:
        """Once training has ended, by an error too; a second Ctrl-C alone does not wait for the save in progress."""
        problem = None if isinstance(sys.exception(), KeyboardInterrupt) else self.saving.finish()
        if problem is not None and self.fabric.is_global_zero:
            for hook in self.hooks:
                hook.message(problem)
        with contextlib.ExitStack() as stack:  # all are closed, whatever one of them raises
            for hook in reversed(self.hooks):
                stack.callback(hook.close)

    # ---------------------------------------------------------------------- over processes

    def _measure(self, gradients: dict[str, Tensor]) -> Sums:
        """The step's sums over all processes, and `norms`: the one wait for the device.

        Raises DivergenceError, on every process, if the loss or a gradient is not finite.
        """
        local_sums, self.objective.sums = self.objective.sums, Sums()
        sums, norms = over_processes(local_sums, list(gradients.values()), self.fabric.world_size)
        scale = self.task.nominal / max(sums.targets, 1)
        self.norms = {n: v * scale * self.shares[n].norm for n, v in zip(gradients, norms, strict=True)}
        self.grad_norm = math.hypot(*self.norms.values())
        if not (math.isfinite(sums.loss) and math.isfinite(self.grad_norm)):
            bad = [name for name, norm in self.norms.items() if not math.isfinite(norm)]
            where = f"the gradient first in {part_of(bad[0])} ({bad[0]})" if bad else "the gradient is finite"
            what = "the gradient is not finite" if math.isfinite(sums.loss) else f"the loss is {sums.loss}"
            fix = (
                "That step is not taken and the last checkpoint is kept: train again with a lower "
                "training.optimizer.learning_rate or a lower training.clip."
            )
            if not self.state.step:
                fix = (
                    "Nothing was trained before, so that neither the learning rate nor training.clip is the cause: "
                    "check the options of the model, and mixers and depths of your own."
                )
                if broken := next((n for n, p in self.model.named_parameters() if not bool(p.isfinite().all())), None):
                    fix = f"The parameter {broken} is not finite before any training. {fix}"
            raise DivergenceError(f"{what} in step {self.state.step + 1}; {where}. {fix}")
        return sums

    def _agree(self) -> None:
        """The first process's clock counts; stopping is everybody's once any process was asked to.

        Raises TrainingError, on every process, if the save in progress has failed on one.
        """
        self.state.seconds, asked = self.clock.elapsed(), self.stopping.asked is not None
        failed = self.saving.failed
        if self.fabric.world_size > 1:
            votes = [self.state.seconds if self.fabric.is_global_zero else 0.0, asked, failed]
            sums = torch.tensor(votes, dtype=widest_float(self.fabric.device), device=self.fabric.device)
            torch.distributed.all_reduce(sums)
            self.state.seconds, asked, failed = sums[0].item(), sums[1].item() > 0, sums[2].item() > 0
        if asked:
            self.ask_to_stop()
        if failed:
            self.saving.wait()

    # ---------------------------------------------------------------------- validation

    def _affords_validation(self) -> bool:
        """Whether time is left: validations take at most a fifth of a budget in seconds, unless they are requested.

        The first one settles how many held-out batches there is time for ten times: to score one takes no longer than
        a step has taken.
        """
        t, state = self.config.training, self.state
        if t.seconds is None or t.validate_every is not None:
            return True
        if state.valid_stride == 0:
            self._settle_stride(t.seconds, max(self.clock.working(), 1e-9) / (state.step - self.began_at))
        # By the first process's clock: one that decided otherwise would leave the others waiting.
        affordable = self.fabric.broadcast(state.validation_seconds + 2 * self.validation_cost <= 0.2 * t.seconds)
        return self.stop == "finished" or affordable

    def _settle_stride(self, seconds: float, batch_seconds: float) -> None:
        """How many held-out batches there is time for ten times in a budget, when one takes so long."""
        number = sum(1 for _ in self.task.batches("valid"))
        stride = math.ceil(number / max(1, int(0.02 * seconds / batch_seconds)))
        self.state.valid_stride = self.fabric.broadcast(stride)
        self.validation_cost = batch_seconds * number / self.state.valid_stride

    def _score_start(self) -> None:
        """Validate and save the model before the first step: the best one so far."""
        t, fabric = self.config.training, self.fabric
        if t.seconds is not None and t.validate_every is None:
            number = max(1, sum(1 for _ in self.task.batches("valid")))
            for _ in range(2):  # the first call is slower than those that follow
                began = self.clock.now()
                self.task.score(self.model, fabric.device, number, Shard(fabric.global_rank, fabric.world_size))
            self._settle_stride(t.seconds, max(self.clock.now() - began, 1e-9))
        self.validate()
        if self.metrics is not None:
            self.metrics.write({"step": 0, "epoch": 0, "tokens": 0, "seconds": self.clock.elapsed(), **self.validation})
        self.save()

    def validate(self) -> None:
        """Score what is held out; may end the training early."""
        state, fabric, began = self.state, self.fabric, self.clock.now()
        for hook in self.hooks:
            hook.validating(self)
        shard = Shard(fabric.global_rank, fabric.world_size)
        self.validation = self.task.score(self.model, fabric.device, max(1, state.valid_stride), shard)
        self.validated_step, loss = state.step, self.validation["valid_loss"]
        self.schedule.observe_validation(loss)
        state.waited += 1
        if loss < state.best:
            state.best, state.best_step, state.waited = loss, state.step, 0
        self._stop_if_finished()
        self.validation_cost = self.clock.now() - began
        state.validation_seconds += self.validation_cost

    # ---------------------------------------------------------------------- logging and sampling

    def log(self) -> None:
        """A row of metrics.csv. epoch is that of a text or of pairs; tokens_per_second counts the time of steps
        alone."""
        state, sums, rows = self.state, self.state.unlogged, self.task.epoch_rows
        (last_tokens, last_time), now = self.mark, self.clock.working()
        self.mark, state.unlogged = (state.tokens, now), Sums()
        row = {
            "step": state.step,
            "epoch": state.step * self.config.data.batch_size / rows if rows else "",
            "tokens": state.tokens,
            "seconds": state.seconds,
            "flops": "" if math.isnan(state.flops) else state.flops,
            "train_loss": sums.mean,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "tokens_per_second": (state.tokens - last_tokens) / max(now - last_time, 1e-9),
            **{f"grad_norm/{part}": norm for part, norm in part_norms(self.norms).items()},
            **self.task.row(sums),
        }
        for hook in self.hooks:
            row |= hook.row(self)
        if self.validated_step == state.step:
            row |= self.validation
        if self.metrics is not None:
            self.metrics.write(row)

    def sample(self) -> None:
        """Write to samples.txt what the model makes, and show it."""
        step = self.state.step
        self._require_finite_weights()
        try:
            text = self.task.sample(self.model)  # by every process, because a sharded model takes all of them
        except NotFiniteError as error:
            raise DivergenceError(
                f"after step {step} the model's logits are not finite; the last checkpoint is kept. Train again "
                "with a lower training.optimizer.learning_rate."
            ) from error
        if text is not None and self.fabric.is_global_zero:
            self.state.samples += append(self.run.path / SAMPLES, f"--- step {step}\n{text}\n".encode())
            for hook in self.hooks:
                hook.message(f"step {step}: {text}")

    # ---------------------------------------------------------------------- saving

    def save(self) -> None:
        """Copy the state, once the save before is complete, and begin to write it in the background.

        Raises TrainingError, on every process, if the disk did not take the save before.
        """
        self.saving.wait()
        self._require_finite_weights()
        self.saved_at = self.state.seconds
        is_first, group = self.fabric.is_global_zero, self.writers
        lanes = [tensors for part in self.lanes if part is not None for tensors in part.saved()]
        state = dataclasses.replace(
            self.state,
            seconds=self.clock.elapsed(),
            unlogged=copy.deepcopy(self.state.unlogged),
            schedule=copy.deepcopy(self.schedule.state_dict()),
            hooks={type(hook).__name__: copy.deepcopy(kept) for hook in self.hooks if (kept := hook.state_dict())},
            random=all_gathered(rng_state(), self.fabric.world_size),
            lanes=[tensors for process in all_gathered(lanes, self.fabric.world_size) for tensors in process],
        )
        if is_first or group is not None:
            state.model = {name: copied(value) for name, value in self.objective.state_dict().items()}
            state.optimizer = optimizer_state(self.optimizer)
            if is_first:
                require_there(self.run.path / METRICS)
            state.logged = record(self.run.path / METRICS) if is_first else {}
            self.saving.start(state.step, lambda: self._write(state))

    def _write(self, state: TrainState) -> None:
        """In the background: on the first process, and on each where all write shards."""
        path = self.run.path
        state.save(checkpoint_path(path, state.step), self.files, self.writers)
        if self.fabric.is_global_zero:
            point_to(path, state.step, state.best_step)
            for hook in self.hooks:
                hook.saved(self)

    def _require_finite_weights(self) -> None:
        """Raises DivergenceError, on every process, if a weight has overflowed: it must not be saved."""
        named = dict(self.model.named_parameters())
        bad = (~local_norms(named.values()).isfinite()).float()
        if self.fabric.world_size > 1:
            torch.distributed.all_reduce(bad)
        if bad.any():
            name = list(named)[int(bad.argmax())]
            raise DivergenceError(
                f"after step {self.state.step} {part_of(name)} ({name}) is not finite; it is not saved and the last "
                "checkpoint is kept. Train again with a lower training.optimizer.learning_rate."
            )


def _recompute_blocks(model: Any) -> None:
    """Raises ConfigError for a model without a depth that can."""
    part: Any = inner_part(model)
    if not hasattr(part, "gradient_checkpointing"):
        raise ConfigError(
            f"training.gradient_checkpointing: {type(part).__name__} does not recompute its blocks; leave it out"
        )
    part.gradient_checkpointing = True


class Hook:
    """What is called around the steps of a training, on every process alike."""

    def before_step(self, loop: Loop, batches: list[Any]) -> None:
        """Before a step on these micro-batches of this process; `loop.state.step` steps are done."""

    def after_step(self, loop: Loop) -> None:
        """Once the step is taken, before anything is validated, logged or saved."""

    def validating(self, loop: Loop) -> None:
        """Before what is held out is scored."""

    def logged(self, loop: Loop) -> None:
        """Once the step is validated and logged, before it is saved."""

    def saved(self, loop: Loop) -> None:
        """Once a checkpoint and the run's own weights are whole on the disk; on the first process alone, in the thread
        that wrote them: training has gone on meanwhile, and `loop.state` with it."""

    def message(self, line: str) -> None:
        """A line for a person: a sample, a note; also from the thread that saves."""

    def close(self) -> None:
        """At the end, by an error too."""

    def columns(self, loop: Loop) -> list[str]:
        """Names of its columns in metrics.csv."""
        return []

    def row(self, loop: Loop) -> dict[str, Any]:
        """Their values after the step in progress."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it keeps, as plain values: a part of the checkpoint, given to `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
