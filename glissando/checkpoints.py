"""The checkpoints of a run: directories checkpoints/step-00000123/, and checkpoints/best/ of the best validation."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from glissando.errors import RunError
from glissando.storage import remove_directory, verify_manifest
from glissando.trees import load_tree

log = logging.getLogger(__name__)

CHECKPOINTS, BEST = "checkpoints", "best"
#: in the checkpoint of a sharded training: its tensors, see glissando.shards
SHARDS = "shards"
MODULE_PREFIX = "model."  # the attribute under which the training objective holds the language model
_STEP = re.compile(r"\.?step-(\d{8,})(\.old-.*)?")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step belongs: `directory/step-00000123`."""
    return Path(directory) / f"step-{step:08d}"


def checkpoint_step(path: str | Path) -> int:
    """The optimizer step of a checkpoint directory, or -1 if it is not named like one."""
    match = _STEP.fullmatch(Path(path).name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    named = checkpoint_step(path) >= 0 or re.fullmatch(rf"{BEST}|\.{BEST}\.old-.*", path.name) is not None
    return named and path.resolve().parent.name == CHECKPOINTS


def saved_step(checkpoint: Path) -> int:
    """The optimizer step of a checkpoint, whatever its name. Raises RunError if it is damaged."""
    step = checkpoint_step(checkpoint)
    if step >= 0:
        return step
    return int(load_tree(checkpoint, "trainer", partial(_intact, checkpoint))["step"])


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, whole, on the CPU, their digests checked.

    Raises RunError if they are missing or damaged, and names the checkpoint that is intact.
    """
    if not (checkpoint / SHARDS).is_dir():
        return dict(load_tree(checkpoint, "model", partial(_intact, checkpoint)))
    verify_manifest(checkpoint, advice=partial(_intact, checkpoint))
    from glissando.shards import read_whole

    return read_whole(checkpoint, "model")


def _intact(damaged: Path) -> str:
    """Advice for a damaged checkpoint: the newest of the same run whose files are intact."""
    good = next((path for path in checkpoints(damaged.parent) if path != damaged and _is_intact(path)), None)
    if good is None:
        return f"No other checkpoint of {damaged.parent.parent} is intact: train again into another directory."
    return f"This checkpoint is intact and loads instead: {good}"


def _is_intact(path: Path) -> bool:
    try:
        verify_manifest(path)
    except RunError:
        return False
    return True


def of_model(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the language model among a checkpoint's weights, by its own names."""
    ours = {name: value for name, value in weights.items() if name.startswith(MODULE_PREFIX)}
    return {name.removeprefix(MODULE_PREFIX): value for name, value in (ours or weights).items()}


def saved_optimizer(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """What the optimizer kept of each parameter, by its name; as `saved_weights`."""
    if not (checkpoint / SHARDS).is_dir():
        return dict(load_tree(checkpoint, "trainer", partial(_intact, checkpoint)).get("optimizer", {}))
    verify_manifest(checkpoint, advice=partial(_intact, checkpoint))
    from glissando.shards import read_whole

    states: dict[str, dict[str, Tensor]] = {}
    for name, value in read_whole(checkpoint, "optimizer").items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = value
    return states


def checkpoints(directory: str | Path) -> list[Path]:
    """Everything that is named like a checkpoint, complete or not, newest first."""
    if not Path(directory).is_dir():
        return []
    found = (path for path in Path(directory).iterdir() if checkpoint_step(path) >= 0 and path.is_dir())
    # What a crash left renamed aside counts only where nothing stands under the name itself.
    found = (
        path for path in found if path.name[0] != "." or not checkpoint_path(directory, checkpoint_step(path)).exists()
    )
    return sorted(found, key=lambda path: (checkpoint_step(path), path.name), reverse=True)


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint, each file checked, or None. Logs what it skips and why."""
    for path in checkpoints(directory):
        try:
            verify_manifest(path)
        except RunError as error:
            log.warning("skipping checkpoint %s: %s", path.name, error)
        else:
            return path
    return None


def keep_newest(directory: str | Path, count: int, complete: Path | None = None) -> None:
    """Deletes all but the newest `count` checkpoints, never the newest complete one: `complete`, or, where that is not
    known to the caller, the first whose files are intact.

    Raises ValueError if `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}: a run keeps its last checkpoint")
    old = checkpoints(directory)[count:]
    if not old:
        return
    last_good = complete or latest_checkpoint(directory)
    for path in old:
        if last_good is not None and path != last_good:
            remove_directory(path)
