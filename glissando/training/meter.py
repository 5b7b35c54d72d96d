"""How a step is going: sums over its targets, on this process while it runs and over all of them at its end."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from torch import Tensor


@dataclass
class StepSums:
    """This process's sums of the step in progress. The nats stay on the device, so that nothing waits for them."""

    nats: Tensor | None = None
    neutral: Tensor | None = None  # KL at u = 0, where it is part of the loss
    hits: Tensor | None = None  # targets that were the likeliest token, where they are counted
    targets: int = 0
    n_bytes: int = 0
    flops: float = 0.0

    def add(
        self, nats: Tensor, neutral: Tensor | None, hits: Tensor | None, targets: int, n_bytes: int, flops: float
    ) -> None:
        self.nats = _plus(self.nats, nats)
        self.hits = self.hits if hits is None else _plus(self.hits, hits)
        self.neutral = self.neutral if neutral is None else _plus(self.neutral, neutral)
        self.targets += targets
        self.n_bytes += n_bytes
        self.flops += flops


@dataclass
class Meter:
    """Sums over all processes since the last reading; part of a checkpoint, which may lie between two readings."""

    nats: float = 0.0
    targets: int = 0
    n_bytes: int = 0
    neutral: float = 0.0

    def add(self, nats: float, neutral: float, targets: int, n_bytes: int) -> None:
        self.nats += nats
        self.neutral += neutral
        self.targets += targets
        self.n_bytes += n_bytes

    def read(self) -> tuple[float, float, float]:
        """Nats per target, bits per byte and KL at u = 0 in nats per target, then start anew."""
        loss = self.nats / max(self.targets, 1)
        bits = self.nats / math.log(2) / max(self.n_bytes, 1)
        neutral = self.neutral / max(self.targets, 1)
        self.nats, self.neutral, self.targets, self.n_bytes = 0.0, 0.0, 0, 0
        return loss, bits, neutral

    def state_dict(self) -> dict[str, float]:
        return asdict(self)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part.detach() if total is None else total + part.detach()
