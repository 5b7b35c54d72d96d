"""Adam's moments of a run's parameters, through growth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from glissando.checkpoints import saved_optimizer
from glissando.growth.grow import Grown
from glissando.runs import OPTIMIZER, Run
from glissando.storage import verify_manifest


class Moments(NamedTuple):
    """Of one parameter."""

    step: Tensor  # () how many gradients they have seen
    first: Tensor  # the parameter's shape
    second: Tensor

    def state(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.first, "exp_avg_sq": self.second}


def checkpoint_moments(checkpoint: Path) -> dict[str, Moments]:
    """Those of a checkpoint; none of one that an earlier version saved, or of another optimizer.

    Raises RunError if it is damaged.
    """
    verify_manifest(checkpoint)
    saved = saved_optimizer(checkpoint)
    if any("exp_avg" not in own for own in saved.values()):
        return {}
    return {name: Moments(own["step"], own["exp_avg"], own["exp_avg_sq"]) for name, own in saved.items()}


def grow_moments(moments: Mapping[str, Moments], grown: Grown) -> dict[str, Moments]:
    """Those of the grown model's parameters; what is new starts without."""
    return {name: Moments(own.step, *grown.moments(name, own.first, own.second)) for name, own in moments.items()}


def write_moments(run: Run, moments: Mapping[str, Moments]) -> None:
    """Into optimizer.safetensors."""
    tensors = {f"{name}/{part}": value for name, own in moments.items() for part, value in own._asdict().items()}
    run.write_tensors(OPTIMIZER, tensors)


def read_moments(run: Run) -> dict[str, Moments]:
    """Those of a run that was made by growing; none of any other, or of one of its checkpoints.

    Raises RunError if the file is damaged.
    """
    if run.checkpoint is not None or not (run.path / OPTIMIZER).is_file():
        return {}
    tensors: dict[str, Any] = run.read_tensors(OPTIMIZER)
    names = sorted({name.rpartition("/")[0] for name in tensors})
    return {name: Moments(*(tensors[f"{name}/{part}"] for part in Moments._fields)) for name in names}
