"""Where the rows of metrics.csv go besides: TensorBoard's events, and runs of Weights & Biases."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from glissando.errors import MissingExtraError, TrainingError
from glissando.storage import write_atomic

#: directories of theirs in a run
TENSORBOARD, WANDB = "tensorboard", "wandb"
#: inside the latter: the id of the run there, so that a training that is resumed goes on with it
ID = "id"


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None:
        """The values of one row by column, `step` among them; "" where there is none."""

    def close(self) -> None: ...


class TensorBoard:
    """Events in `tensorboard/` of the run; those after `step`, of a training that got further, are dropped."""

    def __init__(self, run: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        self._events = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if value != "":
                self._events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._events.close()


class Wandb:
    """A run of Weights & Biases in `project`, named as the run directory.

    Raises TrainingError where wandb refuses, as without a login.
    """

    def __init__(self, run: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb, file = import_wandb(), run / WANDB / ID
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            write_atomic(file, uuid.uuid4().hex[:12].encode())
        identity = file.read_text(encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project, id=identity, name=run.name, dir=str(run), config=dict(config), resume="allow"
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"Weights & Biases refused project {project!r}: {error}. Log in with `wandb login`, or set "
                "WANDB_MODE=offline and send the run later with `wandb sync`."
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value != "" and name != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def import_wandb() -> Any:
    """The package. Raises MissingExtraError without it."""
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("training.wandb needs wandb: pip install wandb") from error
    return wandb


def loggers(run: Path, step: int, tensorboard: bool, project: str | None, config: Mapping[str, Any]) -> list[Logger]:
    """Those that are asked for; `step` is the one that training goes on from."""
    found: list[Logger] = [] if project is None else [Wandb(run, project, config)]
    return [*found, TensorBoard(run, step)] if tensorboard else found
