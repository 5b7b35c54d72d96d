"""What growth has left to remember of each parameter of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from glissando.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """What growth has left to remember of a parameter: `copies` of each entry of a smaller model's, times `share`.

    The factors with which Adam moves every copy as it would have moved the entry, see glissando.growth.lifts.Grows.
    `released` is what earlier trainings have given back of the learning rate, see AdamWOptions.
    """

    share: float = 1.0
    copies: float = 1.0
    released: float = 1.0

    @property
    def rate(self) -> float:
        return self.share * self.released

    @property
    def decay(self) -> float:
        return 1 / self.rate

    @property
    def eps(self) -> float:
        return 1 / (self.copies * self.share)

    @property
    def norm(self) -> float:
        """Of the smaller model's gradient, from that of all copies."""
        return math.sqrt(self.copies) * self.share


def shares(model: nn.Module, grown: Mapping[str, list[float]]) -> dict[str, Share]:
    """Those of all parameters, from a run's record of the grown ones.

    Raises ConfigError for the name of a parameter that the model does not have.
    """
    names = [name for name, _ in model.named_parameters()]
    for name in grown:
        if name not in names:
            raise ConfigError(f"grown names {name!r}, which is no parameter of this model; keep its model options")
    return {name: Share(*grown.get(name, ())) for name in names}
