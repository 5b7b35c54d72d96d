"""Weights that take less room in a file: bfloat16, or int8 with one scale for each output channel.

    w_ij = s_i q_ij,   s_i = max_j |w_ij| / 127,   q_ij = round(w_ij / s_i)

Matrices of linear maps and embeddings alone: rates, phases and gains, which act over thousands of tokens, stay as they
are. What is loaded of them is computed with in float32 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from glissando.errors import ConfigError, unknown_name

Precision = Literal["bf16", "int8"]

#: what stands behind the name of a matrix in a file: its numbers and their scales
_NUMBERS, _SCALES = ".int8", ".int8_scale"


def matrices(model: nn.Module) -> set[str]:
    """The names of the weights of linear maps and embeddings."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }


def reduced(model: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """The model's state dict with its matrices in `precision`."""
    chosen, weights = matrices(model), {}
    for name, value in model.state_dict().items():
        if name not in chosen:
            weights[name] = value
        elif precision == "bf16":
            weights[name] = value.to(torch.bfloat16)
        else:
            weights[name + _NUMBERS], weights[name + _SCALES] = quantised(value)
    return weights


@torch.no_grad()
def round_weights(model: nn.Module, precision: Precision) -> None:
    """Round the model's matrices in place: what reads the model computes with the rounded numbers in float32, and the
    compiled decoding step keeps them in as few bytes.

    Raises ConfigError for a model that was rounded to another precision before, UnknownNameError for another precision.
    """
    if precision not in get_args(Precision):
        raise unknown_name("precision of weights", precision, get_args(Precision))
    if model.weights_precision not in ("float32", precision):
        raise ConfigError(
            f"the model's weights are in {model.weights_precision} already, and were asked for in {precision}: load it "
            "anew"
        )
    for name in matrices(model):
        weight = model.get_parameter(name)
        weight.copy_(_rounded(weight, precision))
    model.weights_precision = precision  # type: ignore[assignment]


@torch.no_grad()
def is_rounded(model: nn.Module, precision: Precision) -> bool:
    """Whether rounding the matrices would change nothing, to rounding in float32."""
    return all(
        torch.allclose(_rounded(weight, precision), weight, rtol=1e-6, atol=0.0)
        for weight in (model.get_parameter(name) for name in matrices(model))
    )


def _rounded(weight: Tensor, precision: Precision) -> Tensor:
    if precision == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    numbers, scale = quantised(weight)
    return numbers.float() * scale.unsqueeze(1)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (N, M) -> int8 (N, M) and scales (N,) float32; a row of zeros has the scale 1."""
    scale = weight.detach().abs().amax(1).float() / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight.detach().float() / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale


def restored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a file, with matrices that are in int8 as float32 ones."""
    whole = {name: value for name, value in weights.items() if not name.endswith((_NUMBERS, _SCALES))}
    for name in weights.keys() - whole.keys():
        if name.endswith(_NUMBERS):
            base = name.removesuffix(_NUMBERS)
            whole[base] = weights[name].float() * weights[base + _SCALES].float().unsqueeze(1)
    return whole
