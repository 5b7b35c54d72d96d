"""Of a tau mixer: how many keys its attention is spread over, and their lambdas."""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.evaluation.looks.base import MIXER_LOOKS, MixerLook
from glissando.mixers import Context, Tau
from glissando.observation.tau import attention_entropy


def _effective_keys(mixer: Tau, x: Tensor, ctx: Context) -> Tensor:
    queries = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    return attention_entropy(mixer.project(x, mixer.energies(x)), queries)[0].exp().mean(0)


def _lambdas(mixer: Tau, x: Tensor, ctx: Context) -> Tensor:
    return mixer.project(x, mixer.energies(x)).k[0].mean(0)


MIXER_LOOKS[Tau] = (
    MixerLook(
        "effective_keys",
        "Effective keys",
        "Among how many earlier tokens a layer's attention is spread: exp of its entropy, the mean over heads.",
        "tokens",
        True,
        _effective_keys,
    ),
    MixerLook(
        "lambda",
        "Lambda of the keys",
        "The one number by which a key is found, E / (E + tau) in [0, 1): the mean over heads.",
        "",
        False,
        _lambdas,
    ),
)
