"""Configurations as they were written before options became tagged unions: read once, when an old run is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: options of the old schedule and calibration sections, by the kinds that used them
_SCHEDULE = {
    "warmup-cosine": {"final_ratio": "final_ratio"},
    "constant": {},
    "homeostatic": {},
    "plateau": {"plateau_factor": "factor", "plateau_cuts": "cuts", "plateau_patience": "patience"},
}
_CALIBRATION = {
    "fixed": (),
    "start": ("at_restart",),
    "periodic": ("every",),
    "drift": ("every", "drift_tolerance", "gradient_gate"),
}
_DEPTH = {
    "discrete": ("layers", "gated", "mean_gate"),
    "tied": ("layers", "n_steps", "gated"),
    "flow": ("layers", "n_steps", "control", "method", "backward", "alpha", "tolerance"),
}
_TOKENIZER = {"bytes": (), "bpe": ("vocab_size",), "file": ("path", "eos")}


def migrated(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, the contents of a config.yaml, with every section in today's form; one in that form is unchanged."""
    config = dict(config)
    for name, change in (("model", _model), ("data", _data), ("training", _training)):
        if isinstance(config.get(name), Mapping):
            config[name] = change(dict(config[name]))
    if isinstance(config.get("stages"), list):
        config["stages"] = [migrated(stage) if isinstance(stage, Mapping) else stage for stage in config["stages"]]
    return config


def _model(model: dict[str, Any]) -> dict[str, Any]:
    if "mixers" in model:
        options = model.pop("mixers") or {}
        names = model.get("mixer", "attention")
        kinds = [{"kind": name, **(options.get(name) or {})} for name in ([names] if isinstance(names, str) else names)]
        model["mixer"] = kinds[0] if isinstance(names, str) else kinds
    if isinstance(model.get("depth"), Mapping):
        model["depth"] = _depth(dict(model["depth"]))
    if model.get("positions") == "none" and model.get("max_length") is not None:
        del model["max_length"]
    return model


def _depth(depth: dict[str, Any]) -> dict[str, Any]:
    depth |= depth.pop("flow", None) or {}
    # none of a part, as a stage has it: there all options were given
    return _own(depth, str(depth.get("kind")), _DEPTH)


def _data(data: dict[str, Any]) -> dict[str, Any]:
    if "corpus" in data:
        kind = data.pop("corpus")
        shared: dict[str, Any] = {
            name: data[name] for name in ("seq_len", "batch_size", "seed", "tokenizer") if name in data
        }
        data = {"kind": kind, **shared, **(data.get(kind) or {})}
    if isinstance(data.get("tokenizer"), Mapping):
        data["tokenizer"] = _of_its_kind(data["tokenizer"], "bytes", _TOKENIZER)
    return data


def _training(training: dict[str, Any]) -> dict[str, Any]:
    schedule = training.get("schedule")
    if isinstance(schedule, Mapping) and any(name.startswith("plateau_") for name in schedule):
        kind = schedule.get("kind", "warmup-cosine")
        names = {"warmup_steps": "warmup_steps", **_SCHEDULE.get(kind, {})}
        training["schedule"] = {"kind": kind, **{new: schedule[old] for old, new in names.items() if old in schedule}}
    if isinstance(training.get("calibration"), Mapping):
        training["calibration"] = _of_its_kind(training["calibration"], "fixed", _CALIBRATION)
    return training


def _of_its_kind(section: Mapping[str, Any], default: str, options: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    kind = section.get("kind", default)
    return {"kind": kind, **_own(section, kind, options)}


def _own(section: Mapping[str, Any], kind: str, options: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """`section` without the options of other kinds, which were written with their defaults; others than these stay."""
    if kind not in options:
        return dict(section)
    foreign = {name for names in options.values() for name in names} - {*options[kind]}
    return {name: value for name, value in section.items() if name not in foreign}
