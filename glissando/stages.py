"""Several runs, each from where the one before it ended, described by one configuration.

    stages:
      - {name: pretrain, training: {tokens: 4000000}, data: {labelled: false}}
      - {name: steer, training: {tokens: 1000000, neutral_kl: 1.0, freeze: [embedding.*]}}

A stage is the whole configuration with its own options over it. Stage k becomes the run OUT/k-NAME, like any other, and
starts from the weights of the stage before. The same command again goes on where it was stopped.

      - {name: larger, grow: {width: 2, layers: 1}, training: {flops: 1.0e+12}, data: {seed: 1}}

A stage may first `grow` the model of the stage before, with its optimizer's state, into the run OUT/k-NAME-start; later
stages keep that size. Data begin anew in each stage: another data.seed gives others.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from glissando.backbone import for_saved_weights
from glissando.config import from_dict, merge, to_dict
from glissando.errors import ConfigError, RunError
from glissando.growth import Growth, grown_config
from glissando.growth.runs import grow_run
from glissando.model import LanguageModel
from glissando.run_files import alone
from glissando.runs import Run, config_text
from glissando.storage import MANIFEST, write_atomic
from glissando.training import launch
from glissando.training.config import MACHINE, RunConfig, Stage, TrainingConfig
from glissando.training.fit import resume, train
from glissando.training.length import BUDGETS
from glissando.training.start import plan_starts
from glissando.urls import is_url
from glissando.yaml_files import read_options

STAGES = "stages.yaml"


def train_stages(config: RunConfig, out: str | Path) -> list[Run]:
    """Train every stage into a run directory of its own inside `out`.

    The same stages again go on: those that have ended stay as they are, and one that was interrupted is resumed, or
    begun anew where it had saved nothing. Where and in how many processes they train may be another.

    Raises ConfigError for a stage that makes no sense before any of them is trained, RunError where `out` holds
    anything else; else as `train`.
    """
    if is_url(out):
        raise ConfigError(f"stages need a local directory, got {out}; --out URL is only for a single training")
    out = Path(out).expanduser()
    staged, is_first = plans(config, out), launch.rank() == 0
    if is_first:
        _require_same(config, out)
    with alone(out) if is_first else nullcontext():
        if is_first:
            _require_same(config, out)
            write_atomic(out / STAGES, config_text(config.as_dict()))
        return _run_all(staged, config.training)


def _require_same(config: RunConfig, out: Path) -> None:
    """Raises RunError where `out` holds other stages, or anything else."""
    if not (out / STAGES).is_file():
        Run(out).require_free()
    elif _without_machine(read_options(out / STAGES)) != _without_machine(config.as_dict()):
        raise RunError(f"{out} holds stages of other options: give those of {out / STAGES}, or choose another --out")


def _without_machine(values: Mapping[str, Any]) -> Any:
    """A configuration of stages without options of the machine."""
    if not isinstance(values, Mapping):
        return values
    return {name: _without_machine(value) for name, value in values.items() if name not in MACHINE}


class Plan(NamedTuple):
    """The run directory of a stage, its whole configuration, and how the stage before it is grown first."""

    path: Path
    config: RunConfig
    growth: Growth | None = None

    @property
    def start(self) -> Path:
        """Where the grown model is put."""
        return self.path.with_name(f"{self.path.name}-start")


def plans(config: RunConfig, out: Path) -> list[Plan]:
    """What each stage is.

    Raises ConfigError for names that are no names or not unique, unknown options, and budgets that make no sense.
    """
    devices = config.training.devices
    if (other := next((s for s in config.stages if s.training.get("devices", devices) != devices), None)) is not None:
        raise ConfigError(
            f"all stages train in the same processes: training.devices is {devices}, and {other.training['devices']!r} "
            f"in stage {other.name}; give it once, outside the stages"
        )
    names = [stage.name for stage in config.stages]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(f"a stage's name is made of letters, digits, _ . and -, got {name!r}")
        if names.count(name) > 1:
            raise ConfigError(f"two stages are named {name!r}; give each a name of its own")
    shared = {name: value for name, value in config.as_dict().items() if name != "stages"}
    planned: list[Plan] = []
    for number, stage in enumerate(config.stages, 1):
        where = f"stages[{number}] ({stage.name})"
        path, before = out / f"{number}-{stage.name}", planned[-1] if planned else None
        options = {key: getattr(stage, key) for key in ("model", "data", "training")}
        if any(stage.training.get(name) is not None for name in BUDGETS):
            # A stage's budget takes the place of the shared one, whichever of them either is.
            options["training"] = {**dict.fromkeys(BUDGETS), **stage.training}
        growth, model = _grown(stage, before, any(plan.growth for plan in planned), where)
        start = {}
        if before is not None:
            start["start_from"] = str(path.with_name(f"{path.name}-start") if growth else before.path)
        whole = from_dict(RunConfig, merge(RunConfig, shared, model, options, start), where)
        try:
            whole.check(math.prod(launch.processes(whole.training)))
            if not whole.training.budgets:
                raise ConfigError(f"without a budget the next stage is never reached: give one of {', '.join(BUDGETS)}")
            plan_starts(whole.model, whole.start_from, before.config.model if before else None, growth is not None)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        planned.append(Plan(path, whole, growth))
    return planned


def _grown(stage: Stage, before: Plan | None, ever: bool, where: str) -> tuple[Growth | None, dict[str, Any]]:
    """How the stage before is grown, and the model's options once anything has `ever` been."""
    if not stage.grow and not ever:
        return None, {}
    if before is None:
        raise ConfigError(f"{where}: grow makes the model of the stage before larger, and this is the first stage")
    if not stage.grow:
        return None, {"model": to_dict(before.config.model)}
    growth = from_dict(Growth, stage.grow, f"{where}.grow")
    try:
        return growth, {"model": to_dict(grown_config(LanguageModel(for_saved_weights(before.config.model)), growth))}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _run_all(staged: list[Plan], training: TrainingConfig) -> list[Run]:
    """Every stage in the same processes, which are as many as `training` says; the first alone grows and draws."""
    # It only connects them: how weights are shared and computed with is each stage's own.
    fabric, runs = launch.build_fabric(replace(training, strategy="auto", precision="32-true")), list[Run]()
    with launch.quiet(), launch.ended_together(fabric):
        launch.connect(fabric)
        for plan in staged:
            if fabric.is_global_zero:
                print(f"stage {plan.path.name}", file=sys.stderr)
                if plan.growth is not None and not (plan.start / MANIFEST).is_file():
                    grow_run(runs[-1].path, plan.start, plan.growth)
            # The others begin a stage once the first has ended the one before, and do as it does.
            is_new = fabric.is_global_zero and (not plan.path.exists() or Run(plan.path).has_only_begun())
            if fabric.broadcast(is_new):
                runs.append(train(plan.config, plan.path))
            else:
                runs.append(resume(plan.path, {name: getattr(plan.config.training, name) for name in MACHINE}))
    return runs
