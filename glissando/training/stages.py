"""Several runs, each from where the one before it ended, described by one configuration.

    stages:
      - {name: pretrain, training: {tokens: 4000000}, data: {stories: {labelled: false}}}
      - {name: steer, training: {tokens: 1000000, neutral_kl: 1.0, freeze: [embedding.*]}}

A stage is the whole configuration with its own options over it. Stage k becomes the run OUT/k-NAME, like any other, and
starts from the weights of the stage before.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from glissando.config import from_dict, merge
from glissando.errors import ConfigError, RunError
from glissando.runs import Run, config_text, latest_checkpoint
from glissando.storage import write_atomic
from glissando.training import launch
from glissando.training.config import BUDGETS, RunConfig, Stage

STAGES = "stages.yaml"


def train_stages(config: RunConfig, out: str | Path) -> list[Run]:
    """Train every stage into a run directory of its own inside the new directory `out`.

    Raises ConfigError for a stage that makes no sense before any of them is trained; else as `train`.
    """
    out = Path(out)
    resolve(config, out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not empty; nothing is overwritten: name another --out")
    if launch.rank() == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"could not make {out}: {error.strerror}. Choose a writable place.") from error
        write_atomic(out / STAGES, config_text(config.as_dict()))
    return _run_all(config, out, {})


def resume_stages(out: str | Path, machine: Mapping[str, Any] | None = None) -> list[Run]:
    """Go on with the first stage in `out` that is not finished, and with those after it.

    Raises RunError for a damaged stages.yaml, or for a stage that was ended before it could save anything.
    """
    out = Path(out)
    try:
        values = yaml.safe_load((out / STAGES).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"cannot read {out / STAGES}: {error}; train again into another directory") from error
    return _run_all(from_dict(RunConfig, values, STAGES), out, machine or {})


def resolve(config: RunConfig, out: Path) -> list[tuple[Path, RunConfig]]:
    """The run directory of each stage, and its whole configuration.

    Raises ConfigError for names that are no names or not unique, unknown options, and budgets that make no sense.
    """
    if math.prod(launch.processes(config.training)) > 1 or any(_shared(stage) for stage in config.stages):
        raise ConfigError(
            "stages train in one process, as each process would start the next stage by itself; train them one by one, "
            "each with --from the run of the one before"
        )
    shared = config.as_dict()
    del shared["stages"]
    plans: list[tuple[Path, RunConfig]] = []
    for number, stage in enumerate(config.stages, 1):
        _require_name(stage, config.stages)
        where = f"stages[{number}] ({stage.name})"
        start = {"start_from": str(plans[-1][0])} if plans else {}
        own = {key: getattr(stage, key) for key in ("model", "data", "training")}
        if any(own["training"].get(name) is not None for name in BUDGETS):
            # A stage's budget takes the place of the shared one, whichever of them either is.
            shared_budget = dict.fromkeys(BUDGETS)
            own["training"] = {**shared_budget, **own["training"]}
        whole = from_dict(RunConfig, merge(shared, own, start), where)
        try:
            whole.check(math.prod(launch.processes(whole.training)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        plans.append((out / f"{number}-{stage.name}", whole))
    return plans


def _shared(stage: Stage) -> bool:
    return any(stage.training.get(name, 1) != 1 for name in ("devices", "num_nodes"))


def _require_name(stage: Stage, stages: list[Stage]) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", stage.name):
        raise ConfigError(f"a stage's name is made of letters, digits, _ . and -, got {stage.name!r}")
    if sum(other.name == stage.name for other in stages) > 1:
        raise ConfigError(f"two stages are named {stage.name!r}; give each a name of its own")


def _run_all(config: RunConfig, out: Path, machine: Mapping[str, Any]) -> list[Run]:
    from glissando.training.fit import machine_only, resume, train

    machine_only(machine)
    runs = []
    for path, stage in resolve(config, out):
        if launch.rank() == 0:
            print(f"stage {path.name}", file=sys.stderr)
        if not path.exists():
            for name, value in machine.items():
                setattr(stage.training, name, value)
            runs.append(train(stage, path))
            continue
        if latest_checkpoint(path / "checkpoints") is None:
            raise RunError(f"{path} was ended before its first checkpoint: move it elsewhere and resume {out} again")
        runs.append(resume(path, machine))
    return runs
