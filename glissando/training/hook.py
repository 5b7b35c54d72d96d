"""What is called around the steps of a training."""

from __future__ import annotations

from typing import Any


class Hook:
    """Its base, called on every process alike; `loop` is the glissando.training.loop.Loop."""

    def before_step(self, loop: Any, batches: list[Any]) -> None:
        """Before a step on these micro-batches of this process; `loop.state.step` steps are done."""

    def after_step(self, loop: Any) -> None:
        """Once the step is taken, before anything is validated, logged or saved."""

    def validating(self, loop: Any) -> None:
        """Before what is held out is scored."""

    def logged(self, loop: Any) -> None:
        """Once the step is validated and logged, before it is saved."""

    def saved(self, loop: Any) -> None:
        """Once a checkpoint and the run's own weights are whole on the disk; on the first process alone, in the thread
        that wrote them: training has gone on meanwhile, and `loop.state` with it."""

    def message(self, line: str) -> None:
        """A line for a person: a sample, a note; also from the thread that saves."""

    def close(self) -> None:
        """At the end, by an error too."""

    def columns(self, loop: Any) -> list[str]:
        """Names of its columns in metrics.csv."""
        return []

    def row(self, loop: Any) -> dict[str, Any]:
        """Their values after the step in progress."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it keeps, as plain values: a part of the checkpoint, given to `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
