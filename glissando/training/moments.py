"""What the optimizer keeps of a run's parameters: AdamW's moments, Muon's momentum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glissando.checkpoints import by_parameter
from glissando.runs import OPTIMIZER, Run

#: the optimizer's tensors of each parameter, by its names for them
Moments = dict[str, dict[str, Tensor]]

#: of what power of the gradient a tensor is a mean
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 1}


def optimizer_of(moments: Moments) -> str | None:
    """The optimizer that keeps these, by its name in training.optimizer.kind; None if there are none."""
    if not moments:
        return None
    return "muon" if any("momentum_buffer" in tensors for tensors in moments.values()) else "adamw"


def write_moments(run: Run, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Into optimizer.safetensors."""
    run.write_tensors(
        OPTIMIZER, {f"{name}/{key}": value for name, tensors in moments.items() for key, value in tensors.items()}
    )


def read_moments(run: Run) -> Moments:
    """The moments of a run that was made by growing; none of any other run, or of a checkpoint.

    Raises RunError if the file is damaged.
    """
    if run.checkpoint is not None or not (run.path / OPTIMIZER).is_file():
        return {}
    return by_parameter(run.read_tensors(OPTIMIZER))
