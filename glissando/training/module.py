"""Training as a Lightning module: the loss, the optimizer, clipping, and the learning rate of each step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from glissando.data.base import IGNORED, Batch, Corpus, Shard
from glissando.errors import ConfigError, DivergenceError
from glissando.evaluation.scoring import Score, heard_control, score_part, to_device, token_losses
from glissando.flops import forward_flops, training_flops, training_flops_or_nan
from glissando.model import LanguageModel
from glissando.training.config import RunConfig
from glissando.training.meter import Meter, StepSums
from glissando.training.moments import Moments, put_moments
from glissando.training.parts import freeze, local, local_norms, optimizer_groups, part_norms, part_of, shares
from glissando.training.schedules import Progress, build_schedule

_ROW_LENGTHS = 64  # so many a compiled model is compiled for; at others it runs as it is


class MicroBatch(NamedTuple):
    """Part of a step's rows, and how many targets it scores, counted before it goes to the device."""

    batch: Batch
    targets: int


class TrainingModule(pl.LightningModule):
    """Trains `model` on `corpus` as `config` says; glissando.training.fit puts the rest around it."""

    def __init__(
        self, config: RunConfig, model: LanguageModel, corpus: Corpus, base: LanguageModel | None = None
    ) -> None:
        super().__init__()
        self.config, self.corpus = config, corpus
        self.model = model
        # Not a part of this module: it is neither trained nor saved with it.
        self._base = (base,)
        self.schedule = build_schedule(config.training.schedule)
        self.meter, self.step_sums = Meter(), StepSums()
        self.tokens = 0  # targets scored in training so far, over all processes
        if config.training.flops is not None:
            training_flops(model, 1)  # raises where something is missing
        self.flops = 0.0  # of training so far, over all processes
        self._flops_at = functools.lru_cache(maxsize=_ROW_LENGTHS)(functools.partial(training_flops_or_nan, model))
        self.share = 0.0  # of the budget spent; the budget callback keeps it
        self.grad_norm, self.learning_rate = 0.0, 0.0
        self.accuracy: float | None = None  # on the last step's batch, where the step is one that is logged
        freeze(model, config.training.freeze)
        if not corpus.control_names:
            _rest_dials(model)
        self._shares = shares(model, config.grown)
        #: of the optimizer, where training starts from a grown run
        self.moments: dict[str, Moments] = {}
        self._norms: dict[str, float] = {}
        self._trained: list[tuple[str, Tensor]] = []
        if config.training.gradient_checkpointing:
            _checkpoint_gradients(model)
        # A compiled function and not a compiled module, which would register the model's weights a second time.
        self._logits: Any = _compiled(self._logits_of) if config.training.compile else self._logits_of

    @property
    def base(self) -> LanguageModel | None:
        """What the model at u = 0 is tied to, where it is."""
        return self._base[0]

    # ------------------------------------------------------------------ set-up

    def configure_model(self) -> None:
        """Under FSDP2 each block is a unit of sharding; otherwise nothing."""
        if self.config.training.strategy != "fsdp" or self._sharded():
            return
        from torch.distributed.fsdp import fully_shard

        from glissando.block import Block

        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for module in [m for m in self.model.modules() if isinstance(m, Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _sharded(self) -> bool:
        return any(local(p) is not p for p in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; weight decay on matrices alone, and the factors that growth has left."""
        c = self.config.training.optimizer
        optimizer = torch.optim.AdamW(
            optimizer_groups(self.model, self.config.grown, c.weight_decay, c.eps),
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
            fused=not self._sharded(),
        )
        put_moments(optimizer, self.model, self.moments)
        return optimizer

    def train_dataloader(self) -> Iterator[MicroBatch]:
        """Micro-batches from the step that training has reached: data order is a function of (seed, step)."""
        return self._micro_batches(self.trainer.global_step)

    def _micro_batches(self, start: int) -> Iterator[MicroBatch]:
        parts, world = self.config.training.accumulate, self.trainer.world_size
        streams = [
            self.corpus.batches(
                "train", start=start, shard=Shard(self.trainer.global_rank * parts + part, world * parts)
            )
            for part in range(parts)
        ]
        while True:
            for stream in streams:
                batch = next(stream)
                yield MicroBatch(batch, int((batch.targets != IGNORED).sum()))

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, _: int) -> MicroBatch:
        return MicroBatch(to_device(batch.batch, device), batch.targets)

    # ------------------------------------------------------------------ a step

    @property
    def _nominal(self) -> int:
        """About as many targets as a step has: any fixed number would do, this one keeps gradients near their size."""
        return self.config.data.batch_size * self.config.data.seq_len

    def training_step(self, item: MicroBatch, _: int) -> Tensor:
        """The summed loss over a fixed number; the end of the step, which knows all targets, makes it their mean.

        Lightning divides by the number of parts and averages gradients over processes; both are undone here,
        because a mean of means weighs the targets of a short batch more.
        """
        logits = self._logits(item.batch)
        loss = nats = token_losses(logits, item.batch.targets).sum()
        logged = (self.trainer.global_step + 1) % self.config.training.log_every == 0
        hits = (logits.detach().argmax(-1) == item.batch.targets).sum() if logged else None
        neutral = self._neutral_kl(item.batch)
        if neutral is not None:
            loss = nats + self.config.training.neutral_kl * neutral
        self.step_sums.add(nats, neutral, hits, item.targets, item.batch.n_bytes, self._cost(item.batch))
        return loss * (self.config.training.accumulate * self.trainer.world_size / self._nominal)

    def _cost(self, batch: Batch) -> float:
        """FLOPs of training on it; a tie to a base adds that model's forward pass and one more of this one, trained."""
        cost = self._flops_at(batch.ids.shape[1])
        if self.base is not None:
            cost = 2 * cost + forward_flops(self.base, batch.ids.shape[1]).total
        return batch.ids.numel() * cost

    def _neutral_kl(self, batch: Batch) -> Tensor | None:
        """KL(base || model at u = 0), summed over the scored targets."""
        if self.base is None:
            return None
        assert batch.control is not None
        with torch.no_grad():
            wanted = self.base.to(batch.ids.device)(batch.ids, mask=batch.mask)[0]
        got = self._logits(batch._replace(control=torch.zeros_like(batch.control)))
        return divergence(wanted, got, batch.targets)

    def _logits_of(self, batch: Batch) -> Tensor:
        return self.model(batch.ids, mask=batch.mask, control=heard_control(self.model, batch))[0]

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip, refuse what is not finite, and set the learning rate: it may depend on the norm before clipping."""
        if not self._trained:  # here and not earlier: sharding replaces the parameters
            self._trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        grads = {name: p.grad for name, p in self._trained if p.grad is not None}
        logged = self.step_sums.hits is not None
        nats, neutral, hits, targets, n_bytes, flops, norms = self._finish_step(list(grads.values()))
        self.accuracy = hits / max(targets, 1) if logged else None
        scale = self._nominal / max(targets, 1)  # of a mean over the step's targets to what was derived
        self._norms = {n: norm * scale * self._shares[n].norm for n, norm in zip(grads, norms, strict=True)}
        self.grad_norm = math.hypot(*self._norms.values())
        self._require_finite(nats)
        self.meter.add(nats, neutral, targets, n_bytes)
        self.tokens += targets
        self.flops += flops
        clip = self.config.training.clip
        if clip is not None and self.grad_norm > clip:
            scale *= clip / self.grad_norm
        if scale != 1:
            torch._foreach_mul_([local(g) for g in grads.values()], scale)
        now = Progress(self.trainer.global_step, self.share, self.grad_norm)
        self.learning_rate = self.config.training.optimizer.learning_rate * self.schedule.factor(now)
        self._set_rates(optimizer)

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Each group's share of the learning rate; decay is by rate times weight decay, which release leaves alone."""
        c = self.config.training.optimizer
        held = c.held(self.trainer.global_step)
        for group in optimizer.param_groups:
            # A checkpoint from before models could grow has no rates: all of its groups have the same.
            rate = group.get("rate", 1.0) ** held
            group["lr"] = self.learning_rate * rate
            if group["weight_decay"]:
                group["weight_decay"] = c.weight_decay / rate

    def _finish_step(self, grads: list[Tensor]) -> tuple[float, float, float, int, int, float, list[float]]:
        """Nats, KL at u = 0, right tokens, targets, bytes, FLOPs of the step, gradients' norms: the one wait for
        the device."""
        mine, self.step_sums = self.step_sums, StepSums()
        assert mine.nats is not None
        norms = local_norms(grads)
        zero = torch.zeros_like(mine.nats)
        parts = (mine.nats, *(zero if part is None else part.to(zero.dtype) for part in (mine.neutral, mine.hits)))
        sums = torch.stack(parts)
        if self.trainer.world_size == 1:
            *values, nats, neutral, hits = torch.cat([norms, sums.to(norms.dtype)]).tolist()
            return nats, neutral, hits, mine.targets, mine.n_bytes, mine.flops, values
        counts = mine.nats.new_tensor([mine.targets, mine.n_bytes, mine.flops], dtype=torch.float64)
        sharded = local(grads[0]) is not grads[0]
        shares = [norms.double().square()] if sharded else []  # of norms that no process has as a whole
        whole = torch.cat([sums.double(), counts, *shares])
        torch.distributed.all_reduce(whole)
        nats, neutral, hits, targets, n_bytes, flops, *squares = whole.tolist()
        values = [math.sqrt(s) for s in squares] if sharded else norms.tolist()
        return nats, neutral, hits, int(targets), int(n_bytes), flops, values

    def _require_finite(self, nats: float) -> None:
        """Every process sees the same sums, so that all of them raise."""
        if math.isfinite(nats) and math.isfinite(self.grad_norm):
            return
        bad = [name for name, norm in self._norms.items() if not math.isfinite(norm)]
        where = f"the gradient first in {part_of(bad[0])} ({bad[0]})" if bad else "the gradient is finite"
        what = "the gradient is not finite" if math.isfinite(nats) else f"the loss is {nats}"
        raise DivergenceError(
            f"{what} in step {self.trainer.global_step + 1}; {where}. That step is not taken and the last checkpoint "
            "stands: train again with a lower training.optimizer.learning_rate or a lower training.clip."
        )

    def part_norms(self) -> dict[str, float]:
        """|gradient| of each part in the last step, before clipping; their root sum of squares is `grad_norm`."""
        return part_norms(self._norms)

    def parts(self) -> list[str]:
        """The parts of the model that are trained."""
        return sorted({part_of(name) for name, p in self.model.named_parameters() if p.requires_grad})

    def require_finite_weights(self) -> None:
        """Raises DivergenceError, on every process, if a weight has overflowed: it must not be saved."""
        named = dict(self.model.named_parameters())
        bad = (~local_norms(named.values()).isfinite()).double()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(bad)
        if bad.any():
            name = list(named)[int(bad.argmax())]
            raise DivergenceError(
                f"after step {self.trainer.global_step} {part_of(name)} ({name}) is not finite; it is not saved and "
                "the last checkpoint stands. Train again with a lower training.optimizer.learning_rate."
            )

    # ------------------------------------------------------------------ held out

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Under FSDP2, gathers what no block holds, which generation uses without calling the whole model."""
        if not self._sharded():
            yield
            return
        sharded: Any = self.model
        sharded.unshard()
        try:
            yield
        finally:
            sharded.reshard()

    def validate_now(self) -> Score:
        """The held-out score over all processes' rows."""
        shard = Shard(self.trainer.global_rank, self.trainer.world_size)
        mine = score_part(self.model, self.corpus.batches("valid", shard=shard), self.device)
        if self.trainer.world_size == 1:
            return mine
        everyone: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(everyone, mine)
        whole = Score()
        for part in everyone:
            whole.merge(part)
        return whole

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["schedule"] = self.schedule.state_dict()
        checkpoint["meter"] = self.meter.state_dict()
        checkpoint["tokens"] = self.tokens
        checkpoint["flops"] = self.flops

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.schedule.load_state_dict(checkpoint["schedule"])
        self.meter = Meter(**checkpoint["meter"])
        self.tokens = checkpoint["tokens"]
        # A checkpoint from before FLOPs were counted counts from here on.
        self.flops = checkpoint.get("flops", 0.0)


def divergence(wanted: Tensor, got: Tensor, targets: Tensor) -> Tensor:
    """sum_t KL(softmax(wanted_t) || softmax(got_t)), nats, over the scored ones of targets (B, T); logits (B, T, V)."""
    exact = torch.promote_types(got.dtype, torch.float32)
    p, q = wanted.to(exact).log_softmax(-1), got.to(exact).log_softmax(-1)
    return ((p.exp() * (p - q)).sum(-1) * (targets != IGNORED)).sum()


def _rest_dials(model: LanguageModel) -> None:
    """Without labels no dial is turned: its weights get no gradient, which several processes would wait for."""
    dials = getattr(model.depth, "control", None)
    if dials is not None:
        dials.requires_grad_(False)


def _compiled(function: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Compiled once for each row length: PyTorch 2.13 fails to compile our models for all lengths at once."""
    import torch._dynamo

    fast = torch.compile(function, dynamic=False)

    def call(batch: Batch) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=_ROW_LENGTHS, accumulated_recompile_limit=16 * _ROW_LENGTHS):
            return fast(batch)

    return call


def _checkpoint_gradients(model: LanguageModel) -> None:
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not able:
        raise ConfigError(
            f"model.depth.kind {type(model.depth).__name__} cannot recompute its blocks; leave "
            "training.gradient_checkpointing off (a flow has model.depth.flow.backward `checkpoint` for it)"
        )
    for module in able:
        setattr(module, "gradient_checkpointing", True)  # noqa: B010 (nn.Module declares no such attribute)
