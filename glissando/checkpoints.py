"""The checkpoints of a run: directories checkpoints/step-00000123/, each written whole, and the file `latest`.

That names the newest checkpoint and the one of the best validation, and is replaced once both are there:

    latest: step-00000123
    best: step-00000100
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from glissando.errors import RunError
from glissando.storage import MANIFEST, is_whole, load_tensors, remove_directory, verify_manifest, write_atomic

CHECKPOINTS, BEST, LATEST = "checkpoints", "best", "latest"
WEIGHTS = "model.safetensors"
#: all else that a training goes on from: plain values, and tensors optimizer/PARAMETER/KEY and lanes/LANE/NUMBER
TRAINER, TRAINER_TENSORS = "trainer.json", "trainer.safetensors"
#: in the checkpoint of a sharded training: its tensors, see glissando.shards
SHARDS = "shards"
#: so many of the latest checkpoints stay: one that is intact, should the newest be damaged
KEPT = 2
MODULE_PREFIX = "model."  # the attribute under which the training objective holds the language model
_STEP = re.compile(r"step-(\d{8,})")
_POINTERS = re.compile(rf"{LATEST}: (step-\d{{8,}})\n(?:{BEST}: (step-\d{{8,}})\n)?")


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step belongs."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_step(path: str | Path) -> int:
    """The optimizer step of a checkpoint directory, or -1 if it is not named like one."""
    match = _STEP.fullmatch(Path(path).name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """Whether it is named as a checkpoint of a run, or as checkpoints/best, which `best_checkpoint` finds."""
    return (checkpoint_step(path) >= 0 or path.name == BEST) and path.absolute().parent.name == CHECKPOINTS


def checkpoints(run: Path) -> list[Path]:
    """Those that are complete, newest first."""
    paths = (path for path in (run / CHECKPOINTS).glob("step-*") if checkpoint_step(path) >= 0)
    return sorted((path for path in paths if (path / MANIFEST).is_file()), key=checkpoint_step, reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run, or None; a run that was killed before the first `latest` has one at most.

    Raises RunError, which names what stands, where `latest` is lost or damaged or names one that is not there.
    """
    latest, _ = _pointers(run)
    return latest


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the best validation, or None; raises as `latest_checkpoint`."""
    _, best = _pointers(run)
    return best


def point_to(run: Path, step: int, best_step: int) -> None:
    """Writes `latest`, then deletes all checkpoints but the newest KEPT up to it and the best one.

    best_step   that of the best validation so far; below 0 before the first
    """
    best = checkpoint_path(run, best_step)
    has_best = best_step >= 0 and (best / MANIFEST).is_file()
    text = f"{LATEST}: {checkpoint_path(run, step).name}\n" + (f"{BEST}: {best.name}\n" if has_best else "")
    write_atomic(run / LATEST, text.encode())
    # What lies beyond `latest` is of a training that was killed before it could name it.
    known = [path for path in checkpoints(run) if checkpoint_step(path) <= step]
    for path in {*checkpoints(run)} - {*known[:KEPT], best}:
        remove_directory(path)


def pointers(text: bytes, where: str, fix: Callable[[], str] = str) -> tuple[str, str | None]:
    """The names that the file `latest` gives. Raises RunError, with what `fix` says, for other contents."""
    match = _POINTERS.fullmatch(text.decode(errors="replace"))
    if match is None:
        raise RunError(f"{where} is damaged: it names no checkpoint. {fix()}")
    return match[1], match[2]


def _pointers(run: Path) -> tuple[Path | None, Path | None]:
    file, there = run / LATEST, checkpoints(run)
    if not file.is_file():
        if len(there) > 1:
            raise RunError(f"{file} is missing. {_fix(run, there)}")
        return (there[0] if there else None), None
    names = pointers(file.read_bytes(), str(file), lambda: _fix(run, there))
    named = [None if name is None else run / CHECKPOINTS / name for name in names]
    for path in named:
        if path is not None and path not in there:
            raise RunError(f"{path / MANIFEST} is missing, and {file} names that checkpoint. {_fix(run, there)}")
    return named[0], named[1]


def _fix(run: Path, there: list[Path], damaged: Path | None = None) -> str:
    """What to do where the newest checkpoint is not known, or `damaged`."""
    good = next((path for path in there if path != damaged and is_whole(path)), None)
    if good is None:
        return f"No other checkpoint of {run} is intact: train again into another directory."
    return (
        f"This checkpoint is intact and loads instead: {good} (to resume from it, write the line `{LATEST}: "
        f"{good.name}` into {run / LATEST})"
    )


def intact_advice(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint: the newest of the same run whose files are intact."""
    run = checkpoint.parent.parent
    return _fix(run, checkpoints(run), checkpoint)


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, whole, on the CPU, their digests checked.

    Raises RunError if they are missing or damaged, and names the checkpoint that is intact.
    """
    return _saved(checkpoint, WEIGHTS, "model")


def of_model(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The language model's weights among a checkpoint's, by the model's own names."""
    model = {name: value for name, value in weights.items() if name.startswith(MODULE_PREFIX)}
    return {name.removeprefix(MODULE_PREFIX): value for name, value in (model or weights).items()}


def saved_optimizer(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """What the optimizer kept of each parameter, by its name; as `saved_weights`."""
    return by_parameter(_saved(checkpoint, TRAINER_TENSORS, "optimizer"))


def _saved(checkpoint: Path, file: str, part: str) -> dict[str, Tensor]:
    """A part of all tensors, by their names: from a file, or put together from shards."""
    is_sharded = (checkpoint / SHARDS).is_dir()
    verify_manifest(checkpoint, None if is_sharded else [file], partial(intact_advice, checkpoint))
    if is_sharded:
        from glissando.shards import read_whole

        return read_whole(checkpoint, part)
    tensors = load_tensors(checkpoint / file)
    return tensors if file == WEIGHTS else below(part, tensors)


def below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are named part/NAME, by NAME."""
    return {name.removeprefix(f"{part}/"): value for name, value in tensors.items() if name.startswith(f"{part}/")}


def by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors named PARAMETER/KEY as a dictionary for each parameter."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = value
    return states
