"""What the laws are tried on: every registered mixer and depth, and every preset, small enough to run in float64.

A new mixer, depth or preset appears here by itself. A mixer may add variants of its options to MIXER_VARIANTS.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from slow import slow_where
from torch import Tensor

from glissando.config import merge
from glissando.depth import DEPTHS
from glissando.mixers import MIXERS
from glissando.model import LanguageModel, ModelConfig
from glissando.presets import load_preset, preset_names

MIXER_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "grouped": {"heads": 4, "kv_heads": 2},
        "window": {"window": 5},
        "window-1": {"window": 1},
        "forget": {"forget_gate": True},
        "forget-window-grouped": {"forget_gate": True, "window": 3, "kv_heads": 1},
        "rope-on-value": {"rope_on_value": True, "rope_width": 16, "bias": True},
        "no-rope": {"rope": False, "head_size": 3},
        "previous": {"keys": "previous", "forget_gate": True},
        "previous-window": {"keys": "previous", "window": 4, "rope_on_value": True},
    },
    "delta": {
        "impulse": {"input": "impulse", "heads": 2, "horizons": [0.3, 30]},
        "previous-impulse": {"keys": "previous", "input": "impulse"},
        "previous": {"keys": "previous"},
        "rotate": {"transition": "rotate", "key_size": 6, "horizons": [2, 30]},
        "rotate-writes": {"transition": "rotate", "writes": 2, "heads": 2},
        "reflect-writes": {"transition": "reflect", "writes": 3, "heads": 2, "key_size": 3},
    },
    "liquid": {
        "impulse": {"input": "impulse", "steps": [0.02, 0.7], "adaptation": 0.9},
        "dense-impulse": {"dynamics": "dense", "state_size": 5, "input": "impulse"},
        "input-only": {"state_dependence": False, "state_size": 6},
        "coupled": {"coupled": True, "turns": "matched", "steps": [0.02, 0.7], "adaptation": 0.9},
        "published": {"layer": "published", "state_size": 8},
        "slow": {"steps": [0.01, 0.3]},
        "dense": {"dynamics": "dense", "state_size": 5},
        "dense-published": {"dynamics": "dense", "layer": "published", "state_size": 6, "state_dependence": False},
    },
    "spectral": {
        "published": {"projections": False, "filter": True, "phase_gate": True},
        "everything": {"filter": True, "phase_gate": True, "channels": 6},
    },
    "tau": {
        "gated": {"importance": True, "forget_gate": True, "output_gate": True, "laplacian_weights": "diagonal"},
        "learned": {"head_size": 6, "key_size": 5, "rope": False, "laplacian_weights": "learned"},
        "turning": {"value_rotation": 9.0, "forget_gate": True, "laplacian_weights": "diagonal"},
        "previous": {"keys": "previous", "importance": True, "forget_gate": True},
    },
}

DEPTH_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "discrete": {
        "": {},
        "-mean-gate": {"depth.mean_gate": True, "mixer": "liquid", "block.conv_width": 0},
        "-shortcuts": {"depth.shortcuts": True, "mixer": ["spectral", "delta"]},
    },
    "tied": {"": {"depth.n_steps": 5, "depth.shortcuts": True}},  # without shortcuts: presets
    "flow": {
        "": {"depth.n_steps": 3, "depth.control": ["a", "b"]},
        "-heun": {
            "depth.n_steps": 2,
            "depth.control": ["a"],
            "depth.method": "heun",
            "depth.shortcuts": True,
        },
        "-midpoint": {
            "depth.n_steps": 2,
            "depth.control": ["a"],
            "depth.method": "midpoint",
            "depth.shortcuts": True,
            "mixer": "spectral",
        },
        "-rk4": {"depth.n_steps": 1, "depth.layers": 0, "depth.method": "rk4"},
    },
}

#: published sizes are about scale; the laws are about structure
SMALL = {"vocab_size": 37, "hidden_size": 16, "depth.layers": 2}


def _overrides(preset: str) -> dict[str, Any]:
    model = load_preset(preset)["model"]
    if model.get("hidden_size", 128) < 16:
        return {}
    if model.get("depth", {}).get("kind") == "tied":
        return dict(SMALL, **{"depth.layers": model["depth"]["layers"]})
    mixer = model.get("mixer", {})
    if isinstance(mixer, list):
        return dict(SMALL, **{"depth.layers": len(mixer)})
    liquid = {"mixer.state_size": 8} if isinstance(mixer, dict) and mixer.get("kind") == "liquid" else {}
    return dict(SMALL, **liquid, **({"max_length": 64} if "max_length" in model else {}))


def model_cases() -> dict[str, dict[str, Any]]:
    """Name -> model configuration, as a mapping."""
    # Those of 124M parameters are the -nano ones, wider and deeper.
    names = [name for name in preset_names() if not name.endswith("-124m")]
    cases = {f"preset:{n}": merge(ModelConfig, load_preset(n)["model"], _overrides(n)) for n in names}
    for name in MIXERS:
        variants = {"default": {}, **MIXER_VARIANTS.get(name, {})}
        for variant, options in variants.items():
            cases[f"mixer:{name}-{variant}"] = merge(ModelConfig, SMALL, {"mixer": {"kind": name, **options}})
    for kind in [kind for kind in DEPTHS if kind != "transformers"]:  # see test_outside_models.py
        for variant, options in DEPTH_VARIANTS.get(kind, {"": {}}).items():
            cases[f"depth:{kind}{variant}"] = merge(
                ModelConfig, SMALL, {"depth.kind": kind, "block.conv_width": 3}, options
            )
    return cases


CASES = model_cases()
#: Presets consist of the mixers and depths that are cases themselves: laws that take long try them in `make slow`.
PRESETS = [case for case in CASES if case.startswith("preset:")]
#: variant: the case whose code it shares but for a few lines. Laws that take longest try it in `make slow` alone.
SHARED = {
    "mixer:attention-default": "depth:flow",
    "mixer:attention-window": "mixer:attention-previous-window",
    "mixer:attention-grouped": "mixer:attention-forget-window-grouped",
    "mixer:attention-window-1": "mixer:attention-window",
    "mixer:attention-forget": "mixer:attention-forget-window-grouped",
    "mixer:attention-rope-on-value": "mixer:attention-previous-window",
    "mixer:attention-no-rope": "depth:flow",
    "mixer:attention-previous": "mixer:attention-previous-window",
    "mixer:delta-default": "depth:discrete-shortcuts",
    "mixer:delta-impulse": "mixer:delta-previous-impulse",
    "mixer:delta-previous": "mixer:delta-previous-impulse",
    "mixer:delta-rotate": "mixer:delta-rotate-writes",
    "mixer:liquid-default": "depth:discrete-mean-gate",
    "mixer:liquid-impulse": "mixer:liquid-dense-impulse",
    "mixer:liquid-slow": "depth:discrete-mean-gate",
    "mixer:liquid-dense": "mixer:liquid-dense-impulse",
    "mixer:liquid-dense-published": "mixer:liquid-dense-impulse",
    "mixer:spectral-default": "depth:discrete-shortcuts",
    "mixer:spectral-everything": "mixer:spectral-published",
    "depth:discrete": "depth:discrete-shortcuts",
    "depth:flow-midpoint": "depth:flow-heun",
    "depth:flow-rk4": "depth:flow-heun",
}
assert {*SHARED, *SHARED.values()} <= CASES.keys()
DISTINCT = slow_where([*PRESETS, *SHARED], CASES)
#: A case of each layout of state, for what is done to states whatever a mixer computes with them.
STATES = [
    "mixer:attention-default",
    "mixer:attention-forget-window-grouped",
    "mixer:attention-previous-window",
    "mixer:delta-default",
    "mixer:delta-previous-impulse",
    "mixer:liquid-default",
    "mixer:liquid-dense-impulse",
    "mixer:liquid-published",
    "mixer:spectral-published",
    "mixer:tau-gated",
    "mixer:tau-previous",
    "depth:discrete-mean-gate",
    "depth:tied",
    "depth:flow",
]
#: A case of each mixer and of each depth.
KINDS = [c for c in CASES if c.endswith("-default") or c in ("depth:discrete", "depth:tied", "depth:flow")]


def build(case: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """The case's model in evaluation mode, with weights far enough from zero for every path to matter."""
    return _moved(case, CASES[case], dtype)


def build_one_layer(case: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """As `build`; a case of a mixer has one layer, which is all of it that a law needs. What it writes says little."""
    return _moved(case, merge(ModelConfig, CASES[case], {"depth.layers": 1} if "mixer:" in case else {}), dtype)


def _moved(case: str, config: dict[str, Any], dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(len(case))
    model = LanguageModel.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@cache
def accepts(case: str) -> frozenset[str]:
    """The signals that the case's model takes."""
    return frozenset(LanguageModel.from_config(CASES[case]).accepts)


def random_ids(model: LanguageModel, batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def weigh(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """A scalar that depends on every logit, or on every one at a real position."""
    generator = torch.Generator().manual_seed(1)
    weighted = logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    return (weighted if mask is None else weighted[mask]).sum()


def ragged(batch: int, length: int, seed: int) -> Tensor:
    """(B, T) masks: padding on the right, on the left, holes anywhere, and nothing missing, in turn."""
    generator = torch.Generator().manual_seed(seed)
    position, mask = torch.arange(length), torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        edge = int(torch.randint(1, length, (), generator=generator))
        holes = torch.rand(length, generator=generator) < 0.7
        mask[row] = [position < edge, position >= edge, holes, mask[row]][row % 4]
    return mask
