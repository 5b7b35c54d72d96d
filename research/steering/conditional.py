"""Conditional activation steering: the constant of activation addition is added only where a condition holds.

    a <- a + s u v    where  u cos(a - m, v) < theta,      a <- a elsewhere

v is the difference of means of activation_addition.py, m the mean of the two means, so that the cosine says on which
side a position stands already. Lee et al. 2024 (CAST), arXiv 2409.05907, test a condition vector against the prompt and
steer the whole answer; here beginnings decide no label, so each position is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.model import LanguageModel
from research.steering.activation_addition import Addition, changed, places


class Conditional(Addition):
    """The addition where u cos(a - middle, v) is below `threshold`."""

    def __init__(
        self, base: LanguageModel, name: str, vector: Tensor, middle: Tensor, strength: float, threshold: float
    ) -> None:
        super().__init__(base, name, vector, strength)
        self.middle, self.threshold = middle, threshold

    @property
    def way(self) -> str:
        return f"CAST: {self.name}, s = {self.strength:.3g}, threshold {self.threshold:.3g}"

    @contextmanager
    def turned(self, u: float) -> Iterator[None]:
        like = self.base.embedding.weight
        vector, middle = (part.to(like.device, like.dtype) for part in (self.vector, self.middle))

        def change(x: Tensor) -> Tensor:
            applies = u * F.cosine_similarity(x - middle, vector, dim=-1) < self.threshold
            return torch.where(applies[..., None], x + self.strength * u * vector, x)

        with changed(places(self.base)[self.name], change):
            yield
