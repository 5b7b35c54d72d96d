"""Several runs, each from where the one before it ended, described by one configuration.

    stages:
      - {name: pretrain, training: {tokens: 4000000}, data: {labelled: false}}
      - {name: steer, training: {tokens: 1000000, neutral_kl: 1.0, freeze: [embedding.*]}}

A stage is the whole configuration with its own options over it. Stage k becomes the run OUT/k-NAME, like any other, and
starts from the weights of the stage before.

      - {name: larger, grow: {width: 2, layers: 1}, training: {flops: 1.0e+12}, data: {seed: 1}}

A stage may first `grow` the model of the stage before, with its optimizer's state, into the run OUT/k-NAME-start; later
stages keep that size. Data begin anew in each stage: another data.seed gives others.
"""

from __future__ import annotations

import json
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
from glissando.run_files import alone, fingerprints, put_texts
from glissando.runs import Run, config_text
from glissando.storage import MANIFEST, read_json, record, write_atomic
from glissando.training import launch
from glissando.training.config import RunConfig, Stage, TrainingConfig
from glissando.training.fit import JOB, machine_only, resume, train
from glissando.training.length import BUDGETS
from glissando.training.start import plan_starts
from glissando.untrusted import require_recorded
from glissando.urls import is_url
from glissando.yaml_files import read_options

STAGES = "stages.yaml"
#: beside it: what the files were that it names, for stages that begin after an interruption
RECORD = "stages.json"


def train_stages(config: RunConfig, out: str | Path) -> list[Run]:
    """Train every stage into a run directory of its own inside the new directory `out`.

    Raises ConfigError for a stage that makes no sense before any of them is trained; else as `train`.
    """
    if is_url(out):
        raise ConfigError(f"stages need a local directory, got {out}; --out URL is only for a single training")
    out = Path(out).expanduser()
    staged, is_first = plans(config, out), launch.rank() == 0
    if _begun_by_this_job(config, out, staged[0]):
        return resume_stages(out)
    if is_first:
        Run(out).require_free()
    with alone(out) if is_first else nullcontext():
        if is_first:
            Run(out).require_free()
            write_atomic(out / RECORD, json.dumps({p.path.name: _named(p) for p in staged}, indent=2).encode())
            write_atomic(out / STAGES, config_text(config.as_dict()))
        return _run_all(staged, config.training, {}, {})


def _named(plan: Plan) -> dict[str, Any]:
    """Fingerprints of the files that a stage reads besides the stage before it, by option."""
    found: dict[str, Any] = dict(fingerprints(plan.config.data))
    tokenizer, start = getattr(plan.config.data.tokenizer, "path", None), plan.config.start_from
    if tokenizer is not None:
        found["data.tokenizer.path"] = record(Path(tokenizer).expanduser())
    if start is not None and Path(start).parent != plan.path.parent:
        run = Run.open(start)
        found["start_from"] = record((run.checkpoint or run.path) / MANIFEST)
    return found


def _require_named(plan: Plan, texts: Mapping[str, str]) -> None:
    """Raises RunError where a stage that begins now names a file of this machine that is not what it was, or of which
    nothing is recorded: stages.yaml may come from anywhere, see glissando.untrusted."""
    file = plan.path.with_name(RECORD)
    known = read_json(file, "what the files of the stages were").get(plan.path.name, {}) if file.is_file() else {}
    known = known if isinstance(known, dict) else {}
    start = plan.config.start_from
    options = {f"data.{name}": getattr(plan.config.data, name, None) for name in ("path", "valid_path")}
    options["data.tokenizer.path"] = getattr(plan.config.data.tokenizer, "path", None)
    options["start_from"] = None if start is None or Path(start).parent == plan.path.parent else start
    for option, path in options.items():
        if path is not None:
            require_recorded(Path(path), option in known, option in texts, plan.path.parent, f"--{option} FILE")
    for option, now in _named(plan).items():
        if option not in texts and now != known.get(option):
            raise RunError(
                f"{option} of {plan.path.parent / STAGES} names {options.get(option, 'a file')}, which is not what it "
                "was: put it back, or train the stages again"
            )


def _begun_by_this_job(config: RunConfig, out: Path, first: Plan) -> bool:
    """Whether torchrun has started these very stages before, as `train` asks of a run."""
    same = (out / STAGES).is_file() and (out / STAGES).read_bytes() == config_text(config.as_dict())
    made = Run(first.path).read_environment().get(JOB) if same else None
    return launch.job() is not None and same and made in (None, launch.job())


def resume_stages(
    out: str | Path, machine: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None
) -> list[Run]:
    """Go on with the first stage in `out` that is not finished, and with those after it; options as those of `resume`.

    A stage that was ended before it could save anything is started anew. Raises RunError for a damaged stages.yaml.
    """
    out = Path(out).expanduser()
    try:
        values = read_options(out / STAGES)
    except ConfigError as error:
        raise RunError(f"{error}; train again into another directory") from error
    config, machine = from_dict(RunConfig, values, STAGES), machine_only(machine or {})
    with alone(out) if launch.rank() == 0 else nullcontext():
        return _run_all(plans(config, out), replace(config.training, **machine), machine, texts or {}, resuming=True)


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
    for name, ours in (("devices", config.training.devices), ("num_nodes", config.training.num_nodes)):
        if (other := next((s for s in config.stages if s.training.get(name, ours) != ours), None)) is not None:
            raise ConfigError(
                f"all stages train in the same processes: training.{name} is {ours}, and {other.training[name]!r} in "
                f"stage {other.name}; give it once, outside the stages"
            )
    names = [stage.name for stage in config.stages]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(f"a stage's name is made of letters, digits, _ . and -, got {name!r}")
        if names.count(name) > 1:
            raise ConfigError(f"two stages are named {name!r}; give each a name of its own")
    shared = {name: value for name, value in config.as_dict().items() if name != "stages"}
    found: list[Plan] = []
    for number, stage in enumerate(config.stages, 1):
        where = f"stages[{number}] ({stage.name})"
        path, before = out / f"{number}-{stage.name}", found[-1] if found else None
        own = {key: getattr(stage, key) for key in ("model", "data", "training")}
        if any(stage.training.get(name) is not None for name in BUDGETS):
            # A stage's budget takes the place of the shared one, whichever of them either is.
            own["training"] = {**dict.fromkeys(BUDGETS), **stage.training}
        growth, model = _grown(stage, before, any(plan.growth for plan in found), where)
        start = {}
        if before is not None:
            start["start_from"] = str(path.with_name(f"{path.name}-start") if growth else before.path)
        whole = from_dict(RunConfig, merge(RunConfig, shared, model, own, start), where)
        try:
            whole.check(math.prod(launch.processes(whole.training)))
            if not whole.training.budgets:
                raise ConfigError(f"without a budget the next stage is never reached: give one of {', '.join(BUDGETS)}")
            plan_starts(whole.model, whole.start_from, before.config.model if before else None, growth is not None)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        found.append(Plan(path, whole, growth))
    return found


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


def _run_all(
    staged: list[Plan],
    training: TrainingConfig,
    machine: Mapping[str, Any],
    texts: Mapping[str, str],
    resuming: bool = False,
) -> list[Run]:
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
                plan.config.training = replace(plan.config.training, **machine)
                put_texts(plan.config.data, texts)
                if resuming:
                    _require_named(plan, texts)
                runs.append(train(plan.config, plan.path))
            else:
                runs.append(resume(plan.path, machine, texts=texts))
    return runs
