"""Training as a Lightning module: the loss, the optimizer, clipping, and the learning rate of each step."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from glissando.data.base import IGNORED, Batch, Corpus, Shard
from glissando.errors import ConfigError, TrainingError
from glissando.evaluation.scoring import Score, heard_control, score_part, to_device, token_losses
from glissando.model import LanguageModel
from glissando.training.config import RunConfig
from glissando.training.schedules import Progress, build_schedule


class MicroBatch(NamedTuple):
    """Part of a step's rows, and how many targets this process scores in the whole step."""

    batch: Batch
    scored_in_step: int


class Meter:
    """Sums of nats, targets and bytes since the last reading, over all processes."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, nats: Tensor, targets: int, n_bytes: int) -> None:
        self.sums += torch.stack(
            [nats.detach().double().cpu(), torch.tensor(float(targets)), torch.tensor(float(n_bytes))]
        )

    def read(self, reduce: Any) -> tuple[float, float]:
        """Nats per target and bits per byte, then start anew."""
        nats, targets, n_bytes = reduce(self.sums).tolist()
        self.sums = torch.zeros_like(self.sums)
        return nats / max(targets, 1), nats / math.log(2) / max(n_bytes, 1)


class TrainingModule(pl.LightningModule):
    """Trains `model` on `corpus` as `config` says; glissando.training.fit puts the rest around it."""

    def __init__(self, config: RunConfig, model: LanguageModel, corpus: Corpus) -> None:
        super().__init__()
        self.config, self.corpus = config, corpus
        self.model = model
        self.schedule = build_schedule(config.training.schedule)
        self.meter = Meter()
        self.share = 0.0  # of the budget spent; the budget callback keeps it
        self.grad_norm, self.learning_rate = 0.0, 0.0
        self.part_norms: dict[str, float] = {}
        self.want_part_norms = False
        freeze(model, config.training.freeze)
        for depth in model.modules():
            if hasattr(depth, "gradient_checkpointing"):
                setattr(depth, "gradient_checkpointing", config.training.gradient_checkpointing)  # noqa: B010
        self._compiled: Any = None

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
        from torch.distributed.tensor import DTensor

        return any(isinstance(p, DTensor) for p in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; weight decay on matrices alone."""
        c = self.config.training.optimizer
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in trained if p.ndim >= 2],
                "weight_decay": c.weight_decay,
                "name": "matrices",
            },
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "name": "vectors"},
        ]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            fused=not self._sharded(),
        )

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
            batches = [next(stream) for stream in streams]
            scored = sum(int((b.targets != IGNORED).sum()) for b in batches)
            yield from (MicroBatch(b, scored) for b in batches)

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, _: int) -> MicroBatch:
        return MicroBatch(to_device(batch.batch, device), batch.scored_in_step)

    # ------------------------------------------------------------------ a step

    def training_step(self, item: MicroBatch, _: int) -> Tensor:
        """The mean over the whole step's targets, whatever number of parts and processes share them.

        Lightning divides by the number of parts and averages gradients over processes; both are undone here,
        because a mean of means weighs the targets of a short batch more.
        """
        nats = self._nats(item.batch)
        targets = int((item.batch.targets != IGNORED).sum())
        self.meter.add(nats, targets, item.batch.n_bytes)
        if not torch.isfinite(nats):
            raise TrainingError(
                f"the loss is {nats.item()} at step {self.trainer.global_step}; its weights are not saved. "
                "Lower training.optimizer.learning_rate or set training.clip, and resume."
            )
        total = self._over_processes(torch.tensor(float(item.scored_in_step))).item()
        return nats * (self.config.training.accumulate * self.trainer.world_size / max(total, 1.0))

    def _nats(self, batch: Batch) -> Tensor:
        if self.config.training.compile and self._compiled is None:
            self._compiled = torch.compile(self.model)
        model = self._compiled or self.model
        logits, _ = model(batch.ids, mask=batch.mask, control=heard_control(self.model, batch))
        return token_losses(logits, batch.targets).sum()

    def _over_processes(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.trainer.world_size == 1:
            return value
        value = value.to(self.device).clone()
        torch.distributed.all_reduce(value)
        return value.cpu()

    def read_meter(self) -> tuple[float, float]:
        """Training loss and bits per byte since the last reading, over all processes."""
        return self.meter.read(self._over_processes)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip, refuse what is not finite, and set the learning rate: it may depend on the norm before clipping."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.grad_norm = norm.item()
        if not math.isfinite(self.grad_norm):
            raise TrainingError(
                f"the gradient is not finite at step {self.trainer.global_step}, first in "
                f"{self._first_bad_part()}. The last checkpoint is kept: lower "
                "training.optimizer.learning_rate or training.clip, and resume."
            )
        if self.want_part_norms:
            self.part_norms = part_norms(self.model)
        clip = self.config.training.clip
        if clip is not None and self.grad_norm > clip:
            torch._foreach_mul_(grads, clip / self.grad_norm)
        now = Progress(self.trainer.global_step, self.share, self.grad_norm)
        self.learning_rate = self.config.training.optimizer.learning_rate * self.schedule.factor(now)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate

    def _first_bad_part(self) -> str:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return f"{part_of(name)} ({name})"
        return "no single parameter: the norm itself overflows"

    # ------------------------------------------------------------------ held out

    def validate_now(self) -> Score:
        """The held-out score over all processes' rows."""
        shard = Shard(self.trainer.global_rank, self.trainer.world_size)
        mine = score_part(self.model, self.corpus.batches("valid", shard=shard), self.device)
        if self.trainer.world_size == 1:
            return mine
        everyone: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(everyone, mine)
        whole = Score(floor_bits=None if mine.floor_bits is None else 0.0)
        for part in everyone:
            whole.nats += part.nats
            whole.targets += part.targets
            whole.correct += part.correct
            whole.n_bytes += part.n_bytes
            if whole.floor_bits is not None:
                whole.floor_bits += part.floor_bits or 0.0
        return whole

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["schedule"] = self.schedule.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.schedule.load_state_dict(checkpoint["schedule"])


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Stop training the parameters whose names match a shell pattern.

    Raises ConfigError for a pattern that matches nothing, or if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"training.freeze pattern {pattern!r} matches no parameter; names look like {', '.join(names[:6])}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("training.freeze leaves nothing to train")


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: depth.blocks.3.mixer.qkv.weight -> depth.blocks.3.mixer."""
    pieces = name.split(".")
    if pieces[0] != "depth":
        return pieces[0]
    numbered = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: (numbered[-1] + 2 if numbered else 2)])


def part_norms(model: nn.Module) -> dict[str, float]:
    """|gradient| of each part, before clipping."""
    grads: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads.setdefault(part_of(name), []).append(parameter.grad)
    norms = {part: torch.nn.utils.get_total_norm(group) for part, group in grads.items()}
    return {p: (n.full_tensor() if hasattr(n, "full_tensor") else n).item() for p, n in norms.items()}
