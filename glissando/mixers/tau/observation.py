"""What a tau mixer measures for the training log, and the warning where its attention is nearly an average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glissando.kernels.precise import double
from glissando.mixers.base import Context

from .attention import exponents

if TYPE_CHECKING:
    from .layer import Projected, Tau

#: columns of the training log; those of the first layer too, from whose energies tau is calibrated
_ENERGIES = ("energy_p05", "energy_p50", "energy_p95")
_MEASURED = (*_ENERGIES, "tau", "temperature", "attention_entropy", "effective_keys", "effective_share")
OBSERVED = (*_MEASURED, *(f"{name}/first" for name in _ENERGIES))

#: attention entropy is the mean over so many queries of a row
_QUERIES = 16
#: energies closer together than this share of their median: at T = 0.05 their lambdas give logits within 0.1
_LEAST_SPREAD = 0.02
#: at init T = 1 gives a share of 0.9999 of the keys, 0.1 gives 0.98, 0.05 gives 0.92 (chain over 64 features)
_LARGEST_SHARE = 0.95
#: of so few keys even a selective head attends to most
_FEW_KEYS = 16


class CollapseWarning(UserWarning):
    """Tau attention weighs all keys nearly alike."""


def observe_tau(mixer: Tau, x: Tensor, ctx: Context) -> dict[str, Tensor]:
    """Quantiles of the keys' energies, tau, the mean of T, and how attention spreads over the keys.

    Entropy -sum_j p_ij log p_ij in nats, effective keys exp(entropy), and their share of the keys that query i sees
    are means over heads and over at most 16 queries of each row's second half, evenly spaced.
    """
    energies = mixer.energies(x)
    keys = mixer.of_keys(energies, ctx)
    p05, p50, p95 = keys.quantile(energies.new_tensor([0.05, 0.5, 0.95])).unbind()
    projected = mixer.project(x, energies)
    counts = ctx.counts(x).unsqueeze(1)
    share = torch.linspace(0, 1, min(_QUERIES, x.shape[1] - x.shape[1] // 2), device=counts.device)
    queries = (counts // 2 + share * (counts - 1 - counts // 2)).round().long().clamp_min(0)
    entropy = attention_entropy(projected, queries)
    effective = entropy.exp()
    visible = effective / (queries.to(effective.device) + 1).unsqueeze(1)
    means = projected.temperature.mean(), entropy.mean(), effective.mean(), visible.mean()
    return dict(zip(_MEASURED, (p05, p50, p95, mixer.tau, *means), strict=True))


def attention_entropy(p: Projected, queries: Tensor) -> Tensor:
    """-sum_j p_ij log p_ij in nats (B, H, Q) float64, over the keys j <= i of the queries i at positions (B, Q)."""
    where = queries.unsqueeze(1).expand(-1, p.q.shape[1], -1)
    gap = (p.q.gather(-1, where).unsqueeze(-1) - p.k.unsqueeze(-2)).abs()
    near = double(exponents(p.k, p.importance, p.decay)).unsqueeze(-2)
    logits = near - gap.to(near.device) / double(p.temperature).view(-1, 1, 1)
    visible = torch.arange(gap.shape[-1], device=near.device) <= queries.to(near.device).unsqueeze(-1)
    return torch.special.entr(logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)).sum(-1)


def collapses(observed: Mapping[str, float]) -> dict[str, tuple[type[Warning], str]]:
    """What is wrong with the attention that was observed, by kind: `energies`, `attention`; {} if nothing is.

    Both are judged by means over the layers: one layer may well average.
    """
    collapsed = {}
    low, middle, high = (observed.get(f"energy_{q}", math.nan) for q in ("p05", "p50", "p95"))
    if high - low <= _LEAST_SPREAD * middle:
        collapsed["energies"] = (
            f"the keys' energies are nearly all the same: from their 5th to their 95th percentile they differ by "
            f"{high - low:.3g} around {middle:.3g}, and tau attention distinguishes keys by nothing else. Learn L "
            "(--model.mixer.laplacian_weights learned or diagonal), or take another --model.mixer.laplacian"
        )
    keys, share = (observed.get(name, math.nan) for name in ("effective_keys", "effective_share"))
    if share > _LARGEST_SHARE and keys > _FEW_KEYS:
        collapsed["attention"] = (
            f"attention is nearly an average: {share:.1%} of the visible keys are attended to alike. Lower the "
            f"temperature (--model.mixer.temperature; it is {observed['temperature']:.3g}), or set tau to the "
            f"energies' median if it is far from it ({observed['tau']:.3g} and {middle:.3g}; "
            "--model.mixer.calibration start)"
        )
    return {kind: (CollapseWarning, message) for kind, message in collapsed.items()}
