"""The same training for those who bring a Lightning Trainer of their own.

    module = TrainingModule(config, model, build_corpus(config.data))
    lightning.Trainer(max_steps=1000, gradient_clip_val=1.0).fit(module)

Loss, optimizer, schedule and the order of the data are those of `glissando train`; budgets, clipping, accumulation,
logging and checkpoints are the Trainer's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glissando.data.base import IGNORED, Batch, Corpus, Shard
from glissando.errors import ConfigError, MissingExtraError
from glissando.evaluation.scoring import Score, merged, score_part
from glissando.model import LanguageModel
from glissando.training.config import RunConfig
from glissando.training.language_task import LanguageTask
from glissando.training.optimizer import build_optimizer, set_rates
from glissando.training.schedules import SCHEDULES
from glissando.training.task import Objective, Sums

try:
    import lightning.pytorch as pl
except ModuleNotFoundError as error:
    raise MissingExtraError("a Trainer needs lightning: pip install -e '.[lightning]' in a checkout") from error


@dataclass
class _HeldOut:
    """Read anew by every validation."""

    corpus: Corpus
    shard: Shard

    def __iter__(self) -> Iterator[Batch]:
        return self.corpus.batches("valid", shard=self.shard)


class TrainingModule(pl.LightningModule):
    def __init__(self, config: RunConfig, model: LanguageModel, corpus: Corpus) -> None:
        super().__init__()
        if config.training.carry:
            raise ConfigError("training.carry needs the loop of `glissando train`, not a Trainer's: leave it out")
        self.config, self.corpus = config, corpus
        self.objective = Objective(model, LanguageTask(config, corpus))
        self.schedule = SCHEDULES.class_of(config.training.schedule)(config.training.schedule)

    def train_dataloader(self) -> Iterable[Batch]:
        """Micro-batches of data.batch_size rows a step, over all parts and processes."""
        parts, rank, world = self.trainer.accumulate_grad_batches, self.trainer.global_rank, self.trainer.world_size
        shards = [Shard(rank * parts + part, world * parts) for part in range(parts)]
        return itertools.chain.from_iterable(self.corpus.steps(self.trainer.global_step, shards))

    def val_dataloader(self) -> Iterable[Batch]:
        return _HeldOut(self.corpus, Shard(self.trainer.global_rank, self.trainer.world_size))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, _: int) -> Batch:
        """As it is: the task counts its targets before it moves it."""
        return batch

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """The mean loss over the batch's targets."""
        self.objective.sums = Sums()
        loss = self.objective(batch) / (batch.targets != IGNORED).sum().clamp_min(1)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        t = self.config.training
        return build_optimizer(self.objective.model, t.optimizer, self.config.grown, t.precision)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The learning rate of the step, which may depend on the gradient's norm."""
        t, step = self.config.training, self.trainer.global_step
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        share = step / self.trainer.max_steps if self.trainer.max_steps > 0 else 0.0
        rate = t.optimizer.learning_rate * self.schedule.factor(step, share, float(norm))
        set_rates(optimizer, t.optimizer, step, rate)

    def on_validation_epoch_start(self) -> None:
        self.score = Score()

    def validation_step(self, batch: Batch, _: int) -> None:
        self.score.merge(score_part(self.objective.model, [batch], self.device))

    def on_validation_epoch_end(self) -> None:
        whole = merged(self.score, self.trainer.world_size)
        self.log("valid_loss", whole.loss)
        self.log("valid_bits_per_byte", whole.bits_per_byte, prog_bar=True)
        if not self.trainer.sanity_checking:
            self.schedule.observe_validation(whole.loss)
