"""What growth has left to remember of each parameter of a model: its share, and what the optimizer keeps of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from glissando.checkpoints import by_parameter, checkpoint_step
from glissando.errors import ConfigError
from glissando.runs import OPTIMIZER, Run
from glissando.training.config import OPTIMIZERS


@dataclass(frozen=True)
class Share:
    """What growth has left to remember of a parameter: `copies` of each entry of a smaller model's, times `share`.

    The factors with which Adam moves every copy as it would have moved the entry, see glissando.widening.Grows.
    `released` is what earlier trainings have given back of the learning rate, see OptimizerOptions.
    """

    share: float = 1.0
    copies: float = 1.0
    released: float = 1.0

    @property
    def rate(self) -> float:
        return self.share * self.released

    @property
    def eps(self) -> float:
        return 1 / (self.copies * self.share)

    @property
    def norm(self) -> float:
        """Factor from the gradient's norm over all copies to that of the smaller model."""
        return math.sqrt(self.copies) * self.share


def shares(model: nn.Module, grown: Mapping[str, list[float]]) -> dict[str, Share]:
    """The share of each parameter, from a run's record of the grown ones.

    Raises ConfigError for the name of a parameter that the model does not have.
    """
    names = [name for name, _ in model.named_parameters()]
    for name in grown:
        if name not in names:
            raise ConfigError(f"grown names {name!r}, which is no parameter of this model; keep its model options")
    return {name: Share(*grown.get(name, ())) for name in names}


def remembered(run: Run) -> dict[str, list[float]]:
    """What the next training has to remember of a run's growth: its record, with what its own training has released."""
    before, checkpoint = run.read_config(), run.checkpoint or run.own_checkpoint()
    options = OPTIMIZERS.read(before.get("training", {}).get("optimizer", {}))
    left = 1.0 if checkpoint is None else options.held(checkpoint_step(checkpoint))
    grown = {name: Share(*values) for name, values in before.get("grown", {}).items()}
    return {name: noted(old.share, old.copies, old.rate**left / old.share) for name, old in grown.items()}


def noted(share: float, copies: float, released: float) -> list[float]:
    """A Share as a run records it."""
    return [float(share), float(copies), *([float(released)] if released != 1.0 else [])]


# ---------------------------------------------------------------------- moments

#: the optimizer's tensors of each parameter, by its names for them
Moments = dict[str, dict[str, Tensor]]

#: of what power of the gradient a tensor is a mean
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 1}


def read_moments(run: Run) -> Moments:
    """The moments of a run that was made by growing; none of any other run, or of a checkpoint.

    Raises RunError if the file is damaged.
    """
    if run.checkpoint is not None or not (run.path / OPTIMIZER).is_file():
        return {}
    return by_parameter(run.read_tensors(OPTIMIZER))
