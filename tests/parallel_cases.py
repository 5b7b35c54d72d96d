"""The trainings of test_parallel.py, in one process or, under torchrun, in several that stay connected."""

from __future__ import annotations

import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import yaml
from training_runs import PLAIN, configuration

from glissando.config import from_dict
from glissando.presets import load_preset
from glissando.runs import Run
from glissando.training.config import RunConfig, TrainingConfig
from glissando.training.fit import train
from glissando.training.language_task import LanguageTask
from glissando.training.launch import build_fabric, ended_together

BRIEF = {"training": {"steps": 3, "log_every": 1, "save_every": 3}}
FLOW = {"kind": "flow", "layers": 2, "n_steps": 3}
STORIES = {"data": {"kind": "stories", "seq_len": 16, "batch_size": 4, "valid_rows": 2, "cut": True}}
#: a preset of each mixer and depth, small
_PRESETS = {
    "spectral": "continuous-transformer-nano",
    "attention": "transformer-plus-nano",
    "tau": "tauformer-nano",
    "liquid": "liquid-ssm-nano",
    "delta": "delta-nano",
    "tied": "continuous-transformer",
    "flow": "hybrid-ode-nano",
}


def _preset(name: str) -> dict[str, Any]:
    model = load_preset(name)["model"]
    depth = {"kind": "tied", "n_steps": 3, "layers": 1} if "n_steps" in model["depth"] else {"layers": 2}
    depth = FLOW if model["depth"].get("kind") == "flow" else depth
    return {"model": {**model, "hidden_size": 32, "vocab_size": 256, "depth": depth}}


CASES: dict[str, dict[str, Any]] = {
    **{f"preset-{kind}": _preset(name) for kind, name in _PRESETS.items()},
    "flow-recomputed": {"model.depth": {**FLOW, "shortcuts": True}, "training": {"gradient_checkpointing": True}},
    "muon": {"model.depth": FLOW, "training": {"accumulate": 2, "optimizer": {"kind": "muon", "learning_rate": 0.01}}},
    "grown": {"start_from": "grown"},
    "neutral": {
        **STORIES,
        "model.depth": {**FLOW, "control": ["mood", "speech"]},
        "data.labelled": True,
        "start_from": "plain",
        "training": {"neutral_kl": 0.5},
    },
}


def config_of(case: str, folder: Path, strategy: str) -> RunConfig:
    """`folder` has the runs that others start from."""
    values = dict(CASES[case])
    if "start_from" in values:
        start = folder / values["start_from"]
        values = {"model": Run.open(start).read_config()["model"]} | values | {"start_from": str(start)}
    return configuration(folder, PLAIN, BRIEF, values, {"training.strategy": strategy})


def run(case: str, folder: Path) -> Run:
    return train(config_of(case, folder, "auto"), folder / f"{case}-auto")


def main(files: list[str]) -> None:
    """Each file is the whole configuration of a run, which has its name without the ending.

    No process writes the texts: another may read them.
    """
    fabric = build_fabric(TrainingConfig(accelerator="cpu", precision="32-true"))
    with ended_together(fabric):
        fabric.launch()
        for file in map(Path, files):
            train(from_dict(RunConfig, yaml.safe_load(file.read_text())), file.with_suffix(""))


if __name__ == "__main__":
    LanguageTask.sample = partialmethod(LanguageTask.sample, tokens=8)  # type: ignore[method-assign]  200 take a sharded model long
    main(sys.argv[1:])
