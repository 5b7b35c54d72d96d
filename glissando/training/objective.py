"""What training minimises: cross-entropy over the scored targets and, where there is a base, a tie of u = 0 to it."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from glissando.data.base import IGNORED, Batch
from glissando.evaluation.scoring import accepted_control, divergence, token_losses
from glissando.flops import forward_flops, training_flops, training_flops_or_nan
from glissando.model import LanguageModel
from glissando.ops.compiled import compiled_by_row_length
from glissando.sharding import is_sharded
from glissando.training.config import TrainingConfig
from glissando.training.state import Sums

_ROW_LENGTHS = 64  # so many a compiled model is compiled for; at others it runs as it is


class Objective(nn.Module):
    """scale * sum over scored targets of (-log p(target) + neutral_kl * KL(base || model at u = 0)), and `sums` of it.

    A sum and not a mean: who ends the step knows the targets of all its parts and processes, and divides. A mean of
    means would weigh the targets of a short batch more.
    """

    def __init__(
        self, model: LanguageModel, training: TrainingConfig, base: LanguageModel | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.model, self.weight, self.scale, self.sums = model, training.neutral_kl, scale, Sums()
        self._base = (base,)  # in a tuple, as it is no part of this module: it is neither trained nor saved
        if training.flops is not None:
            training_flops(model, 1)  # raises for a mixer or depth whose FLOPs are not known
        self._flops_at = functools.lru_cache(maxsize=_ROW_LENGTHS)(functools.partial(training_flops_or_nan, model))
        # A compiled function and not a compiled module, which would register the model's weights a second time.
        self._compiled = training.compile
        self._logits: Any = (
            compiled_by_row_length(self._logits_of, _ROW_LENGTHS) if training.compile else self._logits_of
        )

    @property
    def base(self) -> LanguageModel | None:
        return self._base[0]

    def forward(self, batch: Batch, targets: int = 0, count_hits: bool = False) -> Tensor:
        """The loss of a batch with so many scored targets, which are counted before they go to a device."""
        logits, wanted = self._scored(batch, targets)
        loss = nats = token_losses(logits, wanted).sum()
        hits = (logits.detach().argmax(-1) == wanted).sum() if count_hits else 0.0
        neutral: Any = 0.0
        if self.base is not None:
            neutral = self._neutral_kl(self.base, batch)
            loss = nats + self.weight * neutral
            neutral = neutral.detach()
        self.sums.add(Sums(nats.detach(), neutral, hits, targets, batch.n_bytes, self._cost(batch)))
        return loss * self.scale

    def _scored(self, batch: Batch, targets: int) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) and their targets (B, T); of the scored positions alone, (1, N, V) and (1, N), where these
        are the fewer: with a large vocabulary the others would cost more than the layers."""
        few = 0 < 2 * targets < batch.targets.numel()
        if not few or self._compiled or self.base is not None or is_sharded(self.model):
            return self._logits(batch), batch.targets
        features = self._run(self.model, batch, control=accepted_control(self.model, batch), head=False)
        scored = batch.targets != IGNORED
        return self.model.logits(features[scored].unsqueeze(0)), batch.targets[scored].unsqueeze(0)

    def _logits_of(self, batch: Batch) -> Tensor:
        return self._run(self.model, batch, control=accepted_control(self.model, batch))

    def _run(self, model: LanguageModel, batch: Batch, **options: Any) -> Tensor:
        return model(batch.ids, mask=batch.mask, **options)[0]

    def _neutral_kl(self, base: LanguageModel, batch: Batch) -> Tensor:
        assert batch.control is not None
        with torch.no_grad():
            expected = self._run(base.to(batch.ids.device), batch)
        return divergence(
            expected, self._logits(batch._replace(control=torch.zeros_like(batch.control))), batch.targets
        )

    def _cost(self, batch: Batch) -> float:
        """FLOPs of training on it, NaN where they are not known; a tie to a base adds that model's forward pass and one
        more of this one, trained."""
        length = batch.ids.shape[1]
        cost = self._flops_at(length)
        if self.base is not None and not math.isnan(cost):
            cost = 2 * cost + forward_flops(self.base, length).total
        return batch.ids.numel() * cost
