"""What a tau mixer measures for the training log."""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.mixers import Context, Tau
from glissando.mixers.tau_cache import Projected
from glissando.ops.tau_attention import exponents

#: attention entropy is the mean over so many queries of a row
_QUERIES = 16


def observe_tau(mixer: Tau, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
    """Quantiles of the keys' energies, tau, the mean of T, and how attention spreads over the keys.

    Entropy -sum_j p_ij log p_ij in nats, effective keys exp(entropy), and their share of the keys that query i sees
    are means over heads and over at most 16 queries of each row's second half, evenly spaced.
    """
    energies = mixer.energies(x)
    keys = energies[..., -mixer.heads :]
    keys = keys.flatten(0, 1) if ctx.mask is None else keys[ctx.mask]
    p05, p50, p95 = keys.quantile(energies.new_tensor([0.05, 0.5, 0.95])).unbind()
    projected = mixer.project(x, energies)
    queries = _late_positions(ctx.counts(x), min(_QUERIES, x.shape[1] - x.shape[1] // 2))
    entropy = attention_entropy(projected, queries)
    effective = entropy.exp()
    share = effective / (queries + 1).unsqueeze(1)
    return p05, p50, p95, mixer.tau, projected.temperature.mean(), entropy.mean(), effective.mean(), share.mean()


def attention_entropy(p: Projected, queries: Tensor) -> Tensor:
    """-sum_j p_ij log p_ij in nats (B, H, Q) float64, over the keys j <= i of the queries i at positions (B, Q)."""
    where = queries.unsqueeze(1).expand(-1, p.q.shape[1], -1)
    gap = (p.q.gather(-1, where).unsqueeze(-1) - p.k.unsqueeze(-2)).abs()
    near = exponents(p.k, p.importance, p.decay).unsqueeze(-2)
    logits = near - gap / p.temperature.double().view(-1, 1, 1)
    visible = torch.arange(gap.shape[-1], device=gap.device) <= queries.unsqueeze(-1)
    return torch.special.entr(logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)).sum(-1)


def _late_positions(counts: Tensor, number: int) -> Tensor:
    """(B, number) int64: positions of the second half of rows with counts (B,) real tokens, evenly spaced."""
    first = counts.unsqueeze(1) // 2
    share = torch.linspace(0, 1, number, device=counts.device)
    return (first + share * (counts.unsqueeze(1) - 1 - first)).round().long().clamp_min(0)
